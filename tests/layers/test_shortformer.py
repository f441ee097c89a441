"""Shortformer: against its formula token by token, and what its memory promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from layers.family import DIM, HEADS, causal_layer, joined, states

from longspan.layers.position import sinusoids
from longspan.layers.shortformer import ShortformerAttention

pytestmark = pytest.mark.usefixtures("on_device")


def formula(made, hidden, segment, places=None):
    """Every token with its own segment and the one before, one after the other."""
    wq, wk, wv = made.qkv.weight.chunk(3)
    places = sinusoids(torch.arange(2 * segment), DIM, hidden.dtype) if places is None else places
    batch, tokens = hidden.shape[:2]

    def heads(t):
        return t.unflatten(-1, (HEADS, -1))

    out = hidden.new_zeros(batch, tokens, HEADS, DIM // HEADS)
    for i in range(tokens):
        start = (i // segment - 1) * segment
        seen = range(max(0, start), i + 1)
        query = heads((hidden[:, i] + places[i - start]) @ wq.T)
        key = heads(torch.stack([hidden[:, j] + places[j - start] for j in seen], 1) @ wk.T)
        value = heads(hidden[:, list(seen)] @ wv.T)
        weights = torch.einsum("bhd,bjhd->bhj", query, key) / (DIM // HEADS) ** 0.5
        out[:, i] = torch.einsum("bhj,bjhd->bhd", weights.softmax(-1), value)
    return out.flatten(2)


@settings(max_examples=25, deadline=None)
@given(some.integers(1, 30), some.integers(1, 9), some.integers(1, 30))
def test_the_formula_in_any_pieces(tokens, segment, piece):
    made = causal_layer({"kind": "shortformer", "segment": segment})
    hidden, state, first, out = states(2, tokens), None, 0, []
    for part in hidden.split(piece, 1):
        done = made(part, first, state, keep_state=True)
        state, first = done.state, first + part.shape[1]
        out.append(done.out)
        assert state.shape[1] < 2 * segment
    wanted = formula(made, hidden, segment)
    torch.testing.assert_close(torch.cat(out, 1), wanted)
    torch.testing.assert_close(made(hidden).out, wanted)


def test_one_segment_is_causal_attention_with_positions_in_keys_alone():
    made, hidden = causal_layer({"kind": "shortformer", "segment": 30}), states(2, 21)
    places = sinusoids(torch.arange(30, 51), DIM, hidden.dtype)
    query, key, _ = made.project(hidden + places)
    value = made.project(hidden)[2]
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(made(hidden).out, joined(wanted))


def test_values_know_no_places():
    """A token that sees one other alone gets its value, wherever that stands."""
    made = causal_layer({"kind": "shortformer", "segment": 5})
    one = states(1, 1)
    many = one.expand(1, 13, DIM)
    torch.testing.assert_close(made(many).out, made(one).out.expand(1, 13, DIM))


def test_no_gradient_flows_into_the_memory_and_training_projects_it_anew():
    made = causal_layer({"kind": "shortformer", "segment": 4})
    hidden = states(1, 9).requires_grad_()
    for training in (True, False):
        made.train(training)
        state = made(hidden, keep_state=True).state
        assert not state.requires_grad
        assert state.shape == (1, 5, DIM if training else 3 * DIM)
    kept, after = made.train()(hidden, keep_state=True).state, states(1, 6)
    other = made.eval()(hidden, keep_state=True).state
    torch.testing.assert_close(made(after, 9, kept).out, made(after, 9, other).out)
    with torch.no_grad():
        made.qkv.weight.mul_(1.5)
    made.train()
    torch.testing.assert_close(made(after, 9, kept).out, made(after, 9, other).out)


def test_a_wrong_setting_is_named():
    with pytest.raises(ValueError, match="segment=0 must be at least 1"):
        ShortformerAttention(DIM, HEADS, 0)
