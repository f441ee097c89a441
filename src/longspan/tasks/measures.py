"""Measures of success, as the usual libraries and official scripts compute them."""

import re
import string
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

Style = Literal["squad", "triviaqa"]
Fact = tuple[str, int]  # a sentence of HotpotQA: the title of its paragraph, and its number there
_WHOLE = ("yes", "no", "noanswer")
_PUNCTUATION: dict[Style, dict[int, str]] = {
    "squad": str.maketrans(dict.fromkeys(string.punctuation, "")),
    "triviaqa": str.maketrans(dict.fromkeys(f"{string.punctuation}‘’´`", " ")),  # noqa: RUF001
}


def label_measures(
    right: np.ndarray, found: np.ndarray, *, several: bool = False, positive: int | None = None
) -> dict[str, float]:
    """Accuracy and F1 of labels, both [examples, labels] of 0 and 1, as scikit-learn has them.

    "accuracy" asks for all labels of an example; "macro_f1" is the mean over labels (those that
    occur, unless an example may have several), "micro_f1" counts all labels together; "f1" is that
    of the `positive` label.
    """
    right, found = right.astype(bool), found.astype(bool)
    true = (right & found).sum(axis=0)
    wrong = (right ^ found).sum(axis=0)  # false positives and false negatives
    total = 2 * true + wrong
    each = np.divide(2 * true, total, out=np.zeros(len(total)), where=total > 0)
    measures = {
        "accuracy": float((right == found).all(axis=1).mean()),
        "macro_f1": float(each.mean() if several else each[total > 0].mean()),
        "micro_f1": float(2 * true.sum() / total.sum()) if total.sum() else 0.0,
    }
    if positive is not None:
        measures["f1"] = float(each[positive])
    return measures


def normalize(answer: str, style: Style = "squad") -> str:
    """Lower case, without punctuation, articles and extra white space.

    SQuAD's script deletes punctuation; TriviaQA's puts spaces in its place, also for quotation
    marks beyond ASCII.
    """
    answer = answer.lower().translate(_PUNCTUATION[style])
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def _word_f1(mine: list[str], theirs: list[str]) -> float:
    """F1 of the words of two answers; an empty one means that there is none."""
    if not mine or not theirs:
        return float(mine == theirs)
    return _f1(*_overlap(mine, theirs))


def _overlap(mine: list[str], theirs: list[str]) -> tuple[float, float]:
    """Precision and recall of words, each as often as it occurs."""
    common = sum((Counter(mine) & Counter(theirs)).values())
    return common / max(1, len(mine)), common / max(1, len(theirs))


def _f1(precision: float, recall: float) -> float:
    total = precision + recall
    return 2 * precision * recall / total if total else 0.0


def answer_scores(found: str, right: Sequence[str], style: Style = "squad") -> tuple[float, float]:
    """(exact match, F1) with the closest of the right answers; no right answer means none."""
    mine = normalize(found, style)
    kept = [own for one in right if (own := normalize(one, style))] or [""]
    words = mine.split()
    return float(mine in kept), max(_word_f1(words, own.split()) for own in kept)


def joint_scores(
    found: str, right: str, facts: Collection[Fact], right_facts: Collection[Fact]
) -> dict[str, float]:
    """HotpotQA's measures of one question: of the answer, of the evidence, and of both together.

    Joint precision and recall are products of the two. Of "yes", "no" and "noanswer" nothing is
    right but the same word, whatever else stands beside it.
    """
    mine, theirs = normalize(found), normalize(right)
    answer = _overlap(mine.split(), theirs.split())
    if mine != theirs and not {mine, theirs}.isdisjoint(_WHOLE):
        answer = 0.0, 0.0
    common = len(set(facts) & set(right_facts))
    evidence = common / max(1, len(set(facts))), common / max(1, len(set(right_facts)))
    exact_answer, exact_facts = float(mine == theirs), float(set(facts) == set(right_facts))
    return {
        "exact": exact_answer,
        "f1": _f1(*answer),
        "evidence_exact": exact_facts,
        "evidence_f1": _f1(*evidence),
        "joint_exact": exact_answer * exact_facts,
        "joint_f1": _f1(answer[0] * evidence[0], answer[1] * evidence[1]),
    }
