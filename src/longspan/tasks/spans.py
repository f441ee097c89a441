"""Answers within documents of any length: extractive question answering.

A document is read in as many overlapping pieces as it needs, each with the question in front. Every
token has one score, from the piece in which it stands farthest from an edge, and all of them are
normalised together, so that answers from different pieces compete. The first token of each piece
stands for "there is no answer".
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.data.examples import Skips, Splits, read_examples
from longspan.data.tables import Row
from longspan.models import LongspanForQuestionAnswering
from longspan.tasks.answers import (
    Answer,
    Found,
    best_answers,
    best_threshold,
    measure,
    read_candidates,
    scores,
)
from longspan.tasks.base import QuestionTask, check_recipe
from longspan.tasks.documents import (
    Tokens,
    check_room,
    cut_off,
    make_template,
    reach,
    read_whole,
    tokenize,
)
from longspan.tasks.questions import Question, read_questions, unfold_questions
from longspan.tasks.start import build_model, load_tokenizer
from longspan.train.finetuning import Finetuning
from longspan.train.task import Goal, Loss

MEASURES = ("f1", "exact", "best_f1", "best_exact")
_READ = ("input_ids", "attention_mask", "cu_seqlens", "token_type_ids")  # by the model


class Asked(NamedTuple):
    """A question as tokens, and its document's."""

    question: np.ndarray
    document: Tokens
    starts: np.ndarray  # the document's tokens at which right answers begin
    ends: np.ndarray  # and end, the last included


class Finder:
    """Questions and texts to answers: what prediction needs, and training builds on."""

    needs = ("text", "question")
    unfold = staticmethod(unfold_questions)

    def __init__(self, recipe: Finetuning, tokenizer: Any) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        self.template = make_template(tokenizer, pair=True)
        self.threshold = recipe.answers.threshold or 0.0

    def collate(self, asked: Sequence[Asked]) -> dict[str, Tensor]:
        """Pieces of all questions; `place` says where the scores to be compared stand, `group`
        whose they are, `starts` and `ends` which of them are right.

        Of each question there come first the scores for no answer, then the document's tokens.
        """
        own, batch, begins = read_whole(
            [one.document.ids for one in asked],
            self.recipe,
            self.template,
            self.tokenizer.pad_token_id,
            [one.question for one in asked],
        )
        place, group, right = [], [], []
        for number, (one, cuts) in enumerate(zip(asked, own, strict=True)):
            at, begins = begins[: len(cuts)], begins[len(cuts) :]
            places = [np.array(at)]
            for begin, piece in zip(at, cuts, strict=True):
                shift = begin + piece.begin - piece.span[0]
                places.append(np.arange(*piece.owned) + shift)
            place.append(np.concatenate(places))
            group.append(np.full(len(place[-1]), number))
            targets = np.zeros((2, len(place[-1])), dtype=bool)
            for row, tokens in zip(targets, (one.starts, one.ends), strict=True):
                seen = tokens[tokens < cuts[-1].owned[1]]  # "head" may leave some unread
                row[seen + len(cuts)] = True
            if not targets.any(axis=1).all():  # what was read holds no answer
                targets[:] = np.arange(targets.shape[1]) < len(cuts)
            right.append(targets)
        starts, ends = torch.from_numpy(np.concatenate(right, axis=1))
        return batch | {
            "place": torch.from_numpy(np.concatenate(place)),
            "group": torch.from_numpy(np.concatenate(group)),
            "starts": starts,
            "ends": ends,
            "pieces": torch.tensor([len(cuts) for cuts in own]),
        }

    def scores(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits of starts and of ends at every `place`."""
        done = model(**{name: batch[name] for name in _READ if name in batch})
        start, end = done.start_logits.float(), done.end_logits.float()
        return start.flatten()[batch["place"]], end.flatten()[batch["place"]]

    def find(self, model: Any, asked: Sequence[Asked]) -> list[Found]:
        """The best candidates for each question, as tokens, with the score of no answer."""
        batch = self.collate(asked)
        sizes = batch["group"].bincount(minlength=len(asked)).tolist()
        counts = batch["pieces"].tolist()
        given = {name: batch[name].to(model.device) for name in (*_READ, "place") if name in batch}
        with torch.no_grad():
            start, end = self.scores(model, given)
        settings = self.recipe.answers
        some, sums = [], []
        for s, e, count in zip(start.split(sizes), end.split(sizes), counts, strict=True):
            some.append(best_answers(s[count:], e[count:], settings.longest, settings.best))
            sums.append(s[:count].logsumexp(0) + e[:count].logsumexp(0))
            sums.append(s.logsumexp(0) + e.logsumexp(0))
        # Only now the device is waited for, once for all questions.
        totals = iter(torch.stack(sums).tolist())
        return [Found(own, next(totals), next(totals)) for own in read_candidates(some)]

    def predict(self, model: Any, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """For each row its answer, or an empty one, and the candidates, with their characters."""
        columns = self.recipe.data.columns
        texts = [row.text(columns.get("text", "text")) for row in rows]
        questions = [row.text(columns.get("question", "question")).strip() for row in rows]
        known = list(dict.fromkeys(texts))  # of which a contract has a row for each question
        tokens = dict(zip(known, tokenize(self.tokenizer, known), strict=True))
        words = tokenize(self.tokenizer, questions)
        none = np.zeros(0, dtype=np.int64)
        made: list[dict[str, Any]] = []
        for row, text, question in zip(rows, texts, words, strict=True):
            document = tokens[text]
            if not len(document.ids) or not text.strip():
                made.append({"skipped": "the text is empty"})
                continue
            if not len(question.ids):
                made.append({"skipped": "the question is empty"})
                continue
            asked = Asked(question.ids, document, none, none)
            try:
                self.check_length([asked])
                found = self.find(model, [asked])[0]
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from None
            answer = found.describe(text, document.offsets, self.threshold)
            unread = cut_off(document.ids, self.recipe, self.template, question.ids)
            made.append({**answer, **unread})
        return made

    def check_length(self, asked: Sequence[Asked]) -> Any:
        """How many documents do not fit beside their questions, or an error if all have to."""
        sizes: dict[int, int] = {}
        for one in asked:
            check_room(one.question, self.recipe, self.template, self.tokenizer, "document")
            size = len(one.question) + len(one.document.ids) + self.template.size
            sizes[id(one.document)] = max(size, sizes.get(id(one.document), 0))
        found = reach(list(sizes.values()), self.recipe.model.length)
        found.check(self.recipe.too_long)
        return found


class Spans(Finder, QuestionTask):
    """The task of a recipe: its questions, its model, and how well they are answered."""

    reader = Finder

    def __init__(self, recipe: Finetuning) -> None:
        source = check_recipe(recipe, MEASURES)
        super().__init__(recipe, load_tokenizer(source))
        self.skips = Skips()
        self.goal = Goal(recipe.measure, recipe.measure.replace("_", " "))
        self.left_out = 0
        questions = read_examples(
            recipe.data, self._understand, self.skips, about=lambda one: one.text
        )
        self.questions = self._train_on(questions)
        self._documents: dict[str, Tokens] = {}
        self.asked = Splits(*(self._encode(split) for split in self.questions))
        self._settle(recipe)

    def notes(self) -> list[str]:
        """What a user should know before training begins."""
        sizes = [
            f"{len(own):,} {name} ({sum(not q.right for q in own):,} without an answer)"
            for name, own in self.questions._asdict().items()
        ]
        found = [f"questions: {', '.join(sizes)}", *self.skips.lines()]
        if self.left_out:
            found.append(
                f"{self.left_out:,} training questions without an answer are left out "
                f"(answers.blanks={self.recipe.answers.blanks:g})"
            )
        return [*found, *([self.reach.share(self.recipe.too_long)] if self.reach.too_long else [])]

    def lengths(self, split: str) -> np.ndarray:
        """Tokens of the document of each question."""
        return np.array([len(one.document.ids) for one in getattr(self.asked, split)])

    def about(self, split: str) -> list[str]:
        return [one.text for one in getattr(self.questions, split)]

    def _understand(self, row: Row) -> Iterator[Question]:
        return read_questions(row, self.recipe.data.columns, self.skips)

    def _train_on(self, questions: Splits[Question]) -> Splits[Question]:
        """What is learned from. A text that lacks the right answer teaches nothing, but it counts
        when measuring, as all questions without an answer do."""
        kept = []
        for one in questions.train:
            if one.right and not one.spans:
                self.skips.add("the right answer of a training question is not in its text", one.id)
            else:
                kept.append(one)
        if not kept:
            raise ValueError("no training question has its answer in its text")
        share = self.recipe.answers.blanks
        if share is not None:
            blank = [number for number, one in enumerate(kept) if not one.right]
            most = round(share * (len(kept) - len(blank)))
            # By the seed of the split: all seeds and arms of a comparison train on the same ones.
            order = np.random.default_rng(self.recipe.data.split_seed).permutation(len(blank))
            lost = {blank[place] for place in order[most:]}
            self.left_out = len(lost)
            kept = [one for number, one in enumerate(kept) if number not in lost]
            if not kept:
                raise ValueError(
                    f"answers.blanks={share:g} leaves no training question: none has an answer"
                )
        return questions._replace(train=kept)

    def _encode(self, questions: list[Question]) -> list[Asked]:
        """Each document is tokenised once, however many questions there are about it."""
        new = [q.text for q in questions if q.text not in self._documents]
        new = list(dict.fromkeys(new))
        self._documents |= zip(new, tokenize(self.tokenizer, new), strict=True)
        words = tokenize(self.tokenizer, [q.question for q in questions])
        found = []
        for question, own in zip(questions, words, strict=True):
            document = self._documents[question.text]
            spans = np.array(question.spans, dtype=np.int64).reshape(-1, 2)
            # The tokens that the first and the last character of an answer are in.
            starts = np.searchsorted(document.offsets[:, 1], spans[:, 0], side="right")
            ends = np.searchsorted(document.offsets[:, 0], spans[:, 1], side="left") - 1
            found.append(Asked(own.ids, document, np.unique(starts), np.unique(ends)))
        return found

    def build(self) -> PreTrainedModel:
        head = LongspanForQuestionAnswering
        return build_model(self.recipe.model, head, self.tokenizer)

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        return self.collate([self.asked.train[p] for p in self._order.take(step, rows)]), True

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss:
        start, end = self.scores(model, batch)
        group, count = batch["group"], len(batch["pieces"])
        total = (
            or_loss(start, batch["starts"], group, count)
            + or_loss(end, batch["ends"], group, count)
        ).mean() / 2
        return Loss(total, total.detach())

    def evaluate(self, model: PreTrainedModel, split: str, limit: int = 0) -> dict[str, float]:
        """Measures at the threshold of the recipe, and at the best one for these examples."""
        questions, answers = self._answer(model, split, limit)
        style = self.recipe.answers.style
        best = best_threshold(questions, answers, style)
        if split == "valid" and self.recipe.answers.threshold is None:
            self.threshold = best
        measures = measure(questions, answers, style, self.threshold)
        tuned = measure(questions, answers, style, best)
        return measures | {
            "best_f1": tuned["f1"],
            "best_exact": tuned["exact"],
            "best_threshold": best,
            "threshold": self.threshold,
        }

    def _answer(
        self, model: Any, split: str, limit: int = 0
    ) -> tuple[list[Question], list[Answer]]:
        model.eval()
        asked: list[Asked] = getattr(self.asked, split)[: limit or None]
        questions: list[Question] = getattr(self.questions, split)[: limit or None]
        size = self.recipe.evaluation.batch
        found: list[Found] = []
        for first in range(0, len(asked), size):
            found += self.find(model, asked[first : first + size])
        answers = [
            one.best(question.text, own.document.offsets)
            for one, question, own in zip(found, questions, asked, strict=True)
        ]
        return questions, answers

    def sheet(self, model: Any, split: str) -> np.ndarray:
        """Exact match and F1 of each question, at the threshold that validation chose."""
        questions, answers = self._answer(model, split)
        return scores(questions, answers, self.recipe.answers.style, self.threshold)

    def mark(self, sheet: np.ndarray) -> float:
        return float(sheet[:, 0 if "exact" in self.recipe.measure else 1].mean())

    def sample(self, model: PreTrainedModel) -> str:
        """What is answered to a validation question."""
        model.eval()
        question, asked = self.questions.valid[0], self.asked.valid[0]
        found = self.find(model, [asked])[0].best(question.text, asked.document.offsets)
        return f"{question.question} -> {found.text!r}"


def or_loss(scores: Tensor, right: Tensor, group: Tensor, count: int) -> Tensor:
    """[count]: for each group, minus the log of the probability that any right place is chosen.

    The softmax is over all scores of a group, however many pieces they come from. With one right
    place this is cross-entropy.
    """
    chosen = scores.masked_fill(~right, -torch.inf)
    return _log_sum_exp(scores, group, count) - _log_sum_exp(chosen, group, count)


def _log_sum_exp(scores: Tensor, group: Tensor, count: int) -> Tensor:
    top = scores.new_full((count,), -torch.inf).scatter_reduce(0, group, scores.detach(), "amax")
    sums = scores.new_zeros(count).index_add(0, group, (scores - top[group]).exp())
    return top + sums.log()
