"""ListOps: what lists come to, and that they are spread as the benchmark has them."""

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from longspan.data import listops
from longspan.data.listops import END, LONGEST, OPERATORS, SHORTEST, SYMBOLS, evaluate, examples
from longspan.data.tables import read_rows

FEW = list(examples("train", 150))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 4 [MED 1 9 6 ] 2 0 ]", 6),
        ("[MIN 4 [SM 7 5 ] 3 ]", 2),
        ("[MED 1 2 8 9 ]", 5),
        ("[MED 1 2 ]", 1),  # one and a half, rounded down
        ("[MED 2 4 9 ]", 4),
        ("[SM 9 9 9 [MAX 0 [MIN 8 3 ] ] ]", 0),
    ],
)
def test_what_a_list_comes_to(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["", "1 2", "[MAX 1 2", "]", "[MAX 1 2 ] ]", "[FIRST 1 2 ]"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError, match=r"expected one whole list|has no place"):
        evaluate(text)


def test_examples_are_labelled_right_and_of_the_wanted_length():
    for text, value in FEW:
        symbols = text.split()
        assert SHORTEST <= len(symbols) <= LONGEST
        assert set(symbols) <= set(SYMBOLS)
        assert evaluate(text) == value


def test_the_first_operator_alone_says_something():
    made = [
        listops.Example(text, evaluate(text)) for text in ("[MAX 9 1 ]", "[MIN 3 2 ]", "[MED 4 4 ]")
    ]
    assert listops.by_operator(made) == pytest.approx(2 / 3)
    # Hardly another answer is right for more of the training lists.
    made = list(examples("train", 600))
    for name in ("[MIN", "[MAX", "[MED"):
        own = [one for one in made if one.text.startswith(name)]
        (_, best), *_ = Counter(one.value for one in own).most_common(1)
        assert listops.by_operator(own) > best / len(own) - 0.05


def test_depth_and_arguments_stay_within_their_bounds():
    depths, counts = Counter(), Counter()
    for text, _ in FEW:
        open_lists, deepest = [0], 0
        for symbol in text.split():
            if symbol == END:
                counts[open_lists.pop()] += 1
                open_lists[-1] += 1
            elif symbol in OPERATORS:
                open_lists.append(0)
                deepest = max(deepest, len(open_lists) - 1)
            else:
                open_lists[-1] += 1
        depths[deepest] += 1
    # Digits stand in the tenth level at most, lists in the ninth.
    assert max(depths) == 9
    assert set(counts) == set(range(2, 11))


def _recursive(choose: random.Random, depth: int = 1) -> list[str]:
    """The specification, word by word."""
    if depth == 10 or choose.random() > 0.25:
        return [str(choose.randrange(10))]
    arguments = [_recursive(choose, depth + 1) for _ in range(choose.randint(2, 10))]
    return [choose.choice(list(OPERATORS)), *(s for own in arguments for s in own), END]


def test_the_distribution_is_that_of_the_specification():
    choose = random.Random(0)
    plain: list[list[str]] = []
    while len(plain) < 300:
        symbols = _recursive(choose)
        if 500 < len(symbols) < 2000:
            plain.append(symbols)
    ours = [text.split() for text, _ in examples("valid", 300)]
    lengths = [np.array([len(one) for one in own]) for own in (ours, plain)]
    # Two samples of 300: means differ by less than four standard errors, medians alike.
    error = np.hypot(*(own.std() / 300**0.5 for own in lengths))
    assert abs(lengths[0].mean() - lengths[1].mean()) < 4 * error
    for symbol in SYMBOLS:
        shares = [np.mean([one.count(symbol) / len(one) for one in own]) for own in (ours, plain)]
        assert shares[0] == pytest.approx(shares[1], rel=0.05)
    values = [Counter(evaluate(" ".join(one)) for one in own) for own in (ours, plain)]
    for value in range(10):
        assert abs(values[0][value] - values[1][value]) < 4 * (2 * 300 * 0.1) ** 0.5


def test_examples_follow_from_split_and_number():
    assert list(islice(examples("train"), 3)) == FEW[:3]
    assert not {text for text, _ in FEW} & {text for text, _ in examples("test", 50)}
    with pytest.raises(ValueError, match="no split 'dev'; choose from train, valid, test"):
        next(examples("dev"))


def test_a_split_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    monkeypatch.setitem(listops.SPLITS, "valid", 3)
    rows = list(read_rows("listops:valid"))
    assert [(row.text("text"), int(row.text("label"))) for row in rows] == list(examples("valid"))
    (path,) = (tmp_path / "listops").iterdir()
    before = path.stat().st_mtime_ns
    assert len(list(read_rows("listops:valid"))) == 3
    assert path.stat().st_mtime_ns == before


def test_an_interrupted_split_leaves_nothing(tmp_path):
    def broken():
        yield FEW[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        listops.write(tmp_path / "train.jsonl.gz", broken())
    assert not list(tmp_path.iterdir())


def test_few_examples_need_no_file():
    rows = list(read_rows("listops:train#2"))
    assert [row.text("text") for row in rows] == [one.text for one in FEW[:2]]
    for wrong in ("listops:dev", "listops:train#x", "listops:"):
        with pytest.raises(ValueError, match="choose from listops:train"):
            list(read_rows(wrong))
