"""Measures of coreference: the reference scorer's published cases, and what must always hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.tasks.coref_measures import NAMES, coref_counts, coref_measures

HALF, NONE, ALL = (1 / 2, 1 / 2), (0, 0), (1, 1)
EVERYTHING = {"muc": ALL, "b_cubed": ALL, "ceaf": ALL, "lea": ALL}
# TC-A-4; A-7 to A-9 name mentions of it twice, which counts once.
WRONG = {
    "muc": (1 / 3, 1 / 3),
    "b_cubed": (5 / 9, 17 / 42),
    "ceaf": (2.2 / 3, 2.2 / 4),
    "lea": (3 / 6, 2 / 7),
}
TWO = "12345 67 89ABC"
# The cases of the reference scorer, with the values of recall and precision that are published for
# them. A letter is a mention, a word a cluster.
CASES = {
    "A1": ("a bc def", "a bc def", EVERYTHING),
    "A2": (
        "a bc def",
        "a de",
        {"muc": (1 / 3, 1), "b_cubed": (7 / 18, 1), "ceaf": (0.6, 0.9), "lea": (2 / 6, 1)},
    ),
    "A3": (
        "a bc def",
        "a bcx defy z",
        {
            "muc": (1, 3 / 5),
            "b_cubed": (1, 55 / 108),
            "ceaf": (0.88571, 0.66429),
            "lea": (1, 4 / 9),
        },
    ),
    "A4": ("a bc def", "a bcx dy z", WRONG),
    "A5": (
        "a bc def",
        "a bcxB dy z",
        {
            "muc": (1 / 3, 1 / 4),
            "b_cubed": (5 / 9, 5 / 16),
            "ceaf": (0.68889, 0.51667),
            "lea": (1 / 2, 5 / 24),
        },
    ),
    "A6": (
        "a bc def",
        "a bcx dy Bz",
        {**WRONG, "muc": (1 / 3, 1 / 4), "b_cubed": (5 / 9, 17 / 48), "lea": (1 / 2, 1 / 4)},
    ),
    "A7": ("a bc def", "a bcxb dy z", WRONG),
    "A8": ("a bc def", "a bcx dy bz", WRONG),
    "A9": ("a bc def", "a bcx dy bbbbbbbbbbz", WRONG),
    "A10": (
        "a bc def",
        "a b c d e f",
        {"muc": NONE, "b_cubed": (1 / 2, 1), "lea": (1 / 6, 1 / 6)},
    ),
    "A11": (
        "a bc def",
        "abcdef",
        {"muc": (1, 3 / 5), "b_cubed": (1, 7 / 18), "lea": (5 / 6, 4 / 15)},
    ),
    "A12": (
        "a bc def",
        "a x y c d e z",
        {"muc": NONE, "b_cubed": (13 / 36, 4 / 7), "lea": (1 / 6, 1 / 7)},
    ),
    "A13": (
        "a bc def",
        "axycdez",
        {"muc": (1 / 3, 1 / 6), "b_cubed": (17 / 36, 6 / 49), "lea": (1 / 6, 1 / 21)},
    ),
    "B1": ("ab cde", "bcx de", {"lea": (1 / 5, 2 / 5)}),
    "C1": ("ab cde fg", "bcx de fg", {"lea": (3 / 7, 4 / 7)}),
    "D1": (
        TWO,
        "12345 6789ABC",
        {"muc": (1, 9 / 10), "b_cubed": (1, 16 / 21), "lea": (1, (5 + 77 / 21) / 12)},
    ),
    "E1": (
        TWO,
        "1234589ABC 67",
        {"muc": (1, 9 / 10), "b_cubed": (1, 7 / 12), "lea": (1, (200 / 45 + 2) / 12)},
    ),
    "F1": ("ABCD", "AB CD", {"muc": (2 / 3, 1), "lea": (1 / 3, 1)}),
    "G1": ("AB CD", "ABCD", {"muc": (1, 2 / 3), "lea": (1, 1 / 3)}),
    "H1": ("ABCD", "ABCD", {"muc": ALL, "lea": ALL}),
    "I1": ("ABCD", "AB CD", {"muc": (2 / 3, 1), "lea": (1 / 3, 1)}),
    "J1": ("ABC", "AC", {"muc": (1 / 2, 1), "lea": (1 / 3, 1)}),
    "K1": ("BCDEGHJ", "ABC DEF GHI", {"muc": HALF, "lea": (3 / 21, 3 / 9)}),
    "L1": ("ABC DEFG", "AB CD FGH", {"muc": (2 / 5, 2 / 4), "lea": (5 / 21, 3 / 7)}),
    "M1": ("abcdef", "abcdef", EVERYTHING),
    "M2": ("abcdef", "a b c d e f", {"muc": NONE, "lea": NONE}),
    "M3": ("abcdef", "ab cde f", {"lea": (4 / 15, 5 / 6)}),
    "M4": ("abcdef", "abcxyz", {"lea": (1 / 5, 1 / 5)}),
    "M5": ("abcdef", "a b c x y z", {"muc": NONE, "lea": NONE}),
    "M6": ("abcdef", "ab cxy z", {"lea": (1 / 15, 2 / 6)}),
    "N1": ("a b c d e f", "a b c d e f", {**EVERYTHING, "muc": NONE}),
    "N2": ("a b c d e f", "abcdef", {"muc": NONE, "lea": NONE}),
    "N3": ("a b c d e f", "ab cde f", {"lea": (1 / 6, 1 / 6)}),
    "N4": ("a b c d e f", "a b c x y z", {"muc": NONE, "lea": HALF}),
    "N5": ("a b c d e f", "abcxyz", {"lea": NONE}),
    "N6": ("a b c d e f", "ab cxy z", {"lea": NONE}),
}


@pytest.mark.parametrize("name", CASES)
def test_published_cases(name):
    key, response, expected = CASES[name]
    found = coref_measures(coref_counts(key.split(), response.split()))
    for measure, (recall, precision) in expected.items():
        assert found[f"{measure}_recall"] == pytest.approx(recall, abs=5e-6)
        assert found[f"{measure}_precision"] == pytest.approx(precision, abs=5e-6)
        both = recall + precision
        f1 = 2 * recall * precision / both if both else 0.0
        assert found[measure] == pytest.approx(f1, abs=5e-6)


def test_the_average_is_of_three():
    found = coref_measures(coref_counts(["ab", "cde"], ["bcx", "de"]))
    assert found["conll"] == pytest.approx((found["muc"] + found["b_cubed"] + found["ceaf"]) / 3)
    assert found["mentions"] == pytest.approx(4 / 5)


@st.composite
def partitions(draw, letters="abcdefghij"):
    """Some of the letters, each in one cluster."""
    of = draw(st.lists(st.integers(-1, 5), min_size=len(letters), max_size=len(letters)))
    made = [{m for m, own in zip(letters, of, strict=True) if own == c} for c in range(6)]
    return [cluster for cluster in made if cluster]


@given(partitions(), partitions())
def test_recall_one_way_is_precision_the_other(right, found):
    assert np.allclose(coref_counts(right, found), coref_counts(found, right)[:, ::-1])


@given(partitions(), partitions())
def test_measures_lie_between_none_and_all(right, found):
    for value in coref_measures(coref_counts(right, found)).values():
        assert -1e-12 <= value <= 1 + 1e-12


@given(partitions())
def test_what_is_right_is_perfect(right):
    found = coref_measures(coref_counts(right, right))
    linked = any(len(cluster) > 1 for cluster in right)
    for name in NAMES:
        expected = linked if name == "muc" else bool(right)
        assert found[name] == pytest.approx(float(expected))


@given(partitions(), partitions())
def test_singletons_mean_nothing_to_muc_but_something_to_others(right, found):
    more = [*found, {"new"}]
    before, after = coref_counts(right, found), coref_counts(right, more)
    muc = NAMES.index("muc")
    assert np.array_equal(before[muc], after[muc])
    for name in ("mentions", "b_cubed", "ceaf", "lea"):
        extra = after[NAMES.index(name), 1] - before[NAMES.index(name), 1]
        assert extra == pytest.approx([0.0, 1.0])


@given(partitions(), partitions())
def test_b_cubed_is_a_mean_over_mentions(right, found):
    of = {mention: cluster for cluster in found for mention in cluster}
    each = [len(own & of.get(mention, set())) / len(own) for own in right for mention in own]
    expected = sum(each) / len(each) if each else 0.0
    assert coref_measures(coref_counts(right, found))["b_cubed_recall"] == pytest.approx(expected)


@given(partitions(), partitions(), partitions(letters="ABCDEFGHIJ"), partitions("ABCDEFGHIJ"))
def test_documents_add_up(right, found, others, theirs):
    """Two documents together are what they are one after the other."""
    apart = coref_counts(right, found) + coref_counts(others, theirs)
    assert np.allclose(coref_counts(right + others, found + theirs), apart)
