"""Measures of coreference, as the reference scorer and LEA's script compute them.

A document's clusters are sets of mentions, of which a mention may be in one only; what a mention
is does not matter. Every measure is a recall and a precision, each a fraction whose halves are
added up over documents, so that what a document contributes is four numbers per measure.
"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

NAMES = ("mentions", "muc", "b_cubed", "ceaf", "lea")
AVERAGED = ("muc", "b_cubed", "ceaf")  # CoNLL's average


def coref_counts(
    right: Iterable[Iterable[Hashable]], found: Iterable[Iterable[Hashable]]
) -> np.ndarray:
    """[measures, 2, 2] of one document: of recall and of precision, numerator and denominator.

    Singletons count as the measures have them: not at all in MUC, as clusters of one in B-cubed and
    CEAF, and with a link to themselves in LEA.
    """
    keys, answers = _partition(right), _partition(found)
    place = {mention: index for index, cluster in enumerate(answers) for mention in cluster}
    shared = np.zeros((len(keys), len(answers)))
    for index, cluster in enumerate(keys):
        for mention in cluster:
            if mention in place:
                shared[index, place[mention]] += 1
    sizes = np.array([len(one) for one in keys], dtype=float)
    others = np.array([len(one) for one in answers], dtype=float)
    similar = 2 * shared / (sizes[:, None] + others)  # phi 4
    aligned = similar[linear_sum_assignment(similar, maximize=True)].sum()
    counts = []
    for common, own, theirs in ((shared, sizes, others), (shared.T, others, sizes)):
        counts.append(
            [
                (common.sum(), own.sum()),
                ((common.sum(axis=1) - (common > 0).sum(axis=1)).sum(), (own - 1).sum()),
                ((common**2 / own[:, None]).sum(), own.sum()),
                (aligned, len(own)),
                (_resolved(common, own, theirs), own.sum()),
            ]
        )
    return np.array(counts, dtype=float).transpose(1, 0, 2)


def coref_measures(counts: np.ndarray) -> dict[str, float]:
    """Recall, precision and F1 of every measure from the counts of one document, or from those of
    several added up; "conll" is the mean of three F1. A fraction of nothing is 0."""
    found = {}
    for name, halves in zip(NAMES, counts, strict=True):
        recall, precision = (float(top / bottom) if bottom else 0.0 for top, bottom in halves)
        both = recall + precision
        found[name] = 2 * recall * precision / both if both else 0.0
        found |= {f"{name}_recall": recall, f"{name}_precision": precision}
    return {"conll": sum(found[name] for name in AVERAGED) / len(AVERAGED), **found}


def _partition(clusters: Iterable[Iterable[Hashable]]) -> Sequence[set[Hashable]]:
    """Each mention once, where it is first; a cluster that is left with none does not count."""
    seen: set[Hashable] = set()
    made = []
    for cluster in clusters:
        own = set(cluster) - seen
        seen |= own
        if own:
            made.append(own)
    return made


def _resolved(common: np.ndarray, own: np.ndarray, theirs: np.ndarray) -> float:
    """LEA: the share of each cluster's links that the others have, weighted by its size."""
    alone = own == 1
    links = np.where(alone, 1.0, own * (own - 1) / 2)
    kept = (common * (common - 1) / 2).sum(axis=1)
    kept += alone * (common * (theirs == 1)).sum(axis=1)
    return float((own * kept / links).sum())
