"""Softmax attention of blocks of queries to listed keys: one op for every pattern of blocks.

Each block of neighbouring queries has its own list of keys, anywhere in the text; what is asked is
softmax attention of these queries to these keys. A few blocks are taken at a time and, while
gradients are wanted, computed again in the backward pass, so that memory is linear in the number
of tokens as long as lists do not grow with it. Plain PyTorch, any device.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

# Scores that are computed at a time, over all batch rows and heads; more of a long text, as each
# time costs the backward pass a gradient of all keys.
_SCORES = 2**23
_TIMES = 16

Visible = Callable[[Tensor, Tensor], Tensor]


def listed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    listed: Tensor,
    visible: Visible | None = None,
    *,
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
            add to the scores. It is asked for a few blocks at a time.
        dropout_p: on the attention weights.
    """
    batch, queries, heads, head_dim = query.shape
    blocks, count = listed.shape[2:]
    if blocks != -(-queries // size):
        raise ValueError(f"{blocks} lists for {queries} queries in blocks of {size}")
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    q = pad(q, (0, 0, 0, -queries % size)).unflatten(2, (-1, size))
    place = torch.arange(blocks * size, device=query.device).view(blocks, size, 1)
    together = max(1, _SCORES // max(1, batch * heads * size * count), blocks // _TIMES)
    again = torch.is_grad_enabled() and together < blocks
    parts = []
    for first in range(0, blocks, together):
        own = slice(first, first + together)
        given = (q[:, :, own], k, v, listed[:, :, own], place[own], visible, dropout_p, scale)
        if again:
            keep = dropout_p > 0  # the same weights have to be dropped again
            parts.append(checkpoint(_few, *given, use_reentrant=False, preserve_rng_state=keep))
        else:
            parts.append(_few(*given))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return out.flatten(2, 3)[:, :, :queries].transpose(1, 2)


def _few(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    listed: Tensor,
    place: Tensor,
    visible: Visible | None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """[batch, heads, blocks, size, head_dim] of queries shaped so, and all keys and values."""
    batch, heads = query.shape[:2]
    k, v = _take(key, listed), _take(value, listed)
    there = (listed >= 0)[..., None, :]
    bias = None
    if visible is not None:
        seen = visible(place, listed[..., None, :])
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
    out = scaled_dot_product_attention(
        *(t.flatten(0, 1) for t in (query, k, v)),
        attn_mask=mask.flatten(0, 1),
        dropout_p=dropout_p,
        scale=scale,
    )
    return out.unflatten(0, (batch, heads)).masked_fill(blank, 0.0)


def _take(states: Tensor, listed: Tensor) -> Tensor:
    """[batch, heads, keys, head_dim] -> [batch, heads, blocks, count, head_dim]."""
    at = listed.clamp(min=0)
    if at.shape[:2] == (1, 1):
        return states.index_select(2, at.flatten()).unflatten(2, at.shape[2:])
    batch, heads, keys = states.shape[:3]
    row = torch.arange(batch * heads, device=at.device).view(batch, heads, 1, 1)
    at = row * keys + at
    return states.flatten(0, 2).index_select(0, at.flatten()).unflatten(0, at.shape)


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
    drawn = _drawn(most, heads, count, seed).to(blocks.device)
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


@lru_cache(maxsize=64)
def _drawn(blocks: int, heads: int, count: int, seed: int) -> Tensor:
    """[heads, blocks, count] from 0 to 1; those of fewer blocks are the first of these."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(blocks, heads, count, generator=generator, dtype=torch.float64)
    return drawn.transpose(0, 1)
