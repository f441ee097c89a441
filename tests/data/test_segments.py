"""Segments depend on the step alone, and cover the text."""

import numpy as np
import pytest

from longspan.data.segments import Shuffled, Streams

TEXT = np.arange(103, dtype=np.uint8)


def test_a_pass_reads_every_segment_once():
    segments = Shuffled(TEXT, length=10, batch=3, seed=1)
    assert segments.count == 9
    taken = [segments.take(step, range(3)) for step in range(6)]  # two passes
    assert all(part.shape == (3, 11) for part in taken)
    rows = np.concatenate(taken)
    assert (np.diff(rows.astype(int)) == 1).all()  # contiguous
    for one_pass in (rows[:9], rows[9:]):
        starts = sorted(one_pass[:, 0].tolist())
        assert np.diff(starts).tolist() == [10] * 8
    assert rows[:9].tolist() != rows[9:].tolist()


def test_segments_follow_from_the_step():
    """Whatever was asked for before, and however rows are shared out."""
    one, two = (Shuffled(TEXT, length=10, batch=4, seed=5) for _ in range(2))
    one.take(0, range(4))
    wanted = one.take(7, range(4))
    parts = [two.take(7, range(2, 4)), two.take(7, range(2))]
    assert np.concatenate(parts[::-1]).tolist() == wanted.tolist()
    assert Shuffled(TEXT, 10, 4, seed=6).take(7, range(4)).tolist() != wanted.tolist()


def test_streams_go_on_where_they_were():
    streams = Streams(TEXT, length=5, batch=2)
    assert streams.span == 51
    assert streams.count == 10
    before = streams.take(0, range(2))
    assert before[:, 0].tolist() == [0, 51]
    for step in range(1, 10):
        now = streams.take(step, range(2))
        assert now[:, 0].tolist() == before[:, -1].tolist()
        assert not streams.begins_anew(step)
        before = now
    assert streams.begins_anew(10)
    assert streams.take(10, range(2)).tolist() == streams.take(0, range(2)).tolist()


def test_too_little_text_is_said():
    with pytest.raises(ValueError, match="too few for segments of 100"):
        Shuffled(TEXT, length=100, batch=2, seed=0)
    with pytest.raises(ValueError, match="too few for 30 streams"):
        Streams(TEXT, length=5, batch=30)
