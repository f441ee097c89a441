"""Answers chosen among scored tokens, and measured."""

import unicodedata
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.tasks.measures import Style, answer_scores
from longspan.tasks.questions import Question


def with_marks(text: str, stop: int) -> int:
    """The end of what ends at `stop`, with accents and signs that are characters of their own:
    BERT's tokenizers pass over them, and byte pairs may end before them."""
    while stop < len(text) and unicodedata.category(text[stop]).startswith("M"):
        stop += 1
    return stop


class Answer(NamedTuple):
    """Characters start:stop of a text; `margin` is how much better it is than no answer."""

    text: str
    start: int
    stop: int
    margin: float
    probability: float


class Found(NamedTuple):
    """What was found for one question."""

    candidates: list[tuple[int, int, float]]  # first and last token, score; the best first
    nothing: float  # the score of no answer
    total: float  # of everything there is, to make probabilities of scores

    def best(self, text: str, offsets: np.ndarray) -> Answer:
        """The first of them; an empty one, which nothing is worse than, if there are none."""
        return next(iter(self.answers(text, offsets)), Answer("", 0, 0, -np.inf, 0.0))

    def answers(self, text: str, offsets: np.ndarray) -> list[Answer]:
        """As characters, without white space around them; each once, and none of that alone."""
        made: dict[tuple[int, int], Answer] = {}
        for first, last, score in self.candidates:
            start, stop = int(offsets[first, 0]), with_marks(text, int(offsets[last, 1]))
            words = text[start:stop]
            start += len(words) - len(words.lstrip())
            stop = start + len(words.strip())
            probability = float(np.exp(min(0.0, score - self.total)))
            answer = Answer(text[start:stop], start, stop, score - self.nothing, probability)
            if start < stop:
                made.setdefault((start, stop), answer)
        return list(made.values())

    def describe(self, text: str, offsets: np.ndarray, threshold: float) -> dict[str, Any]:
        found = [
            {
                "text": one.text,
                "start": one.start,
                "end": one.stop,
                "margin": one.margin,
                "probability": one.probability,
            }
            for one in self.answers(text, offsets)
        ]
        if not found or found[0]["margin"] <= threshold:
            return {"answer": "", "candidates": found}
        best = found[0]
        span = {"start": best["start"], "end": best["end"]}
        return {"answer": best["text"], **span, "candidates": found}


class Candidates(NamedTuple):
    """First and last token and score of answers, the best first, on the device of the scores; those
    of -inf are none."""

    first: Tensor
    last: Tensor
    score: Tensor


def best_answers(
    start: Tensor, end: Tensor, longest: int, count: int, unit: Tensor | None = None
) -> Candidates:
    """The `count` best answers of at most `longest` tokens, out of all that begin and end in the
    same `unit`, a number for each token, whose tokens stand together. Of equals the one that begins
    first is the better one, then the shorter.

    Of the beginnings only the `count` best, each with its best end, can be among them: there are no
    more scores than theirs, however long the document is, and nobody waits for a device.
    """
    reach = min(longest, len(start))
    tokens = torch.arange(len(start), device=start.device)
    best, size = end, 1  # best[i] is the highest of the `size` ends from i on
    while size < reach:
        step = min(size, reach - size)
        behind = (tokens + step).clamp(max=len(start) - 1)
        later = best[behind]
        if unit is not None:
            later = later.masked_fill(unit[behind] != unit, -torch.inf)
        best, size = torch.maximum(best, later), size + step
    first = _highest(start + best, count).sort().values
    last = first[:, None] + tokens[:reach]
    allowed = last < len(start)
    last = last.clamp(max=len(start) - 1)
    if unit is not None:
        allowed &= unit[last] == unit[first][:, None]
    scores = (start[first][:, None] + end[last]).masked_fill(~allowed, -torch.inf).flatten()
    chosen = _highest(scores, count)
    return Candidates(first[chosen // reach], last.flatten()[chosen], scores[chosen])


def _highest(scores: Tensor, count: int) -> Tensor:
    """Places of the highest scores; unlike `topk`, of equals the first."""
    return scores.sort(descending=True, stable=True).indices[:count]


def read_candidates(found: Sequence[Candidates]) -> list[list[tuple[int, int, float]]]:
    """(first, last, score) of all of them, brought from their device at once."""
    columns = [torch.cat(column).tolist() for column in zip(*found, strict=True)]
    rows = zip(*columns, strict=True)
    return [[one for one in islice(rows, len(own.score)) if one[2] > -np.inf] for own in found]


def measure(
    questions: Sequence[Question], answers: Sequence[Answer], style: Style, threshold: float
) -> dict[str, float]:
    """Exact match and F1, over all questions and over those with and without an answer.

    In TriviaQA's style the best answer of all documents that share a question's id is taken.
    """
    questions, answers = _counted(questions, answers, style)
    each = scores(questions, answers, style, threshold)
    has = np.array([bool(question.right) for question in questions])
    found = {"exact": float(each[:, 0].mean()), "f1": float(each[:, 1].mean())}
    for name, chosen in (("answerable", has), ("unanswerable", ~has)):
        if chosen.any():
            found[f"f1_{name}"] = float(each[chosen, 1].mean())
    return found


def scores(
    questions: Sequence[Question], answers: Sequence[Answer], style: Style, threshold: float
) -> np.ndarray:
    """[questions, 2]: exact match and F1 of each."""
    return np.array(
        [
            answer_scores(own.text if own.margin > threshold else "", question.right, style)
            for question, own in zip(questions, answers, strict=True)
        ]
    )


def best_threshold(questions: Sequence[Question], answers: Sequence[Answer], style: Style) -> float:
    """The margin at which F1, as `measure` has it, is highest when all answers below it are
    withheld; of several equally good ones, that nearest to 0."""
    questions, answers = _counted(questions, answers, style)
    gains = []
    for question, own in zip(questions, answers, strict=True):
        given = answer_scores(own.text, question.right, style)[1]
        gains.append(given - answer_scores("", question.right, style)[1])
    margins = np.array([own.margin for own in answers])
    order = np.argsort(-margins, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(np.array(gains)[order])])
    bounds = np.concatenate([[np.inf], margins[order], [-np.inf]])
    # Answers with the same margin are given together or not at all.
    apart = bounds[1:] < bounds[:-1]
    found = []
    for answered in np.flatnonzero(apart & (total == total[apart].max())):
        above, below = bounds[answered], bounds[answered + 1]
        if below <= 0.0 < above:
            return 0.0
        ends = [end for end in (below, above) if np.isfinite(end)]
        middle = sum(ends) / 2 if len(ends) == 2 else ends[0] + (1.0 if above == np.inf else -1.0)
        found.append(float(middle))
    return min(found, key=abs)


def _counted(
    questions: Sequence[Question], answers: Sequence[Answer], style: Style
) -> tuple[Sequence[Question], Sequence[Answer]]:
    """What is measured: in TriviaQA's style, for each id the likeliest answer, and beside it the
    right answers of all its documents."""
    if style != "triviaqa":
        return questions, answers
    groups: dict[str, list[tuple[Question, Answer]]] = {}
    for question, own in zip(questions, answers, strict=True):
        groups.setdefault(question.id, []).append((question, own))
    asked, given = [], []
    for group in groups.values():
        question, own = max(group, key=lambda pair: pair[1].margin)
        right = tuple(dict.fromkeys(text for one, _ in group for text in one.right))
        asked.append(question._replace(right=right))
        given.append(own)
    return asked, given
