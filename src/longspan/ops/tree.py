"""Attention to the spans of a binary tree: fine nearby, coarse far away (BP-Transformer).

The tokens of a text are the leaves of a tree whose spans of level l are 2^l tokens long, the m-th
from m * 2^l on. A span's key and value are the means of its tokens'. A token may look at a span
that is far enough away for its size,

    tokens from here to the span's nearest >= near * (size - 1),

and sees the largest such spans: those whose parent is not far enough. They leave no token out and
share none, and there are about `near` of each level on each side, so time and memory are of the
order n * near * log(n / near). Each counts as one key. With `near` beyond the text's length this
is softmax attention to all tokens.

So a span is seen from its right by the tokens of one interval, from its left by those of another,
and lists of spans for blocks of queries follow from the numbers alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.ops.listed import listed_attention
from longspan.ops.once import made_once
from longspan.ops.spans import count_spans, serves, span_means

_BLOCK = 64  # queries whose spans are listed together

Bounds = tuple[tuple[int, int], ...]  # of each level: its first span, and behind its last


class Level(NamedTuple):
    """Spans of one size, the first of them being number `first`."""

    both: Tensor  # [batch, spans, 2, heads, head_dim]: key and value
    first: int

    @property
    def end(self) -> int:
        return self.first + self.both.shape[1]


class Tree(NamedTuple):
    """What a causal call needs to know of the tokens before it: of each level, finest first, the
    spans that a later token may see, some 2 * near of them. How many follows from the tokens."""

    both: Tensor  # [batch, spans, 2, heads, head_dim], in at least float32
    tokens: int  # read so far

    def levels(self, near: int) -> list[Level]:
        """Of a tree made with this `near`."""
        sizes = [2**number for number in range(_levels(self.tokens, near))]
        first = [_first_kept(self.tokens, size, near) for size in sizes]
        counts = [self.tokens // size - one for size, one in zip(sizes, first, strict=True)]
        return [Level(*level) for level in zip(self.both.split(counts, 1), first, strict=True)]


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    near: int,
    valid: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """[batch, tokens, heads, head_dim]: every token sees spans on both sides; rows that see nothing
    are zero.

    Args:
        query, key, value: [batch, tokens, heads, head_dim], of one document per row.
        near: spans of each level on each side, about.
        valid: bool [batch, tokens], False = padding, which is in no span.
        dropout_p: on the attention weights.
    """
    tokens = query.shape[1]
    if serves(key):
        keys, values, counts = span_means(key, value, valid, _levels(tokens, near), False)
        lists = _lists(key, _from_zero(tokens, near, False), 0, tokens, near, causal=False)
        return _attend(query, keys, values, lists, None if valid is None else counts > 0, dropout_p)
    both = _side_by_side(key, value)
    count = both.new_ones(1, tokens) if valid is None else valid.to(both.dtype)
    if valid is not None:
        both = both.masked_fill(~valid[..., None, None, None], 0.0)
    levels, there = [Level(both, 0)], [count]
    while len(levels) < _levels(tokens, near):
        # Means of two spans, the second of which may be missing or have fewer tokens.
        odd = count.shape[1] % 2
        parts = pad(count, (0, odd)).unflatten(1, (-1, 2))
        count = parts.sum(2)
        share = (parts / count.clamp(min=1)[..., None])[..., None, None, None]
        both = (pad(both, (0, 0, 0, 0, 0, 0, 0, odd)).unflatten(1, (-1, 2)) * share).sum(2)
        levels.append(Level(both, 0))
        there.append(count)
    lists = _lists(key, _from_zero(tokens, near, False), 0, tokens, near, causal=False)
    seen = None if valid is None else torch.cat(there, 1) > 0
    return _attend(query, *_together(levels, query), lists, seen, dropout_p)


def causal_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    near: int,
    before: Tree | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tree]:
    """[batch, tokens, heads, head_dim]: every token sees itself and spans that end before it, also
    of the tokens read `before`; and the tree after the last. Arguments as in `tree_attention`."""
    read, known = (0, []) if before is None else (before.tokens, before.levels(near))
    tokens = read + query.shape[1]
    if before is None and serves(key):
        bounds = _from_zero(tokens, near, True)
        keys, values, _ = span_means(key, value, None, len(bounds), True)
        lists = _lists(key, bounds, 0, tokens, near, causal=True)
        out = _attend(query, keys, values, lists, None, dropout_p)
        return out, Tree(_kept(keys, values, tokens, near), tokens)
    new, levels, kept = _side_by_side(key, value), [], []
    for number in range(_levels(tokens, near)):
        size, first = 2**number, 0
        if number < len(known):
            old, first = known[number]
            new = torch.cat((old.to(new.dtype), new), 1)
        levels.append(Level(new, first))
        # What a token behind the last may see; the rest is part of larger spans by now.
        keep = _first_kept(tokens, size, near)
        kept.append(new[:, keep - first :].detach())
        # Parents that have become complete, or all if none of their level were wanted so far.
        begin = read // (2 * size) if number + 1 < len(known) else 0
        pairs = slice(2 * begin - first, 2 * (tokens // (2 * size)) - first)
        new = new[:, pairs].unflatten(1, (-1, 2)).mean(2)
    bounds = tuple((level.first, level.end) for level in levels)
    lists = _lists(key, bounds, read, tokens, near, causal=True)
    out = _attend(query, *_together(levels, query), lists, None, dropout_p)
    return out, Tree(torch.cat(kept, 1), tokens)


def _side_by_side(key: Tensor, value: Tensor) -> Tensor:
    """[batch, tokens, 2, heads, head_dim], in a precision to take means in."""
    return torch.stack((key, value), 2).to(torch.promote_types(key.dtype, torch.float32))


def _together(levels: Sequence[Level], query: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, spans, heads, head_dim] of all levels, finest first."""
    key, value = torch.cat([level.both for level in levels], 1).to(query.dtype).unbind(2)
    return key, value


def _kept(keys: Tensor, values: Tensor, tokens: int, near: int) -> Tensor:
    """Of the whole spans of so many tokens, what a token behind the last may see."""
    own, offset = [], 0
    for number, (_, end) in enumerate(_from_zero(tokens, near, True)):
        own.append(slice(offset + _first_kept(tokens, 2**number, near), offset + end))
        offset += end
    key, value = (torch.cat([t.detach()[:, one] for one in own], 1) for t in (keys, values))
    return _side_by_side(key, value)


def _from_zero(tokens: int, near: int, whole: bool) -> Bounds:
    """Of the levels of a tree of so many tokens."""
    return tuple((0, end) for end in count_spans(tokens, _levels(tokens, near), whole))


def _levels(tokens: int, near: int) -> int:
    """How many levels have spans that one of so many tokens can see: near * (size - 1) < tokens."""
    return ((tokens - 1) // near + 1).bit_length()


def _first_kept(tokens: int, size: int, near: int) -> int:
    """The first span of `size` that a token behind so many may see: its parent is not yet far."""
    return 2 * max(0, (tokens + 1 - near * (2 * size - 1)) // (2 * size))


class _Lists(NamedTuple):
    """For blocks of `size` queries, all spans that one of them sees, and a few more."""

    listed: Tensor  # [blocks, count]: places in all levels put together; -1 = none
    first: Tensor  # [blocks, count]: the first query of all that sees it there
    last: Tensor
    size: int


def _lists(
    like: Tensor, bounds: Bounds, read: int, tokens: int, near: int, *, causal: bool
) -> _Lists:
    """For the queries from place `read` to `tokens`, of spans of which each level has those between
    its bounds. A span may be listed twice in a block: for queries on its right and on its left."""
    size = min(_BLOCK, tokens - read)
    listed, first, last = _made_lists(like, bounds, read, tokens, size, near, causal)
    return _Lists(listed, first, last, size)


@made_once
def _made_lists(
    device: torch.device,
    bounds: Bounds,
    read: int,
    tokens: int,
    size: int,
    near: int,
    causal: bool,
) -> tuple[Tensor, ...]:
    block = torch.arange(read, tokens, size, device=device, dtype=torch.int32)[:, None]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    offset = 0
    for number, (begins, ends) in enumerate(bounds):
        span = 2**number
        gap, parent_gap = near * (span - 1), near * (2 * span - 1)  # from the nearest token on
        # From which span on, and how many. A token sees itself, which is on neither side of it: so
        # of single tokens both sides are one list.
        count = near + 2 + (size - 2) // span
        sides = [((block + size - gap) // span - count, count), (-((-block - gap) // span), count)]
        if number == 0:
            sides = [(block - near, size + (near if causal else 2 * near))]
        for side, (begin, many) in enumerate(sides[:1] if causal else sides):
            one = begin + torch.arange(many, device=device, dtype=torch.int32)
            parent = one // 2 * 2 * span
            # Seen by those to whom it is far enough away, and its parent is not.
            right = one * span + span - 1 + gap, parent + 2 * span - 2 + parent_gap
            left = parent - parent_gap + 1, one * span - gap
            first = left[0] if side == 1 or (number == 0 and not causal) else right[0]
            last = left[1] if side == 1 else right[1]
            real = (one >= begins) & (one < ends)
            place = torch.where(real, one - begins + offset, -1)
            found.append((place, first - read, last - read))
        offset += ends - begins
    return tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: _Lists,
    seen: Tensor | None,
    dropout_p: float,
) -> Tensor:
    return listed_attention(
        *(query, key, value, lists.listed[None, None]),
        size=lists.size,
        first=lists.first,
        last=lists.last,
        valid=seen,
        dropout_p=dropout_p,
    )
