"""The best of given answers: WikiHop's scheme.

    <s> [question] ... [/question] [ent] choice [/ent] [ent] choice [/ent] ... </s> text </s> ...

Question and choices are global. A choice has the score of its [ent] token; a text that is longer
than the model is read in pieces, each behind the same question, and scores are the mean over them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.data.examples import Skips, Splits, read_examples
from longspan.data.tables import Row
from longspan.models import LongspanForTokenClassification
from longspan.tasks.base import QuestionTask, check_recipe
from longspan.tasks.choices import Offer, read_offer, unfold_offers
from longspan.tasks.documents import (
    Reach,
    Template,
    check_room,
    cut_off,
    make_template,
    reach,
    read_whole,
)
from longspan.tasks.documents import tokenize as tokenize_texts
from longspan.tasks.spans import or_loss
from longspan.tasks.start import add_tokens, build_model, load_tokenizer
from longspan.train.finetuning import Finetuning
from longspan.train.task import Goal, Loss

MEASURES = ("accuracy",)
TOKENS = ("[question]", "[/question]", "[ent]", "[/ent]")


class Asked(NamedTuple):
    """A question as tokens."""

    front: np.ndarray  # question and choices, with their special tokens
    choices: np.ndarray  # where in it each choice begins
    document: np.ndarray  # all texts, with separators between them
    right: np.ndarray  # [choices] of bool


class Chooser:
    """Questions, texts and choices to scores: what prediction needs, and training builds on."""

    needs = ("text", "question", "choices")
    unfold = staticmethod(unfold_offers)

    def __init__(self, recipe: Finetuning, tokenizer: Any) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        usual = make_template(tokenizer, pair=True)
        if tokenizer.sep_token_id is None:
            raise ValueError(f"{type(tokenizer).__name__} has no separator between texts")
        self.template = Template(
            usual.before, [tokenizer.sep_token_id], usual.after, usual.has_types
        )

    def read(self, row: Row, answered: bool) -> Offer:
        return read_offer(row, self.recipe.data.columns, self.recipe.data.separator, answered)

    def encode(self, offers: Sequence[Offer]) -> list[Asked]:
        question, end, choice, stop = self.tokenizer.convert_tokens_to_ids(TOKENS)
        # With a space in front, so that words are the same tokens as within a text.
        asked = self._tokenize([f" {one.question}" for one in offers])
        listed = iter(self._tokenize([f" {text}" for one in offers for text in one.choices]))
        texts = list(dict.fromkeys(text for one in offers for text in one.texts))
        read = dict(zip(texts, self._tokenize(texts), strict=True))
        documents: dict[tuple[str, ...], np.ndarray] = {}  # questions about a text share it
        found = []
        for one, ids in zip(offers, asked, strict=True):
            parts, places, size = [[question], ids, [end]], [], len(ids) + 2
            for _ in one.choices:
                own = next(listed)
                places.append(size)
                parts += [[choice], own, [stop]]
                size += len(own) + 2
            if one.texts not in documents:
                joined = [
                    part for text in one.texts for part in (self.template.between, read[text])
                ]
                documents[one.texts] = np.concatenate(joined[1:])
            right = np.zeros(len(places), dtype=bool)
            right[list(one.right)] = True
            front = np.concatenate(parts).astype(np.int32)
            found.append(Asked(front, np.array(places), documents[one.texts], right))
        return found

    def _tokenize(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [one.ids for one in tokenize_texts(self.tokenizer, texts)]

    def size(self, asked: Asked) -> int:
        """Tokens to read, special ones included."""
        return len(asked.front) + len(asked.document) + self.template.size

    def check_length(self, asked: Sequence[Asked]) -> Reach:
        """How many questions do not fit with their text, or an error if none may."""
        words = "text", "a question with its choices"
        for one in asked:
            check_room(one.front, self.recipe, self.template, self.tokenizer, *words)
        found = reach([self.size(one) for one in asked], self.recipe.model.length)
        found.check(self.recipe.too_long)
        return found

    def collate(self, asked: Sequence[Asked]) -> dict[str, Tensor]:
        """Pieces of all questions; `place` says where their [ent] tokens stand, `choice` which of
        all choices they score, `group` whose choice that is, `right` whether it is right."""
        own, batch, begins = read_whole(
            [one.document for one in asked],
            self.recipe,
            self.template,
            self.tokenizer.pad_token_id,
            [one.front for one in asked],
        )
        counts = [len(one.choices) for one in asked]
        firsts = np.cumsum([0, *counts])
        place, choice = [], []
        for number, (one, cuts) in enumerate(zip(asked, own, strict=True)):
            at, begins = begins[: len(cuts)], begins[len(cuts) :]
            for begin in at:
                place.append(one.choices + begin + len(self.template.before))
                choice.append(np.arange(counts[number]) + firsts[number])
        return batch | {
            "place": torch.from_numpy(np.concatenate(place)),
            "choice": torch.from_numpy(np.concatenate(choice)),
            "group": torch.arange(len(asked)).repeat_interleave(torch.tensor(counts)),
            "right": torch.from_numpy(np.concatenate([one.right for one in asked])),
            "pieces": torch.tensor([len(cuts) for cuts in own]),
        }

    def scores(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """[choices of all questions], the mean over the pieces of each."""
        names = ("input_ids", "attention_mask", "cu_seqlens", "token_type_ids")
        done = model(**{name: batch[name] for name in names if name in batch})
        found = done.logits.float().flatten()[batch["place"]]
        sums = found.new_zeros(len(batch["group"])).index_add(0, batch["choice"], found)
        return sums / batch["pieces"][batch["group"]]

    @torch.no_grad()
    def choose(self, model: Any, asked: Sequence[Asked]) -> list[Tensor]:
        """The scores of each question's choices."""
        batch = {name: tensor.to(model.device) for name, tensor in self.collate(asked).items()}
        scores = self.scores(model, batch).cpu()
        return list(scores.split([len(one.choices) for one in asked]))

    def predict(self, model: Any, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """For each row the best choice, and the probability of every one."""
        made: list[dict[str, Any]] = []
        for row in rows:
            offer = self.read(row, answered=False)
            flaw = offer.flaw(answered=False)
            if flaw:
                made.append({"skipped": flaw})
                continue
            asked = self.encode([offer])
            try:
                self.check_length(asked)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from None
            chances = self.choose(model, asked)[0].softmax(dim=0)
            best = int(chances.argmax())
            candidates = [
                {"text": text, "probability": chance}
                for text, chance in zip(offer.choices, chances.tolist(), strict=True)
            ]
            chosen = {"answer": offer.choices[best], "choice": best, "candidates": candidates}
            unread = cut_off(asked[0].document, self.recipe, self.template, asked[0].front)
            made.append({**chosen, **unread})
        return made


class Choice(Chooser, QuestionTask):
    """The task of a recipe: its questions, its model, and how often it chooses rightly."""

    reader = Chooser

    def __init__(self, recipe: Finetuning) -> None:
        source = check_recipe(recipe, MEASURES)
        tokenizer = load_tokenizer(source)
        self.added = add_tokens(tokenizer, TOKENS)
        super().__init__(recipe, tokenizer)
        self.skips = Skips()
        self.goal = Goal(recipe.measure, recipe.measure)
        self.offers = read_examples(
            recipe.data, self._understand, self.skips, about=lambda one: one.texts
        )
        self.asked = Splits(*(self.encode(split) for split in self.offers))
        self._settle(recipe)

    def notes(self) -> list[str]:
        """What a user should know before training begins."""
        sizes = ", ".join(f"{len(own):,} {name}" for name, own in self.asked._asdict().items())
        counts = [len(one.choices) for split in self.asked for one in split]
        few, many = min(counts), max(counts)
        choices = f"{few} choices each" if few == many else f"{few} to {many} choices each"
        found = [f"questions: {sizes}; {choices}", *self.skips.lines()]
        return [*found, *([self.reach.share(self.recipe.too_long)] if self.reach.too_long else [])]

    def lengths(self, split: str) -> np.ndarray:
        """Tokens to read for each question."""
        return np.array([self.size(one) for one in getattr(self.asked, split)])

    def about(self, split: str) -> list[tuple[str, ...]]:
        return [one.texts for one in getattr(self.offers, split)]

    def _understand(self, row: Row) -> Iterator[Offer]:
        for one in self.unfold(row, self.recipe.data.columns):
            offer = self.read(one, answered=True)
            flaw = offer.flaw(answered=True)
            if flaw:
                self.skips.add(flaw, one.where)
            else:
                yield offer

    def build(self) -> PreTrainedModel:
        # Longformer's last layer has no bias; one would be the same for all choices.
        start = self.recipe.model
        return build_model(
            replace(start, global_tokens=start.global_tokens or "question"),
            LongspanForTokenClassification,
            self.tokenizer,
            self.added,
            id2label={0: "score"},
            label2id={"score": 0},
        )

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        return self.collate([self.asked.train[p] for p in self._order.take(step, rows)]), True

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss:
        scores, count = self.scores(model, batch), len(batch["pieces"])
        total = or_loss(scores, batch["right"], batch["group"], count).mean()
        return Loss(total, total.detach())

    def evaluate(self, model: PreTrainedModel, split: str, limit: int = 0) -> dict[str, float]:
        sheet = self._sheet(model, split, limit)
        return {"accuracy": self.mark(sheet), "loss": float(sheet[:, 1].mean())}

    def sheet(self, model: Any, split: str) -> np.ndarray:
        return self._sheet(model, split)

    def _sheet(self, model: Any, split: str, limit: int = 0) -> np.ndarray:
        """Whether the choice is right, and the loss."""
        model.eval()
        asked: list[Asked] = getattr(self.asked, split)[: limit or None]
        size, found = self.recipe.evaluation.batch, []
        for first in range(0, len(asked), size):
            group = asked[first : first + size]
            for one, scores in zip(group, self.choose(model, group), strict=True):
                chances = scores.log_softmax(dim=0)
                right = torch.from_numpy(one.right)
                loss = -float(chances[right].logsumexp(dim=0))
                found.append([float(one.right[int(scores.argmax())]), loss])
        return np.array(found)

    def mark(self, sheet: np.ndarray) -> float:
        return float(sheet[:, 0].mean())

    def sample(self, model: PreTrainedModel) -> str:
        """What is chosen for a validation question."""
        model.eval()
        offer, asked = self.offers.valid[0], self.asked.valid[0]
        best = int(self.choose(model, [asked])[0].argmax())
        return f"{offer.question} -> {offer.choices[best]!r}"
