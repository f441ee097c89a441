"""Softmax attention of blocks of queries to listed keys: one op for every pattern of blocks.

Each block of neighbouring queries has its own list of keys, anywhere in the text; what is asked is
softmax attention of these queries to these keys. On a GPU the kernels of `listed_fused` compute it.
Elsewhere plain PyTorch takes a few blocks at a time and, while gradients are wanted, computes them
again in the backward pass, so that memory is linear in the number of tokens as long as lists do not
grow with it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from longspan.ops import listed_fused
from longspan.ops.listed_fused import Asked, serves
from longspan.ops.operator import operator
from longspan.ops.window.dropout import GOLDEN, WORD, mix

# Scores that are computed at a time, over all batch rows and heads. A CPU wants all that belongs
# to them in its caches: memory fresh from the system costs it more, page by page, than the sums.
# On a GPU every time has to be launched, so there are no more than some of them.
_CPU_SCORES = 2**20
_SCORES = 2**23
_TIMES = 16


def listed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    listed: Tensor,
    *,
    size: int,
    width: int = 1,
    first: Tensor | None = None,
    last: Tensor | None = None,
    valid: Tensor | None = None,
    spans: Tensor | None = None,
    ramp: int = 1,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """[batch, queries, heads, head_dim]; rows that see nothing are zero. Differentiable once.

    Args:
        query: [batch, queries, heads, head_dim], in blocks of `size`; the last may be shorter.
        key, value: [batch, keys, heads, head_dim].
        listed: [batch or 1, heads or 1, blocks, count], places of keys; -1 = no key. A key that is
            listed twice counts twice.
        width: an entry of a list stands for so many neighbouring keys: number r for those from
            r * width on.
        first, last: [blocks, count], the first and the last query that sees an entry; None = all
            of its block do.
        valid: bool [batch, keys], False = nobody sees it; None = all are seen.
        spans: [heads], what is learned of how long entries are seen: weights are multiplied by
            clamp((ramp + span - distance) / ramp, 0, 1), at a distance from an entry's first query.
        dropout_p: on the attention weights.
    """
    blocks = listed.shape[2]
    if blocks != -(-query.shape[1] // size):
        raise ValueError(f"{blocks} lists for {query.shape[1]} queries in blocks of {size}")
    if (first is None) != (last is None) or (first is None and spans is not None):
        raise ValueError("first and last go together, and spans need them")
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    asked = Asked(listed, first, last, valid, spans, None, size, width, ramp, scale, dropout_p)
    if serves(query):
        return listed_fused.attend(query, key, value, asked)
    return _plain(query, key, value, asked)


def _plain(query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
    batch, queries, heads, _ = query.shape
    asked = _key_by_key(asked, key)
    size, (blocks, count) = asked.size, asked.listed.shape[2:]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if asked.listed.shape[0] > 1 or asked.listed.shape[1] > 1:
        k, v = k.contiguous(), v.contiguous()  # once, not for every piece
    if queries % size:
        q = pad(q, (0, 0, 0, -queries % size))
    q = q.unflatten(2, (-1, size))
    each = max(1, batch * heads * size * count)
    if query.device.type == "cpu":
        together = max(1, _CPU_SCORES // each)
    else:
        together = max(1, _SCORES // each, blocks // _TIMES)
    call = _Call(asked, together)
    learned = () if asked.spans is None else (asked.spans,)
    if together >= blocks:
        out = _few(q, k, v, call, slice(0, blocks), *learned)
    elif torch.compiler.is_compiling():
        # The compiler cannot look into what `_Pieces` does backward.
        parts = [
            checkpoint(_few, q[:, :, own], k, v, call, own, *learned, use_reentrant=False)
            for own in call.pieces()
        ]
        out = torch.cat(parts, 2)
    else:
        out = _Pieces.apply(q, k, v, call, *learned)
    return out.flatten(2, 3)[:, :, :queries].transpose(1, 2)


def _key_by_key(asked: Asked, key: Tensor) -> Asked:
    """Lists of single keys, of such as somebody sees."""
    listed, first, last = asked.listed, asked.first, asked.last
    if asked.width > 1:
        listed = tokens_of(listed, asked.width, key.shape[1])
        if first is not None and last is not None:
            first, last = (t.repeat_interleave(asked.width, -1) for t in (first, last))
    if asked.valid is not None:
        at = listed.clamp(min=0).long().expand(key.shape[0], -1, -1, -1)
        there = asked.valid.gather(1, at.flatten(1)).view(at.shape)
        listed = torch.where(there, listed, -1)
    return asked._replace(listed=listed, width=1, first=first, last=last, valid=None)


class _Call(NamedTuple):
    """What is asked of so many blocks at a time."""

    asked: Asked
    together: int

    def pieces(self) -> Iterator[slice]:
        for first in range(0, self.asked.listed.shape[2], self.together):
            yield slice(first, first + self.together)


class _Pieces(torch.autograd.Function):
    """Piece after piece, and backward each once more. They add to one gradient of all keys, where
    torch's own would be one for every piece."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call, *learned: Tensor
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, *learned)
        ctx.call, ctx.random = call, None
        if call.asked.dropout_p > 0:  # the same weights have to be dropped again
            ctx.random = _generator(query.device).get_rng_state()
        out = torch.empty_like(query)
        for own in call.pieces():
            out[:, :, own] = _few(query[:, :, own], key, value, call, own, *learned)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, *learned = ctx.saved_tensors
        call: _Call = ctx.call
        learned = [t.detach().requires_grad_() for t in learned]
        by_query = torch.empty_like(query)
        # A key may be in many lists: its gradient is a long sum.
        sums = [t.new_zeros(t.shape, dtype=_wide(t)) for t in (key, value, *learned)]
        with _random_again(query.device, ctx.random):
            for own in call.pieces():
                at = _places(call.asked.listed[:, :, own], key)
                q, k, v = leaves = [
                    t.detach().requires_grad_()
                    for t in (query[:, :, own], _take(key, at), _take(value, at))
                ]
                with torch.enable_grad():
                    out = _attend(q, k, v, call, own, *learned)
                found = torch.autograd.grad(out, [*leaves, *learned], gradient[:, :, own])
                by_query[:, :, own] = found[0]
                for total, more in zip(sums[:2], found[1:3], strict=True):
                    _add(total, at, more)
                for total, more in zip(sums[2:], found[3:], strict=True):
                    total += more
        found = [total.to(t.dtype) for total, t in zip(sums, (key, value, *learned), strict=True)]
        return by_query, found[0], found[1], None, *found[2:]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _generator(device: torch.device) -> Any:
    """The module that knows the state of the device's random numbers."""
    return torch if device.type == "cpu" else torch.get_device_module(device)


@contextmanager
def _random_again(device: torch.device, state: Tensor | None) -> Iterator[None]:
    """Random numbers as they came after `state`, and then as if nobody had drawn them."""
    module = _generator(device)
    now = None if state is None else module.get_rng_state()
    try:
        if state is not None:
            module.set_rng_state(state)
        yield
    finally:
        if now is not None:
            module.set_rng_state(now)


def _few(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, own: slice, *learned: Tensor
) -> Tensor:
    """[batch, heads, blocks, size, head_dim] of queries shaped so, and all keys and values."""
    at = _places(call.asked.listed[:, :, own], key)
    return _attend(query, _take(key, at), _take(value, at), call, own, *learned)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, own: slice, *learned: Tensor
) -> Tensor:
    """The same of the keys and values that are listed, [batch, heads, blocks, count, head_dim]."""
    batch, heads, blocks = query.shape[:3]
    asked = call.asked
    there = (asked.listed[:, :, own] >= 0)[..., None, :]
    bias = None
    if asked.first is not None and asked.last is not None:
        begin, size = own.start * asked.size, asked.size
        place = torch.arange(begin, begin + blocks * size, device=query.device)
        place = place.view(blocks, size, 1)
        distance = place - asked.first[own, None]
        there = there & (distance >= 0) & (place <= asked.last[own, None])
        for spans in learned:
            left = asked.ramp + spans.to(_wide(spans))[:, None, None, None] - distance
            there = there & (left > 0)
            # Where nothing is left the logarithm must not be asked for, not even for a gradient.
            left = torch.where(there, (left / asked.ramp).clamp(max=1.0), 1.0)
            bias = left.log().to(query.dtype)
    blank = ~there.any(-1, keepdim=True)
    mask = there | blank  # a row that sees nothing would be NaN
    if bias is not None:
        mask = bias.masked_fill(~mask, -torch.inf).masked_fill(blank, 0.0)
    if mask.shape[0] > 1 or mask.shape[1] > 1:
        mask = mask.expand(batch, heads, *mask.shape[2:])
    else:
        mask = mask.expand(1, 1, *mask.shape[2:])
    # Backward nobody says which precision forward was asked for.
    with torch.autocast(query.device.type, enabled=False):
        out = scaled_dot_product_attention(
            *(t.flatten(0, 1) for t in (query, key, value)),
            attn_mask=mask.flatten(0, 1),
            dropout_p=asked.dropout_p,
            scale=asked.scale,
        )
    return out.unflatten(0, (batch, heads)).masked_fill(blank, 0.0)


def _places(listed: Tensor, states: Tensor) -> Tensor:
    """Where to find what is listed: one list [blocks, count] of keys for all batch rows and heads,
    or [batch, heads, blocks, count], counted through all of theirs."""
    at = listed.clamp(min=0)
    if at.shape[:2] == (1, 1):
        return at[0, 0]
    batch, heads, keys = states.shape[:3]
    row = torch.arange(batch * heads, device=at.device).view(batch, heads, 1, 1)
    return row * keys + at


def _take(states: Tensor, at: Tensor) -> Tensor:
    """[batch, heads, keys, head_dim] -> [batch, heads, blocks, count, head_dim]."""
    if at.dim() == 2:
        return states.index_select(2, at.flatten()).unflatten(2, at.shape)
    return states.flatten(0, 2).index_select(0, at.flatten()).unflatten(0, at.shape)


def _add(states: Tensor, at: Tensor, more: Tensor) -> None:
    """The other way round, to contiguous states."""
    if at.dim() == 2:
        states.index_add_(2, at.flatten(), more.flatten(2, 3).to(states.dtype))
    else:
        states.flatten(0, 2).index_add_(0, at.flatten(), more.flatten(0, 3).to(states.dtype))


def tokens_of(blocks: Tensor, size: int, tokens: int) -> Tensor:
    """Numbers of blocks [..., picked], -1 = none -> the places of their tokens [..., picked *
    size], -1 for those that a block does not have."""
    place = blocks[..., None] * size + torch.arange(size, device=blocks.device)
    return torch.where((blocks >= 0)[..., None] & (place < tokens), place, -1).flatten(-2)


def count_blocks(valid: Tensor, size: int) -> Tensor:
    """[batch]: how many blocks of `size` the tokens of each row reach into, at least 1."""
    place = torch.arange(valid.shape[1], device=valid.device)
    return torch.where(valid, place // size + 1, 1).amax(1)


def near_blocks(blocks: int, reach: int, device: torch.device) -> Tensor:
    """[blocks, 2 * reach + 1]: each block and its neighbours on both sides, -1 beyond the ends."""
    near = torch.arange(blocks, device=device)[:, None]
    near = near + torch.arange(-reach, reach + 1, device=device)
    return torch.where((near >= 0) & (near < blocks), near, -1)


def _drawn_shape(blocks, most, heads, count, reach, seed):
    return blocks.new_empty((blocks.shape[0], heads, most, count), dtype=torch.int64)


# An operator, since torch 2.11 compiles its hashes for a GPU with 32-bit numbers, and fails.
@operator("random_blocks", fake=_drawn_shape)
def random_blocks(
    blocks: Tensor, most: int, heads: int, count: int, reach: int, seed: int
) -> Tensor:
    """[batch, heads, most, count]: for each block of each head `count` different others that are
    further away than `reach`, -1 where there are none left, of documents of `blocks` [batch]
    blocks in rows of `most`. Follows from the seed and the document's own length."""
    place = torch.arange(most, device=blocks.device)
    low = (place - reach).clamp(min=0)
    wide = (place + reach).minimum(blocks[:, None] - 1) - low + 1  # [batch, most]: the window
    far = (blocks[:, None] - wide)[:, None]  # how many there are to choose from
    drawn = _drawn(most, heads, count, seed, blocks.device)
    picked: list[Tensor] = []
    for number in range(count):
        # Of those left, counted without the ones picked: a number beyond one of them moves on.
        left = far - number
        one = (drawn[..., number] * left.clamp(min=1)).long()
        for other in torch.stack(picked, -1).sort(-1).values.unbind(-1) if picked else ():
            one = one + (one >= other)
        picked.append(torch.where(left > 0, one, most + number))  # behind all others
    if not picked:
        return place.new_empty(blocks.shape[0], heads, most, 0)
    found = torch.stack(picked, -1)
    there = found < most
    found = torch.where(found < low[:, None], found, found + wide[:, None, :, None])
    return torch.where(there, found, -1)


def _drawn(blocks: int, heads: int, count: int, seed: int, device: torch.device) -> Tensor:
    """[heads, blocks, count] from 0 to 1; those of fewer blocks are the first of these. Computed,
    not drawn: the same on every device, and none has to wait for numbers of another."""
    head, block, number = (torch.arange(n, device=device) for n in (heads, blocks, count))
    row = mix((seed * GOLDEN + head) & WORD)[:, None] + block
    return mix(mix(row & WORD)[..., None] ^ (number * GOLDEN & WORD)).double() / 2**32
