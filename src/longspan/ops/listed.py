"""Softmax attention of blocks of queries to listed keys: one op for every pattern of blocks.

Each block of neighbouring queries has its own list of keys, anywhere in the text; what is asked is
softmax attention of these queries to these keys. A few blocks are taken at a time and, while
gradients are wanted, computed again in the backward pass, so that memory is linear in the number
of tokens as long as lists do not grow with it. Plain PyTorch, any device.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from longspan.ops.window.dropout import GOLDEN, WORD, mix

# Scores that are computed at a time, over all batch rows and heads. A CPU wants all that belongs
# to them in its caches: memory fresh from the system costs it more, page by page, than the sums.
# On a GPU every time has to be launched, so there are no more than some of them.
_CPU_SCORES = 2**20
_SCORES = 2**23
_TIMES = 16

Visible = Callable[..., Tensor]


def listed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    listed: Tensor,
    visible: Visible | None = None,
    *learned: Tensor,
    size: int,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """[batch, queries, heads, head_dim]; rows that see nothing are zero.

    Args:
        query: [batch, queries, heads, head_dim], in blocks of `size`; the last may be shorter.
        key, value: [batch, keys, heads, head_dim].
        listed: [batch or 1, heads or 1, blocks, count], places of keys; -1 = no key. A key that is
            listed twice counts twice.
        visible: of places [blocks, size, 1] of queries and a list [batch or 1, heads or 1, blocks,
            1, count], what to see of it, in the shape that they broadcast to: bool, or a number to
            add to the scores. It is asked for a few blocks at a time, and given `learned` too.
        learned: what `visible` gives depends on them, and shall teach them.
        dropout_p: on the attention weights.
    """
    batch, queries, heads, head_dim = query.shape
    blocks, count = listed.shape[2:]
    if blocks != -(-queries // size):
        raise ValueError(f"{blocks} lists for {queries} queries in blocks of {size}")
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if listed.shape[0] > 1 or listed.shape[1] > 1:
        k, v = k.contiguous(), v.contiguous()  # once, not for every piece
    q = pad(q, (0, 0, 0, -queries % size)).unflatten(2, (-1, size))
    each = max(1, batch * heads * size * count)
    if query.device.type == "cpu":
        together = max(1, _CPU_SCORES // each)
    else:
        together = max(1, _SCORES // each, blocks // _TIMES)
    call = _Call(listed, visible, size, dropout_p, scale, together)
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


class _Call(NamedTuple):
    """What a call asks for besides the tensors that learn from it."""

    listed: Tensor
    visible: Visible | None
    size: int
    dropout_p: float
    scale: float
    together: int

    def pieces(self) -> Iterator[slice]:
        for first in range(0, self.listed.shape[2], self.together):
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
        if call.dropout_p > 0:  # the same weights have to be dropped again
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
                at = _places(call.listed[:, :, own], key)
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
    at = _places(call.listed[:, :, own], key)
    return _attend(query, _take(key, at), _take(value, at), call, own, *learned)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, own: slice, *learned: Tensor
) -> Tensor:
    """The same of the keys and values that are listed, [batch, heads, blocks, count, head_dim]."""
    batch, heads, blocks = query.shape[:3]
    listed = call.listed[:, :, own]
    there = (listed >= 0)[..., None, :]
    bias = None
    if call.visible is not None:
        first, size = own.start * call.size, call.size
        place = torch.arange(first, first + blocks * size, device=query.device)
        place = place.view(blocks, size, 1)
        seen = call.visible(place, listed[..., None, :], *learned)
        if seen.dtype != torch.bool:
            bias = seen.to(query.dtype)
            seen = bias > -torch.inf
        there = there & seen
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
            dropout_p=call.dropout_p,
            scale=call.scale,
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


def near_blocks(blocks: int, reach: int, device: torch.device) -> Tensor:
    """[blocks, 2 * reach + 1]: each block and its neighbours on both sides, -1 beyond the ends."""
    near = torch.arange(blocks, device=device)[:, None]
    near = near + torch.arange(-reach, reach + 1, device=device)
    return torch.where((near >= 0) & (near < blocks), near, -1)


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
