"""BlockBERT: against a mask written out block by block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from layers.family import HEADS, causal_layer, encoder_layer, heads_of, joined, states, written_out

from longspan.layers.blockwise import BlockwiseAttention, CausalBlockwise
from longspan.ops import visibility

pytestmark = pytest.mark.usefixtures("on_device")


def masked(made, hidden, seen):
    """Attention under a mask [batch, heads, tokens, tokens]; rows that see nothing are zero."""
    query, key, value = heads_of(made, hidden)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).exp() * seen
    total = scores.sum(-1, keepdim=True)
    return joined(scores / torch.where(total == 0, 1.0, total) @ value)


@settings(max_examples=30, deadline=None)
@given(
    some.integers(1, 23),
    some.integers(1, 9),
    some.lists(some.integers(-3, 3), min_size=HEADS, max_size=HEADS),
    some.integers(0, 2**23 - 1),
)
def test_the_mask_written_out(tokens, block, shifts, holes):
    made = encoder_layer({"kind": "blockwise", "block": block, "shifts": shifts})
    hidden = states(2, tokens)
    valid = torch.tensor([[True] * tokens, [not holes >> i & 1 for i in range(tokens)]])
    there = valid.nonzero().tolist()
    first = [min([i for row, i in there if row == r], default=0) for r in (0, 1)]
    last = [max([i for row, i in there if row == r], default=0) for r in (0, 1)]
    seen = torch.zeros(2, HEADS, tokens, tokens, dtype=torch.bool)
    for row in (0, 1):
        blocks = (last[row] - first[row]) // block + 1
        for head, shift in enumerate(shifts):
            for i in range(tokens):
                for j in range(tokens):
                    if valid[row, i] and valid[row, j]:
                        mine, other = ((place - first[row]) // block for place in (i, j))
                        seen[row, head, i, j] = (mine + shift) % blocks == other
    found = made(hidden, seen=visibility(hidden, attention_mask=valid))
    torch.testing.assert_close(found, masked(made, hidden, seen))
    assert not found[~valid].any()


def test_one_block_is_dense_attention():
    made, hidden = encoder_layer({"kind": "blockwise", "block": 30}), states(2, 21)
    everything = torch.ones(2, HEADS, 21, 21, dtype=torch.bool)
    torch.testing.assert_close(made(hidden), masked(made, hidden, everything))


def test_the_papers_division_of_heads():
    assert BlockwiseAttention(24, 12).shifts == (0,) * 8 + (1, -1, 1, -1)
    assert BlockwiseAttention(24, 2).shifts == (0, 1)
    assert BlockwiseAttention(24, 1).shifts == (0,)
    assert CausalBlockwise(24, 12).shifts == (0,) * 8 + (-1,) * 4


@settings(max_examples=30, deadline=None)
@given(
    some.integers(1, 23),
    some.integers(1, 9),
    some.lists(some.integers(-3, 0), min_size=HEADS, max_size=HEADS),
    some.integers(1, 23),
)
def test_the_causal_mask_written_out(tokens, block, shifts, at_a_time):
    """However much is read at a time, and of what the state holds nothing is too little."""
    made = causal_layer({"kind": "blockwise", "block": block, "shifts": shifts})
    hidden = states(2, tokens)
    seen = torch.zeros(HEADS, tokens, tokens, dtype=torch.bool)
    for head, shift in enumerate(shifts):
        for i in range(tokens):
            for j in range(i + 1):
                seen[head, i, j] = i // block + shift == j // block
    state, first, found = None, 0, []
    for piece in hidden.split(at_a_time, 1):
        out, state, _ = made(piece, first, state, keep_state=True)
        first += piece.shape[1]
        found.append(out)
        assert state.key.shape[1] < block * (1 - min(shifts))
    torch.testing.assert_close(torch.cat(found, 1), written_out(made, hidden, seen))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"shifts": [0, 0, 1]}, r"\[0, 0, 1\] must be 0 or below"), ({"block": 0}, "at least 1")],
)
def test_a_wrong_causal_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        causal_layer({"kind": "blockwise", **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [({"block": 0}, "block=0 must be at least 1"), ({"shifts": [0, 1]}, "must be 3 whole numbers")],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        encoder_layer({"kind": "blockwise", **change})
