"""Measures agree with the libraries and scripts that people use."""

import numpy as np
import pytest

from longspan.tasks.measures import answer_scores, label_measures, normalize


def one_hot(labels, count):
    return np.eye(count)[labels]


def test_one_label_as_scikit_learn_has_it():
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for count in (2, 5):
        for _ in range(20):
            right, found = random.integers(count, size=(2, 13))
            ours = label_measures(one_hot(right, count), one_hot(found, count), positive=1)
            assert ours["accuracy"] == metrics.accuracy_score(right, found)
            assert ours["macro_f1"] == metrics.f1_score(right, found, average="macro")
            assert ours["micro_f1"] == metrics.f1_score(right, found, average="micro")
            own = metrics.f1_score(right, found, labels=[1], average="macro", zero_division=0)
            assert ours["f1"] == own


def test_several_labels_as_scikit_learn_has_it():
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for _ in range(20):
        right, found = random.integers(2, size=(2, 11, 4))
        right[:, 3] = found[:, 3] = 0  # a label that nobody has
        ours = label_measures(right, found, several=True)
        assert ours["accuracy"] == metrics.accuracy_score(right, found)
        for kind in ("macro", "micro"):
            theirs = metrics.f1_score(right, found, average=kind, zero_division=0)
            assert ours[f"{kind}_f1"] == theirs


def test_labels_by_hand():
    right, found = one_hot([0, 0, 1, 1, 1], 3), one_hot([0, 1, 1, 1, 0], 3)
    assert label_measures(right, found, positive=1) == {
        "accuracy": 0.6,
        "macro_f1": pytest.approx((0.5 + 2 / 3) / 2),  # the third label does not occur
        "micro_f1": 0.6,
        "f1": 2 / 3,
    }


@pytest.mark.parametrize(
    ("text", "squad", "triviaqa"),
    [
        ("The  U.S. Army", "us army", "u s army"),
        ("an apple-pie", "applepie", "apple pie"),
        ("‘Tis a_test", "‘tis atest", "tis test"),  # noqa: RUF001
        ("theatre", "theatre", "theatre"),
        ("a", "", ""),
    ],
)
def test_normalizing(text, squad, triviaqa):
    assert normalize(text, "squad") == squad
    assert normalize(text, "triviaqa") == triviaqa


@pytest.mark.parametrize(
    ("found", "right", "f1"),
    [
        ("Denver Broncos", "the Denver Broncos!", 1.0),
        ("the big dog", "big dog big", 0.8),
        ("cat", "dog", 0.0),
        ("", "dog", 0.0),
        ("", "", 1.0),
        ("dog", "", 0.0),
    ],
)
def test_f1_of_words(found, right, f1):
    assert answer_scores(found, [right])[1] == pytest.approx(f1)


def test_the_closest_of_several_answers_counts():
    assert answer_scores("red fox", ["fox", "Red Fox"]) == (1.0, 1.0)
    assert answer_scores("", []) == (1.0, 1.0)
    assert answer_scores("x", []) == (0.0, 0.0)
    assert answer_scores("", ["the", "fox"]) == (0.0, 0.0)
