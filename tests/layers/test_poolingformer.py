"""Poolingformer: against its two levels written out, and what follows from them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from layers.family import (
    HEADS,
    causal_layer,
    encoder_layer,
    heads_of,
    joined,
    states,
    turned_heads,
    written_out,
)

from longspan.layers.registry import build_attention
from longspan.ops import visibility, window_attention

pytestmark = pytest.mark.usefixtures("on_device")

SETTING = {"kind": "poolingformer", "window": (2, 3), "pooled_window": (11, 9)}


def apart(project, hidden):
    return [t.transpose(1, 2) for t in project(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)]


def seen_in(tokens, window):
    distance = torch.arange(tokens)[None] - torch.arange(tokens)[:, None]
    return (distance >= -window[0]) & (distance <= window[1])


def dense(query, key, value, seen):
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def pooled(x, how, kernel, stride, linear):
    """[batch, heads, pools, head_dim], pool by pool."""
    made = []
    for begin in range(0, x.shape[2], stride):
        piece = x[:, :, begin : begin + kernel]
        if how == "mean":
            made.append(piece.mean(2))
        elif how == "max":
            made.append(piece.amax(2))
        else:
            at = kernel // 2
            middle = piece[:, :, at] if at < piece.shape[2] else torch.zeros_like(piece[:, :, 0])
            share = linear(middle)[..., : piece.shape[2]].softmax(-1)
            made.append((piece * share[..., None]).sum(2))
    return torch.stack(made, 2)


@pytest.mark.parametrize("pool", ["mean", "max", "convolution"])
@pytest.mark.parametrize(("mix", "share"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("tokens", "kernel", "stride"), [(41, 5, 4), (150, 3, 3), (7, 4, 1)])
def test_both_levels_written_out(pool, mix, share, tokens, kernel, stride):
    options = {"pool": pool, "mix": mix, "share_weights": share, "kernel": kernel, "stride": stride}
    made, hidden = encoder_layer({**SETTING, **options}), states(2, tokens)
    first = joined(dense(*heads_of(made, hidden), seen=seen_in(tokens, (2, 3))))
    project = made.qkv if share else made.qkv_pooled
    query, key, value = apart(project, hidden if mix else first)
    begin = torch.arange(0, tokens, stride)
    place = torch.arange(tokens)[:, None]
    seen = (begin >= place - 11) & (begin + kernel - 1 <= place + 9)
    key = pooled(key, pool, kernel, stride, made.pool_key)
    value = pooled(value, pool, kernel, stride, made.pool_value)
    wanted = first + joined(dense(query, key, value, seen))
    torch.testing.assert_close(made(hidden), wanted)


def test_pools_of_one_are_a_plain_window():
    made, hidden = encoder_layer({**SETTING, "kernel": 1, "stride": 1}), states(2, 50)
    first = joined(dense(*heads_of(made, hidden), seen=seen_in(50, (2, 3))))
    q, k, v = (t.transpose(1, 2) for t in apart(made.qkv_pooled, first))
    second = window_attention(q, k, v, window=(11, 9)).flatten(2)
    torch.testing.assert_close(made(hidden), first + second)


@torch.no_grad()
def test_weights_that_are_all_alike_are_the_mean():
    convolved = encoder_layer({**SETTING, "pool": "convolution"})
    mean = encoder_layer({**SETTING, "pool": "mean"})
    mean.load_state_dict(convolved.state_dict(), strict=False)
    for linear in (convolved.pool_key, convolved.pool_value):
        linear.weight.zero_()
        linear.bias.fill_(0.7)
    hidden = states(2, 33)
    torch.testing.assert_close(convolved(hidden), mean(hidden))


@torch.no_grad()
def test_without_its_second_level_it_is_the_first():
    made, hidden = encoder_layer(SETTING), states(2, 33)
    made.qkv_pooled.weight.zero_()
    made.qkv_pooled.bias.zero_()
    q, k, v = (t.transpose(1, 2) for t in heads_of(made, hidden))
    first = window_attention(q, k, v, window=(2, 3)).flatten(2)
    torch.testing.assert_close(made(hidden), first)


@torch.no_grad()
def test_how_far_it_sees():
    made, hidden = encoder_layer(SETTING), states(1, 80)
    out = made(hidden)
    for at in (0, 40, 79):
        other = hidden.clone()
        other[:, at] += 1.0
        changed = (made(other) - out).abs().amax(-1)[0] > 1e-12
        first, last = changed.nonzero().flatten()[[0, -1]].tolist()
        # Seen from the left by 9 + 3 tokens at most, from the right by 11 + 2.
        assert at - 12 <= first <= at - 4 or first == 0
        assert at + 5 <= last <= at + 13 or last == 79


def test_global_tokens_are_global_in_the_first_level():
    made, hidden = encoder_layer(SETTING), states(1, 60)
    mask = torch.zeros(1, 60, dtype=torch.long)
    mask[:, 0] = 1
    seen = visibility(hidden, global_mask=mask)
    other = hidden.clone()
    other[:, 0] += 1.0
    changed = (made(hidden, seen=seen) - made(other, seen=seen)).abs().amax(-1)[0]
    assert bool((changed > 1e-9).all())


@settings(max_examples=40, deadline=None)
@given(
    tokens=some.integers(1, 60),
    at_a_time=some.integers(1, 60),
    pool=some.sampled_from(["mean", "max", "convolution"]),
    variant=some.sampled_from([{}, {"mix": True}, {"share_weights": True}]),
    kernel_stride=some.sampled_from([(5, 4), (3, 3), (4, 1), (1, 1)]),
    pooled_left=some.integers(4, 30),
)
def test_the_causal_levels_written_out(
    tokens, at_a_time, pool, variant, kernel_stride, pooled_left
):
    """However much is read at a time; the state is that of a window, its tokens pooled."""
    kernel, stride = kernel_stride
    options = {"pool": pool, "kernel": kernel, "stride": stride, "pooled_left": pooled_left}
    made = causal_layer({"kind": "poolingformer", "left": 3, **options, **variant})
    hidden = states(2, tokens)
    near = written_out(made, hidden, seen_in(tokens, (3, 0)))
    project = made.qkv if "share_weights" in variant else made.qkv_pooled
    query, key, value = turned_heads(project, hidden if "mix" in variant else near)
    begin = torch.arange(0, tokens, stride)
    place = torch.arange(tokens)[:, None]
    seen = (begin >= place - pooled_left) & (begin + kernel - 1 <= place)
    key = pooled(key, pool, kernel, stride, made.pool_key)
    value = pooled(value, pool, kernel, stride, made.pool_value)
    wanted = near + joined(dense(query, key, value, seen))
    state, first, found = None, 0, []
    for piece in hidden.split(at_a_time, 1):
        out, state, _ = made(piece, first, state, keep_state=True)
        first += piece.shape[1]
        found.append(out)
        assert state.near.key.shape[1] <= 3
        assert state.pools.key.shape[1] <= pooled_left // stride + 1
        assert state.rest.key.shape[1] < kernel + stride
    torch.testing.assert_close(torch.cat(found, 1), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 6}, "stride=6 must be from 1 to kernel=5"),
        ({"left": -1}, "left=-1 must be a whole number of steps"),
        ({"pooled_left": -1}, "pooled_left=-1 must be a whole number of steps"),
        ({"pooled_left": 3}, "pooled_left=3 holds no pool of kernel=5"),
    ],
)
def test_a_wrong_causal_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        causal_layer({"kind": "poolingformer", **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 6}, "stride=6 must be from 1 to kernel=5"),
        ({"pool": "sum"}, "pool='sum' is unknown; choose from mean, max, convolution"),
        ({"pooled_window": 7}, "window=7 must be even"),
        ({"pooled_window": 2}, "pooled_window=2 holds no pool of kernel=5"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        build_attention(24, 3, {**SETTING, **change})
