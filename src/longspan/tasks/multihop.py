"""Answers with their evidence, over several paragraphs: HotpotQA's scheme.

One model says which paragraphs matter, which sentences are evidence, of which kind the answer is
(yes, no, or a span) and where the span stands. Question and the tokens that stand for paragraphs
and sentences are global. A context that is longer than the model is read in pieces of whole
paragraphs; what they score is compared over all of them. In two stages, the paragraphs that a first
model finds to matter are read once more, by themselves, by a second.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedModel

from longspan.data.examples import Skips, Splits, read_examples
from longspan.data.tables import Row
from longspan.models import LongspanForMultihop
from longspan.tasks.answers import best_answers, read_candidates
from longspan.tasks.base import QuestionTask, check_recipe
from longspan.tasks.documents import Reach, beyond, check_room, collate, reach
from longspan.tasks.evidence import Found, choose_evidence, describe, facts
from longspan.tasks.hops import KINDS, Hop, read_hop
from longspan.tasks.measures import joint_scores
from longspan.tasks.paragraphs import (
    TOKENS,
    Asked,
    Layout,
    cut,
    encode,
    lay_out,
    make_layout_template,
    right_answers,
)
from longspan.tasks.spans import or_loss
from longspan.tasks.start import add_tokens, build_model, load_tokenizer
from longspan.train.finetuning import Finetuning
from longspan.train.task import Goal, Loss

_JOINT = ("joint_f1", "joint_exact", "f1", "exact", "evidence_f1", "evidence_exact")
# Of the paragraphs that matter, how many a second stage would be given.
_KEPT = "paragraphs_kept"
MEASURES = (*_JOINT, _KEPT)


class Scores(NamedTuple):
    """Of everything in a batch, in the order of its layouts."""

    start: Tensor
    end: Tensor
    kind: Tensor  # [questions, kinds]
    paragraphs: Tensor
    sentences: Tensor


class Reasoner:
    """Questions and paragraphs to answers with evidence: what prediction needs."""

    needs = ("text", "question")

    def __init__(self, recipe: Finetuning, tokenizer: Any) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        self.template = make_layout_template(tokenizer)
        self.first: tuple[Reasoner, Any] | None = None  # of two stages, with its model

    @staticmethod
    def unfold(row: Row, columns: Mapping[str, str]) -> Iterator[Row]:
        """A row is one question."""
        yield row

    def check_length(self, asked: Sequence[Asked]) -> Reach:
        """How many questions do not fit with their paragraphs, or an error if none may."""
        for one in asked:
            check_room(one.question, self.recipe, self.template, self.tokenizer, "paragraphs")
        sizes = [one.size + self.template.size for one in asked]
        found = reach(sizes, self.recipe.model.length)
        found.check(self.recipe.too_long)
        return found

    def collate(self, asked: Sequence[Asked]) -> tuple[dict[str, Tensor], list[Layout]]:
        """What the model takes and what is right, and where everything stands in it.

        `tokens`, `paragraphs` and `sentences` are places to be scored; `group` says whose a token
        is, `piece` whose a piece is.
        """
        own = [cut(one, self.recipe, self.template) for one in asked]
        every = [piece for cuts in own for piece in cuts]
        batch, begins = collate(
            every,
            packed=self.recipe.packed,
            pad_id=self.tokenizer.pad_token_id,
            types=self.template.has_types,
        )
        fronts = [np.arange(b, b + piece.begin) for b, piece in zip(begins, every, strict=True)]
        layouts = []
        for one, cuts in zip(asked, own, strict=True):
            at, begins = begins[: len(cuts)], begins[len(cuts) :]
            layouts.append(lay_out(one, cuts, at))
        pairs = list(zip(asked, layouts, strict=True))
        starts, ends = np.concatenate([right_answers(*pair) for pair in pairs], axis=1)
        parts = {
            "tokens": _join(at.tokens for at in layouts),
            "group": _join(np.full(len(at.tokens), n) for n, at in enumerate(layouts)),
            "paragraphs": _join(at.titles for at in layouts),
            "sentences": _join(at.ends for at in layouts),
            "piece": _join(np.full(len(cuts), n) for n, cuts in enumerate(own)),
        }
        right = {
            "starts": torch.from_numpy(starts),
            "ends": torch.from_numpy(ends),
            "kind": torch.tensor([one.kind for one in asked]),
            "relevant": _join([one.parts[p].relevant for p in at.paragraphs] for one, at in pairs),
            "evidence": _join(
                [one.parts[p].evidence[n] for p, n in at.sentences] for one, at in pairs
            ),
        }
        wide = torch.zeros_like(batch["input_ids"])
        wide.view(-1)[self._global(fronts, parts)] = 1
        pieces = torch.tensor([len(cuts) for cuts in own])
        return batch | parts | right | {"global_attention_mask": wide, "pieces": pieces}, layouts

    def _global(self, fronts: list[np.ndarray], parts: dict[str, Tensor]) -> Tensor:
        """Places of global tokens: question, paragraphs and sentences, or what the recipe says."""
        chosen = self.recipe.model.global_tokens
        if chosen == "none":
            return _join([[]])
        if chosen == "first":
            return _join(front[:1] for front in fronts)
        if chosen == "question":
            return _join(fronts)
        return torch.cat([_join(fronts), parts["paragraphs"], parts["sentences"]])

    def scores(self, model: Any, batch: dict[str, Tensor]) -> Scores:
        names = ("input_ids", "attention_mask", "cu_seqlens", "token_type_ids")
        names += ("global_attention_mask", "paragraphs", "sentences")
        done = model(**{name: batch[name] for name in names if name in batch})
        kinds = done.kind_logits.float()
        sums = kinds.new_zeros(len(batch["pieces"]), kinds.shape[1])
        return Scores(
            done.start_logits.float().flatten()[batch["tokens"]],
            done.end_logits.float().flatten()[batch["tokens"]],
            sums.index_add(0, batch["piece"], kinds) / batch["pieces"][:, None],
            done.paragraph_logits.float(),
            done.sentence_logits.float(),
        )

    @torch.no_grad()
    def find(self, model: Any, asked: Sequence[Asked]) -> list[Found]:
        """Answer and evidence for each question."""
        batch, layouts = self.collate(asked)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        # What is left to do is much for the host to ask for, and little to compute.
        scores = Scores(*(one.cpu() for one in self.scores(model, batch)))
        found = []
        for number, (start, end, paragraphs, sentences) in enumerate(
            zip(
                scores.start.split([len(one.tokens) for one in layouts]),
                scores.end.split([len(one.tokens) for one in layouts]),
                scores.paragraphs.split([len(one.titles) for one in layouts]),
                scores.sentences.split([len(one.ends) for one in layouts]),
                strict=True,
            )
        ):
            at, settings = layouts[number], self.recipe.answers
            unit = torch.from_numpy(at.unit.astype(np.int64))
            spans = []
            if len(start):
                best = best_answers(start, end, settings.longest, settings.best, unit)
                spans = [
                    (*at.within[a], at.within[b, 1], score)
                    for a, b, score in read_candidates([best])[0]
                ]
            by_paragraph = dict(zip(at.paragraphs.tolist(), paragraphs.tolist(), strict=True))
            pairs = [(int(p), int(s)) for p, s in at.sentences]
            by_sentence = dict(zip(pairs, sentences.tolist(), strict=True))
            kind = KINDS[int(scores.kind[number].argmax())]
            total = float(start.logsumexp(0) + end.logsumexp(0)) if len(start) else 0.0
            evidence = choose_evidence(by_paragraph, by_sentence)
            found.append(Found(kind, spans, total, evidence, by_paragraph, by_sentence))
        return found

    def choose(self, model: Any, asked: Sequence[Asked]) -> list[list[int]]:
        """The paragraphs of each question that a second stage shall read, the best first."""
        size = self.recipe.evaluation.batch
        return [
            self._worth_reading(found)
            for first in range(0, len(asked), size)
            for found in self.find(model, asked[first : first + size])
        ]

    def _worth_reading(self, found: Found) -> list[int]:
        settings, scores = self.recipe.hops, found.paragraphs
        best = sorted(scores, key=lambda place: -scores[place])[: settings.keep]
        return [p for n, p in enumerate(best) if n < 2 or scores[p] > settings.above]

    def predict(self, model: Any, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """For each row its answer, where that stands, and the sentences it follows from."""
        made: list[dict[str, Any]] = []
        for row in rows:
            hop = read_hop(row, self.recipe.data.columns, answered=False)
            flaw = hop.flaw(answered=False)
            if flaw:
                made.append({"skipped": flaw})
                continue
            asked = encode(self.tokenizer, [hop])
            cut_off: dict[str, int] = {}
            try:
                if self.first is not None:
                    self.first[0].check_length(asked)
                    cut_off |= self.first[0].beyond(asked[0])
                    asked = [asked[0].choose(self.first[0].choose(self.first[1], asked)[0])]
                self.check_length(asked)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from None
            cut_off |= self.beyond(asked[0])
            made.append({**describe(hop, asked[0], self.find(model, asked)[0]), **cut_off})
        return made

    def beyond(self, asked: Asked) -> dict[str, int]:
        """What a prediction says of paragraphs that were not read at once."""
        size = sum(len(part.ids) for part in asked.read)
        return beyond(size, cut(asked, self.recipe, self.template))


class Multihop(Reasoner, QuestionTask):
    """The task of a recipe: its questions, its model, and how well they are answered."""

    reader = Reasoner

    def __init__(self, recipe: Finetuning) -> None:
        source = check_recipe(recipe, MEASURES)
        tokenizer = load_tokenizer(source)
        self.added = add_tokens(tokenizer, TOKENS)
        super().__init__(recipe, tokenizer)
        self.skips = Skips()
        self.goal = Goal(recipe.measure, recipe.measure.replace("_", " "))
        self.hops = read_examples(recipe.data, self._understand, self.skips)
        self.asked = Splits(*(encode(tokenizer, split) for split in self.hops))
        self._settle(recipe)

    def before(self) -> Self | None:
        """A first stage is as good as what it chooses, whatever it would answer by itself."""
        if self.recipe.hops.stages == 1:
            return None
        hops = replace(self.recipe.hops, stages=1)
        first = self.again(replace(self.recipe, hops=hops, measure=_KEPT))
        first.goal = Goal(_KEPT, _KEPT.replace("_", " "))
        return first

    def take(self, first: Reasoner, model: Any) -> None:
        """Read from now on what the first stage chooses; when training, what matters with it."""
        splits = []
        for name, split in self.asked._asdict().items():
            made = []
            for one, chosen in zip(split, first.choose(model, split), strict=True):
                matter = [place for place, part in enumerate(one.parts) if part.relevant]
                ranked = dict.fromkeys([*(matter if name == "train" else []), *chosen])
                made.append(one.choose(list(ranked)[: max(len(matter), self.recipe.hops.keep)]))
            splits.append(made)
        self.asked = Splits(*splits)
        self.reach = self.check_length([one for split in self.asked for one in split])
        self._order = self.draw(self.recipe)

    def notes(self) -> list[str]:
        """What a user should know before training begins."""
        sizes = ", ".join(f"{len(own):,} {name}" for name, own in self.asked._asdict().items())
        found = [f"questions: {sizes}", *self.skips.lines()]
        hops = [one for split in self.hops for one in split]
        asked = [one for split in self.asked for one in split]
        lost = sum(
            not {title for title, _ in hop.facts} <= {own.title for own in hop.paragraphs}
            for hop in hops
        )
        if lost:
            share = f"{lost:,} of {len(hops):,} questions ({lost / len(hops):.1%})"
            found.append(f"{share} lack a paragraph that their answer follows from; they count")
        counts = [{own.title: len(own.sentences) for own in hop.paragraphs} for hop in hops]
        unsaid = sum(
            any(not 0 <= number < known.get(title, number + 1) for title, number in hop.facts)
            for hop, known in zip(hops, counts, strict=True)
        )
        if unsaid:
            share = f"{unsaid:,} of {len(hops):,} questions ({unsaid / len(hops):.1%})"
            found.append(
                f"{share} have evidence in a sentence that its paragraph lacks; they count"
            )
        nowhere = sum(hop.kind == KINDS[0] and not hop.places() for hop in hops)
        if nowhere:
            share = f"{nowhere:,} of {len(hops):,} questions ({nowhere / len(hops):.1%})"
            found.append(f"{share} have an answer that is in no paragraph it follows from")
        read = sum(len(one.chosen) for one in asked)
        if read < sum(len(one.parts) for one in asked):
            found.append(f"the first stage chose {read / len(asked):.1f} paragraphs a question")
        return [*found, *([self.reach.share(self.recipe.too_long)] if self.reach.too_long else [])]

    def lengths(self, split: str) -> np.ndarray:
        """Tokens to read for each question."""
        return np.array([one.size + self.template.size for one in getattr(self.asked, split)])

    def _understand(self, row: Row) -> Iterator[Hop]:
        hop = read_hop(row, self.recipe.data.columns, answered=True)
        flaw = hop.flaw(answered=True)
        if flaw:
            self.skips.add(flaw, row.where)
        else:
            yield hop

    def build(self) -> PreTrainedModel:
        return build_model(
            self.recipe.model,
            LongspanForMultihop,
            self.tokenizer,
            self.added,
            id2label=dict(enumerate(KINDS)),
            label2id={kind: number for number, kind in enumerate(KINDS)},
        )

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        return self.collate([self.asked.train[p] for p in self._order.take(step, rows)])[0], True

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss:
        scores, group, count = self.scores(model, batch), batch["group"], len(batch["pieces"])
        losses = (
            (
                or_loss(scores.start, batch["starts"], group, count)
                + or_loss(scores.end, batch["ends"], group, count)
            ).mean()
            / 2,
            cross_entropy(scores.kind, batch["kind"]),
            _binary(scores.paragraphs, batch["relevant"]),
            _binary(scores.sentences, batch["evidence"]),
        )
        weights = self.recipe.hops.weights
        total = torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum()
        return Loss(total, total.detach())

    def evaluate(self, model: PreTrainedModel, split: str, limit: int = 0) -> dict[str, float]:
        means = self._sheet(model, split, limit).mean(axis=0)
        return dict(zip(MEASURES, means.tolist(), strict=True))

    def sheet(self, model: Any, split: str) -> np.ndarray:
        return self._sheet(model, split)

    def _sheet(self, model: Any, split: str, limit: int = 0) -> np.ndarray:
        """HotpotQA's measures of each question, and what its first stage is judged by."""
        model.eval()
        asked: list[Asked] = getattr(self.asked, split)[: limit or None]
        hops: list[Hop] = getattr(self.hops, split)[: limit or None]
        size = self.recipe.evaluation.batch
        found: list[Found] = []
        for first in range(0, len(asked), size):
            found += self.find(model, asked[first : first + size])
        rows = []
        for hop, one, own in zip(hops, asked, found, strict=True):
            answer = describe(hop, one, own)["answer"]
            scores = joint_scores(answer, hop.answer, facts(hop, own), hop.facts)
            matter = {place for place, part in enumerate(one.parts) if part.relevant}
            kept = matter.intersection(self._worth_reading(own))
            rows.append(
                [*(scores[name] for name in _JOINT), len(kept) / len(matter) if matter else 1.0]
            )
        return np.array(rows)

    def mark(self, sheet: np.ndarray) -> float:
        return float(sheet[:, MEASURES.index(self.recipe.measure)].mean())

    def sample(self, model: PreTrainedModel) -> str:
        """What is answered to a validation question."""
        model.eval()
        hop, asked = self.hops.valid[0], self.asked.valid[0]
        found = self.find(model, [asked])[0]
        return f"{hop.question} -> {describe(hop, asked, found)['answer']!r}"


def _join(arrays: Iterable[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate(list(arrays)).astype(np.int64))


def _binary(scores: Tensor, right: Tensor) -> Tensor:
    """The mean loss; 0 of none, where the beginning that is read has no whole sentence."""
    total = binary_cross_entropy_with_logits(scores, right.float(), reduction="sum")
    return total / max(1, len(scores))
