"""Splits, skips, and the order of examples."""

from collections import Counter
from dataclasses import replace
from itertools import chain
from weakref import WeakSet

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data.examples import Examples, Order, Skips, read_examples


def table(path, count):
    path.write_text("text\n" + "".join(f"{i}\n" for i in range(count)))
    return str(path)


def understand(row):
    yield int(row.get("text"))
    yield -int(row.get("text"))


def test_splits_are_disjoint_by_row_and_follow_the_seed(tmp_path):
    source = Examples(train=table(tmp_path / "a.csv", 50))
    splits = read_examples(source, understand)
    assert [len(split) for split in splits] == [80, 10, 10]
    rows = [{abs(one) for one in split} for split in splits]
    assert sum(map(len, rows)) == len(set.union(*rows)) == 50
    assert read_examples(source, understand) == splits
    other = Examples(train=source.train, split_seed=1)
    assert read_examples(other, understand) != splits


def test_rows_about_the_same_stay_together(tmp_path):
    """As with a row for each question about a text."""
    source = Examples(train=table(tmp_path / "a.csv", 60))
    splits = read_examples(source, understand, about=lambda one: abs(one) % 20)
    texts = [{abs(one) % 20 for one in split} for split in splits]
    assert [len(split) for split in splits] == [96, 12, 12]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 20
    # Where each row is about something else, nothing changes.
    assert read_examples(source, understand, about=abs) == read_examples(source, understand)
    with pytest.raises(ValueError, match="no example for train: 1 texts are too few"):
        read_examples(source, understand, about=lambda _: 0)


class Text(str):
    """One that can be asked whether it is still there."""


def test_texts_are_encoded_while_a_file_is_read(tmp_path):
    """Of 2,000 texts no more than some hundreds are in memory at any time."""
    alive = WeakSet()

    def one_text(row):
        text = Text(row.get("text"))
        alive.add(text)
        yield text

    most = 0

    def encode(texts):
        nonlocal most
        most = max(most, len(alive))
        return [int(text) for text in texts if int(text) % 10]

    source = Examples(train=table(tmp_path / "a.csv", 2000))
    splits = read_examples(source, one_text, encode=encode)
    assert sorted(chain(*splits)) == [n for n in range(2000) if n % 10]
    assert 0 < most < 600
    few = read_examples(replace(source, limit=7), one_text, encode=encode)
    assert few.train == [n for n in read_examples(replace(source, limit=7), first).train if n % 10]


def first(row):
    yield int(row.get("text"))


def test_files_of_their_own_are_taken_whole(tmp_path):
    source = Examples(
        train=table(tmp_path / "a.csv", 20),
        test=table(tmp_path / "b.csv", 3),
        valid_share=0.5,
        limit=7,
    )
    splits = read_examples(source, understand)
    assert splits.test == [0, 0, 1, -1, 2, -2]
    assert [len(split) for split in splits] == [7, 7, 6]


def test_a_few_are_not_the_first_ones(tmp_path):
    source = Examples(train=table(tmp_path / "a.csv", 100), limit=7)
    few = read_examples(source, understand).train
    assert len(few) == 7
    assert [abs(one) for one in few] == sorted(abs(one) for one in few)
    assert few[-1] > 20
    assert read_examples(source, understand).train == few


def test_too_little_is_said(tmp_path):
    with pytest.raises(ValueError, match="give --data"):
        read_examples(Examples(), understand)
    with pytest.raises(ValueError, match="no example for train: 2 rows are too few"):
        read_examples(Examples(train=table(tmp_path / "a.csv", 2)), understand)
    with pytest.raises(ValueError, match="valid_share=0"):
        read_examples(Examples(train=table(tmp_path / "a.csv", 9), valid_share=0), understand)


def test_every_pass_takes_all_in_another_order():
    order = Order(10, 4, seed=3)
    taken = [place for step in range(5) for place in order.take(step, range(4))]
    assert Counter(taken) == dict.fromkeys(range(10), 2)
    assert taken[:10] != taken[10:]
    assert Order(10, 4, seed=3).take(4, range(2, 4)) == taken[18:]
    assert [p for s in range(5) for p in Order(10, 4, seed=4).take(s, range(4))] != taken


def test_skips_are_counted_by_reason():
    skips = Skips()
    for line in range(5):
        skips.add("empty", f"line {line}")
    skips.add("odd", "line 9")
    assert len(skips) == 6
    assert skips.lines() == [
        "skipped 5, empty: line 0; line 1; line 2; ...",
        "skipped 1, odd: line 9",
    ]


@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 5), st.integers(0, 3), st.data())
def test_batches_of_like_length_take_every_example_once(count, batch, alike, seed, data):
    lengths = np.array(data.draw(st.lists(st.integers(1, 99), min_size=count, max_size=count)))
    order = Order(count, batch, seed, lengths, alike)
    steps = -(-3 * count // batch)
    taken = [place for step in range(steps) for place in order.take(step, range(batch))]
    for epoch in range(3):
        assert sorted(taken[epoch * count : (epoch + 1) * count]) == list(range(count))
    # A step is what it is, whatever was asked for before.
    assert Order(count, batch, seed, lengths, alike).take(steps - 1, range(batch)) == taken[-batch:]


def test_batches_of_like_length_spare_padding():
    lengths = np.random.default_rng(0).integers(1, 1000, 1000)

    def padded(order):
        return sum(lengths[order.take(step, range(8))].max() for step in range(3 * 125))

    assert padded(Order(1000, 8, 0, lengths, 50)) < 0.6 * padded(Order(1000, 8, 0))
