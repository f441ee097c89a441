"""Causal attention with Transformer-XL's relative positions, within a window or over everything.

    score(i, j) = (q_i + u) . k_j + (q_i + v) . r(i - j),   all times the scale

Plain PyTorch on any device. Queries are taken in blocks, and while gradients are wanted a block's
scores are computed again in the backward pass, so that memory is linear in the number of tokens.
With positions and on a GPU fused kernels do it instead (`relative_fused.py`).
There may be more keys than queries: the queries are then the last tokens, the keys before them a
memory or a cache. Without positions it is plain attention, which is how cached keys are read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from longspan.ops.pieces import in_pieces
from longspan.ops.relative_fused import Asked, attend, serves
from longspan.ops.window.pattern import check_dilation, check_scale

# Queries per block, unless the window is longer: then a block is as long as that, so that at
# least half of the scores of a block are in use.
_BLOCK = 256
_LARGEST_BLOCK = 1024


class Relative(NamedTuple):
    """Relative positions: what each distance means, and what queries add to themselves."""

    table: Tensor  # [distances, heads, head_dim]: r, for distances 0, 1, 2 ... tokens
    content_bias: Tensor  # [heads, head_dim]: u
    position_bias: Tensor  # [heads, head_dim]: v
    # [heads, head_dim, dim]: makes r of a table [distances, dim]. A few queries are multiplied with
    # it instead of all distances: q . (W s) = (q W) . s
    projection: Tensor | None = None

    def of_heads(self, heads: Sequence[int]) -> "Relative":
        table, content_bias, position_bias, projection = self
        if projection is None:
            table = table[:, heads]
        else:
            projection = projection[heads]
        return Relative(table, content_bias[heads], position_bias[heads], projection)

    def scores(self, query: Tensor, tokens: int) -> Tensor:
        """[batch, heads, queries, tokens] of queries [batch, queries, heads, head_dim], by falling
        distance. Distances not in the table are beyond the band and get any value."""
        asking = query + self.position_bias.to(query.dtype)
        known = self.table[:tokens].to(query.dtype)
        if self.projection is None:
            found = torch.einsum("bihd,jhd->bhij", asking, known.flip(0))
        else:
            asking = torch.einsum("bihd,hde->bhie", asking, self.projection.to(query.dtype))
            found = (asking @ known.mT).flip(-1)
        return pad(found, (tokens - known.shape[0], 0))


def relative_shift(scores: Tensor) -> Tensor:
    """[..., queries, keys] by falling distance -> by key: out[i, j] = in[i, j + queries - 1 - i].

    Entries right of the last key that a query may see are meaningless and to be masked.
    """
    queries, keys = scores.shape[-2:]
    padded = pad(scores, (1, 0)).flatten(-2)
    return padded[..., queries:].unflatten(-1, (queries, keys))


def banded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    left: int | None,
    dilation: int | Sequence[int] = 1,
    relative: Relative | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """[batch, queries, heads, head_dim]: each query attends to itself and to what is before it.

    Args:
        query: [batch, queries, heads, head_dim], the last of the tokens.
        key, value: [batch, tokens, heads, head_dim], with tokens >= queries.
        left: steps a query sees to its left; None = all there are.
        dilation: tokens per step, one for all heads or one per head. Positions go by distance in
            tokens, so a head sees the same r for the same distance however it is dilated.
        relative: positions; None = none here, e.g. because query and key are rotated.
        dropout_p: on the attention weights.
    """
    queries, tokens = query.shape[1], key.shape[1]
    if queries > tokens:
        raise ValueError(f"{queries} queries but {tokens} keys: the queries are the last tokens")
    steps = check_dilation(dilation, query.shape[2])
    scale = check_scale(scale, query.shape[3])
    if len(set(steps)) == 1:
        return _one_dilation(query, key, value, relative, left, steps[0], dropout_p, scale)
    parts, order = [], []
    for step in sorted(set(steps)):
        heads = [head for head, own in enumerate(steps) if own == step]
        own = None if relative is None else relative.of_heads(heads)
        group = (query[:, :, heads], key[:, :, heads], value[:, :, heads], own)
        parts.append(_one_dilation(*group, left, step, dropout_p, scale))
        order += heads
    together = torch.cat(parts, dim=2)
    if order == sorted(order):
        return together
    return together[:, :, [order.index(head) for head in range(len(order))]]


def _one_dilation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Relative | None,
    left: int | None,
    step: int,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """A dilated head sees `step` independent sequences, one per residue class of positions."""
    batch, queries = query.shape[:2]
    missing = -key.shape[1] % step
    query, key, value = (_classes(t, step) for t in (query, key, value))
    if relative is not None:
        relative = relative._replace(table=relative.table[::step])
    left = key.shape[1] if left is None else min(left, key.shape[1])
    # In each class at most one key is made up, and stands first: in the first `missing` classes.
    if relative is not None and _fused(query, key, value, relative, left):
        asked = Asked(None, left, step, missing, scale, dropout_p)
        out = attend(query, key, value, *relative[:3], asked)
    else:
        hidden = None
        if missing:
            hidden = torch.arange(step, device=key.device).repeat(batch) < missing
        out = _blocks(query, key, value, relative, hidden, left, dropout_p, scale)
    if step == 1:
        return out
    out = out.view(batch, step, *out.shape[1:]).transpose(1, 2).flatten(1, 2)
    return out[:, -queries:]


def _classes(x: Tensor, step: int) -> Tensor:
    """[batch, tokens, heads, head_dim] -> [batch * step, tokens / step, ...]. What is missing for
    classes of one length is made up at the front."""
    if step == 1:
        return x
    x = pad(x, (0, 0, 0, 0, -x.shape[1] % step, 0))
    batch, tokens = x.shape[:2]
    return x.view(batch, tokens // step, step, *x.shape[2:]).transpose(1, 2).flatten(0, 1)


def _fused(query: Tensor, key: Tensor, value: Tensor, relative: Relative, left: int) -> bool:
    """Whether the kernels can do it: not a few queries, for which distances are not projected."""
    return (
        serves(query)
        and query.dtype == key.dtype == value.dtype
        and relative.projection is None
        and relative.table.shape[0] >= min(left + 1, key.shape[1])
    )


def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Relative | None,
    hidden: Tensor | None,
    left: int,
    dropout_p: float,
    scale: float,
) -> Tensor:
    queries, tokens = query.shape[1], key.shape[1]
    size = min(max(_BLOCK, left), _LARGEST_BLOCK)
    pieces = []
    for begin in range(0, queries, size):
        end = min(begin + size, queries)
        low = max(0, tokens - queries + begin - left)
        keys = slice(low, tokens - queries + end)
        about = (hidden if low == 0 else None, left, dropout_p, scale)
        pieces.append(_Block(slice(begin, end), keys, *about))
    learned = () if relative is None else [t for t in relative if t is not None]
    return in_pieces(pieces, 1, query, key, value, *learned, random=dropout_p > 0)


class _Block(NamedTuple):
    """Dense attention of a few queries, the last tokens, within the band: a `Piece`."""

    own: slice
    keys: slice
    hidden: Tensor | None  # [batch]: rows whose first key is made up
    left: int
    dropout_p: float
    scale: float

    def take(self, *states: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[:, self.keys] for t in states)

    def add(self, totals: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        for total, own in zip(totals, more, strict=True):
            total[:, self.keys] += own

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        queries, tokens = query.shape[1], key.shape[1]
        position = torch.arange(tokens, device=query.device)
        distance = position[tokens - queries :, None] - position
        visible = None
        if queries > 1 or tokens - 1 > self.left:
            visible = (distance >= 0) & (distance <= self.left)
        if self.hidden is not None:
            # Made-up queries may see it: a row that sees nothing would be NaN.
            real = ~self.hidden[:, None, None] | (position > 0) | (distance == 0)
            visible = real if visible is None else visible & real
            visible = visible[:, None]
        mask = visible
        if learned:
            relative = Relative(*learned)
            mask = relative_shift(relative.scores(query, tokens) * self.scale)
            if visible is not None:
                mask = mask.masked_fill(~visible, -torch.inf)
            query = query + relative.content_bias.to(query.dtype)
        attended = scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)),
            attn_mask=mask,
            dropout_p=self.dropout_p,
            scale=self.scale,
        )
        return attended.transpose(1, 2)
