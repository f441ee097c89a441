"""Softmax attention of blocks of queries to listed keys: one op for every pattern of blocks.

Each block of neighbouring queries has its own list of keys, anywhere in the text; what is asked is
softmax attention of these queries to these keys. On a GPU the kernels of `listed_fused` compute it.
Elsewhere plain PyTorch takes a few blocks at a time and keeps no scores of them for the backward
pass, so that memory is linear in the number of tokens as long as lists do not grow with it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from longspan.ops import listed_fused
from longspan.ops.listed_fused import Asked, serves
from longspan.ops.operator import operator
from longspan.ops.pieces import by_torch, in_pieces, wide
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
    at: int | None = None,
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
        at: which key the first query stands at; no query sees a key behind its own. In place of
            first and last; None = the order of keys does not matter.
        dropout_p: on the attention weights.
    """
    blocks = listed.shape[2]
    if blocks != -(-query.shape[1] // size):
        raise ValueError(f"{blocks} lists for {query.shape[1]} queries in blocks of {size}")
    if (first is None) != (last is None) or (first is None and spans is not None):
        raise ValueError("first and last go together, and spans need them")
    if at is not None and first is not None:
        raise ValueError("first and last say who sees an entry, and so does at: give either")
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    asked = Asked(listed, first, last, valid, spans, None, size, width, ramp, at, scale, dropout_p)
    if serves(query):
        return listed_fused.attend(query, key, value, asked)
    return _plain(query, key, value, asked)


def causal_listed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    listed: Tensor,
    *,
    size: int,
    width: int = 1,
    dropout_p: float = 0.0,
) -> Tensor:
    """[batch, queries, heads, head_dim]: the same for the last tokens of a text, none of which
    sees those behind it.

    Args:
        query: [batch, queries, heads, head_dim], the last of the tokens.
        key, value: [batch, tokens, heads, head_dim].
        listed: [batch or 1, heads or 1, blocks, count] for those blocks of `size` tokens in which
            there are queries, see `blocks_asking`.
    """
    first = key.shape[1] - query.shape[1]
    begun = first % size
    if begun:  # queries are filled up at the front to the beginning of their block
        query = pad(query, (0, 0, 0, 0, begun, 0))
    out = listed_attention(
        *(query, key, value, listed), size=size, width=width, at=first - begun, dropout_p=dropout_p
    )
    return out[:, begun:]


def blocks_asking(query: Tensor, key: Tensor, size: int) -> tuple[int, int]:
    """Numbers of the first block of `size` tokens in which there are queries, which are the last of
    the tokens, and of the one behind the last."""
    return (key.shape[1] - query.shape[1]) // size, -(-key.shape[1] // size)


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
    pieces = [
        _Blocks(slice(first, first + together), asked) for first in range(0, blocks, together)
    ]
    if by_torch(pieces) and torch.is_grad_enabled():  # it adds up in the precision that keys have
        k, v = (t.to(wide(t)) for t in (k, v))
    learned = () if asked.spans is None else (asked.spans,)
    random = asked.dropout_p > 0
    # Torch's own kernel for a CPU, which may be asked for gradients without being asked again.
    knowing = query.device.type == "cpu" and not random and not learned and key.shape == value.shape
    out = in_pieces(pieces, 2, q, k, v, *learned, random=random, knowing=knowing)
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


class _Blocks(NamedTuple):
    """Neighbouring blocks of queries, and what they are asked: a `Piece` of [batch, heads, blocks,
    size, head_dim]."""

    own: slice
    asked: Asked

    def take(self, *states: Tensor) -> tuple[Tensor, ...]:
        """[batch, heads, keys, head_dim] -> [batch, heads, blocks, count, head_dim], each."""
        at = self._places(states[0])
        if at.dim() == 2:
            return tuple(t.index_select(2, at.flatten()).unflatten(2, at.shape) for t in states)
        return tuple(
            t.flatten(0, 2).index_select(0, at.flatten()).unflatten(0, at.shape) for t in states
        )

    def add(self, totals: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        at = self._places(totals[0])
        for total, own in zip(totals, more, strict=True):
            if at.dim() == 2:
                total.index_add_(2, at.flatten(), own.flatten(2, 3).to(total.dtype))
            else:
                total.flatten(0, 2).index_add_(0, at.flatten(), own.flatten(0, 3).to(total.dtype))

    def _places(self, states: Tensor) -> Tensor:
        """Where to find what is listed: one list [blocks, count] of keys for all batch rows and
        heads, or [batch, heads, blocks, count], counted through all of theirs."""
        at = self.asked.listed[:, :, self.own].clamp(min=0)
        if at.shape[:2] == (1, 1):
            return at[0, 0]
        batch, heads, keys = states.shape[:3]
        row = torch.arange(batch * heads, device=at.device).view(batch, heads, 1, 1)
        return row * keys + at

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        key, value = key.to(query.dtype), value.to(query.dtype)
        mask, blank = self._mask(query, *learned)
        # Backward nobody says which precision forward was asked for.
        with torch.autocast(query.device.type, enabled=False):
            out = scaled_dot_product_attention(
                *(t.flatten(0, 1) for t in (query, key, value)),
                attn_mask=mask,
                dropout_p=self.asked.dropout_p,
                scale=self.asked.scale,
            )
        return out.unflatten(0, query.shape[:2]).masked_fill(blank, 0.0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        bias, blank = self._bias(query)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(t.flatten(0, 1) for t in (query, key, value)),
            attn_mask=bias,
            scale=self.asked.scale,
        )
        return out.unflatten(0, query.shape[:2]).masked_fill(blank, 0.0), lse

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        kept: Tensor,
    ) -> Sequence[Tensor]:
        bias, blank = self._bias(query)
        gradient = gradient.masked_fill(blank, 0.0)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(t.flatten(0, 1) for t in (gradient, query, key, value, out)),
            *(kept, 0.0, False),
            attn_mask=bias,
            scale=self.asked.scale,
        )
        return [t.unflatten(0, query.shape[:2]) for t in found]

    def _bias(self, query: Tensor) -> tuple[Tensor, Tensor]:
        mask, blank = self._mask(query)
        bias = torch.zeros_like(mask, dtype=query.dtype)
        return bias.masked_fill_(~mask, -torch.inf), blank

    def _mask(self, query: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
        """What `_seen` returns, the mask for batch rows and heads as one dimension."""
        mask, blank = self._seen(query, *learned) if self.asked.at is None else self._seen_before()
        rows = query.shape[:2] if mask.shape[0] > 1 or mask.shape[1] > 1 else (1, 1)
        return mask.expand(*rows, *mask.shape[2:]).flatten(0, 1), blank

    def _seen(self, query: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
        """A mask or what is added to scores [..., blocks, size or 1, count], and which queries see
        nothing. These see something there, as they would be NaN."""
        asked, own = self.asked, self.own
        there = (asked.listed[:, :, own] >= 0)[..., None, :]
        bias = None
        if asked.first is not None and asked.last is not None:
            begin, size, blocks = own.start * asked.size, asked.size, query.shape[2]
            place = torch.arange(begin, begin + blocks * size, device=query.device)
            place = place.view(blocks, size, 1)
            distance = place - asked.first[own, None]
            there = there & (distance >= 0) & (place <= asked.last[own, None])
            for spans in learned:
                spans = spans.to(torch.promote_types(spans.dtype, torch.float32))
                left = asked.ramp + spans[:, None, None, None] - distance
                there = there & (left > 0)
                # No logarithm, and no gradient of it, where nothing is left.
                left = torch.where(there, (left / asked.ramp).clamp(max=1.0), 1.0)
                bias = left.log().to(query.dtype)
        blank = ~there.any(-1, keepdim=True)
        mask = there | blank
        if bias is not None:
            mask = bias.masked_fill(~mask, -torch.inf).masked_fill(blank, 0.0)
        return mask, blank

    def _seen_before(self) -> tuple[Tensor, Tensor]:
        """The same where no query sees a key behind its own, with one comparison for each score."""
        asked = self.asked
        assert asked.at is not None
        listed, size = asked.listed[:, :, self.own], asked.size
        block = torch.arange(listed.shape[2], device=listed.device)[:, None] + self.own.start
        # From which query of its block on a key is seen: behind the last, if there is no key.
        low = (listed - (block * size + asked.at)).clamp(0, size)
        low = torch.where(listed >= 0, low, size)
        low = low.to(torch.int16 if size < 2**15 else torch.int32)[..., None, :]
        query = torch.arange(size, dtype=low.dtype, device=low.device)[:, None]
        lowest = low.amin(-1, keepdim=True)
        return low <= torch.maximum(query, lowest), query < lowest


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


def _random_shape(blocks, most, heads, count, reach, seed):
    return blocks.new_empty((blocks.shape[0], heads, most, count), dtype=torch.int64)


# An operator, since torch 2.11 compiles its hashes for a GPU with 32-bit numbers, and fails.
@operator("random_blocks", fake=_random_shape)
def random_blocks(
    blocks: Tensor, most: int, heads: int, count: int, reach: int, seed: int
) -> Tensor:
    """[batch, heads, most, count]: for each block of each head `count` different others that are
    further away than `reach`, -1 where there are none left, of documents of `blocks` [batch]
    blocks in rows of `most`. Follows from the seed and the document's own length."""
    place = torch.arange(most, device=blocks.device)
    low = (place - reach).clamp(min=0)
    wide = (place + reach).minimum(blocks[:, None] - 1) - low + 1  # [batch, most]: the window
    found = _different(place, heads, count, (blocks[:, None] - wide)[:, None], seed)
    found = torch.where(found < low[:, None], found, found + wide[:, None, :, None])
    return torch.where(found < blocks[:, None, None, None], found, -1)


def _earlier_shape(place, heads, count, window, seed):
    return place.new_empty((heads, place.shape[0], count), dtype=torch.int64)


@operator("earlier_random_blocks", fake=_earlier_shape)
def earlier_random_blocks(place: Tensor, heads: int, count: int, window: int, seed: int) -> Tensor:
    """[heads, blocks, count]: for each of the blocks `place` [blocks] of each head `count`
    different ones before the last `window`, of which it is one itself; -1 where there are none
    left. Follows from the seed and the block, however long the text gets."""
    far = (place - window + 1).clamp(min=0)
    found = _different(place, heads, count, far, seed)
    return torch.where(found < far[:, None], found, -1)


def _different(place: Tensor, heads: int, count: int, far: Tensor, seed: int) -> Tensor:
    """[..., heads, blocks, count]: for each of the blocks `place` `count` different numbers below
    `far` [..., blocks], and any from there on where these are not enough."""
    drawn = _drawn(place, heads, count, seed)
    picked: list[Tensor] = []
    for number in range(count):
        # Of those left, counted without the ones picked: a number beyond one of them moves on.
        left = far - number
        one = (drawn[..., number] * left.clamp(min=1)).long()
        for other in torch.stack(picked, -1).sort(-1).values.unbind(-1) if picked else ():
            one = one + (one >= other)
        picked.append(torch.where(left > 0, one, far + number))  # behind all others
    return torch.stack(picked, -1) if picked else drawn.long() + far[..., None]


def _drawn(place: Tensor, heads: int, count: int, seed: int) -> Tensor:
    """[heads, blocks, count] from 0 to 1. Computed, not drawn: the same on every device, and none
    has to wait for numbers of another."""
    head, number = (torch.arange(n, device=place.device) for n in (heads, count))
    row = mix(((seed * GOLDEN & WORD) + head) & WORD)[:, None] + place
    return mix(mix(row & WORD)[..., None] ^ (number * GOLDEN & WORD)).double() / 2**32
