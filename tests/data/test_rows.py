"""Packed rows: every token once, documents apart; hidden tokens: as many and as told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data.rows import Hiding, Rows, ShuffledRows, hide

BEGIN, END, PAD, MASK = 1, 2, 0, 3
WORDS = np.arange(10, 200)


def pack(lengths, length):
    """Documents of the ids 100, 101, ..., each token its own."""
    ids = np.arange(100, 100 + sum(lengths))
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    return Rows(documents, length, before=[BEGIN], after=[END], padding=PAD)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    length=st.integers(3, 24),
    shift=st.integers(0, 60),
)
def test_every_token_is_read_once_and_documents_stay_apart(lengths, length, shift):
    rows = pack(lengths, length)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    seen = []
    for index in range(rows.count):
        cut = rows.cut(index, shift % rows.tokens)
        ids = rows.ids[cut.source]
        assert len(ids) == length
        assert cut.bounds[0] == 0
        assert cut.bounds[-1] == length
        assert (np.diff(cut.bounds) > 0).all()
        for first, last in zip(cut.bounds, cut.bounds[1:], strict=False):
            part = ids[first:last]
            if (part == PAD).any():
                assert (part == PAD).all()
                continue
            # A part of one document, in order, between the special tokens of a whole one.
            assert (part[0], part[-1]) == (BEGIN, END)
            inner = part[1:-1]
            assert (np.diff(inner) == 1).all()
            assert len(set(owner[inner - 100])) <= 1
            seen += inner.tolist()
        assert (rows.ordinary[cut.source] == (ids >= 100)).all()
    assert sorted(seen) == list(range(100, 100 + sum(lengths)))


def test_a_whole_document_in_a_row_has_its_special_tokens_once():
    rows = pack([4, 2], 14)
    cut = rows.cut(0)
    assert rows.ids[cut.source].tolist() == [1, 100, 101, 102, 103, 2, 1, 104, 105, 2, 0, 0, 0, 0]
    assert cut.bounds.tolist() == [0, 6, 10, 14]
    assert (rows.count, rows.documents, rows.severed) == (1, 2, 0)


def test_documents_beyond_a_row_are_counted():
    rows = pack([30, 2, 2], 12)
    assert (rows.room, rows.count) == (10, 4)
    assert rows.severed == 1
    assert rows.ids[rows.cut(1).source].tolist() == [1, *range(109, 119), 2]


def test_no_room_is_said():
    with pytest.raises(ValueError, match="rows of 2 tokens leave no room"):
        pack([3], 2)


def test_each_pass_reads_all_in_another_order_cut_elsewhere():
    rows = pack([50, 17, 80], 12)

    def read(seed, epoch):
        order = ShuffledRows(rows, batch=1, seed=seed)
        taken = [order.take(epoch * rows.count + n, range(1))[0] for n in range(rows.count)]
        return [tuple(rows.ids[row.source]) for row, _ in taken]

    first, second = read(0, 0), read(0, 1)
    assert read(0, 0) == first
    assert set(first) != set(second)
    assert read(1, 0) != first
    for passed in (first, second):
        found = sorted(int(id) for row in passed for id in row if id >= 100)
        assert found == list(range(100, 247))


def hiding(share=0.15, masked=0.8, random=0.1):
    return Hiding(share, masked, random, MASK, WORDS)


def test_as_many_are_hidden_as_told():
    ids = np.full(200_000, 777, dtype=np.int32)
    ordinary = np.arange(len(ids)) % 4 > 0
    shown, places = hide(ids, ordinary, hiding(), np.random.default_rng(0))
    assert len(places) == round(0.15 * ordinary.sum())
    assert ordinary[places].all()
    assert len(set(places.tolist())) == len(places)
    untouched = np.ones(len(ids), dtype=bool)
    untouched[places] = False
    assert (shown[untouched] == 777).all()
    of = shown[places]
    assert (of == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (of == 777).mean() == pytest.approx(0.1, abs=0.01)
    others = of[(of != MASK) & (of != 777)]
    assert set(others.tolist()) == set(WORDS.tolist())
    assert (ids == 777).all()  # what was given stays as it is


def test_hiding_follows_from_its_random_numbers():
    ids, ordinary = np.arange(10, 110), np.ones(100, dtype=bool)
    one, two, other = (hide(ids, ordinary, hiding(), np.random.default_rng(s)) for s in (5, 5, 6))
    assert (one[0] == two[0]).all()
    assert one[1].tolist() == two[1].tolist() != other[1].tolist()


def test_little_is_hidden_of_little():
    ids = np.array([1, 50, 2])
    shown, places = hide(ids, ids >= 10, hiding(masked=1.0, random=0.0), np.random.default_rng(0))
    assert (shown.tolist(), places.tolist()) == ([1, MASK, 2], [1])
    shown, places = hide(ids, ids >= 100, hiding(), np.random.default_rng(0))
    assert (shown.tolist(), places.tolist()) == ([1, 50, 2], [])
