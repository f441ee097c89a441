"""Causal attention whose weights fade out with the distance, by spans that are learned.

    weight(i, j)  ~  exp(q_i . k_j) m(i - j),   m(x) = clamp((ramp + z - x) / ramp, 0, 1)

with a span z of each head. On a GPU it is `listed_attention`, which knows spans. Elsewhere blocks
of queries look at the stretch of keys before them, and log m, the same for all blocks, is made once
and added to their scores.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from longspan.ops.listed import listed_attention
from longspan.ops.listed_fused import serves
from longspan.ops.once import made_once
from longspan.ops.pieces import in_pieces
from longspan.ops.relative import relative_shift

_BLOCK = 128  # queries: with more, more scores are computed that nobody asks for


def fading_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    *,
    ramp: int,
    reach: int,
    dropout_p: float = 0.0,
) -> Tensor:
    """[batch, queries, heads, head_dim]: each query sees itself and what is before it.

    Args:
        query: [batch, queries, heads, head_dim], the last of the tokens.
        key, value: [batch, tokens, heads, head_dim], with tokens >= queries.
        spans: [heads], z, at least 0.
        ramp: tokens over which weights fade.
        reach: tokens back that a query sees at most, whatever the spans.
        dropout_p: on the attention weights.
    """
    if not serves(query):
        return _banded(query, key, value, spans, ramp, reach, dropout_p)
    size, tokens = min(_BLOCK, query.shape[1]), key.shape[1]
    listed, first, last = _lists(query, tokens - query.shape[1], tokens, size, reach)
    return listed_attention(
        *(query, key, value, listed[None, None]),
        size=size,
        first=first,
        last=last,
        spans=spans,
        ramp=ramp,
        dropout_p=dropout_p,
    )


@made_once
def _lists(
    device: torch.device, before: int, tokens: int, size: int, reach: int
) -> tuple[Tensor, ...]:
    """For blocks of `size` queries, from token `before` on: keys, and the first and the last query
    that sees each."""
    start = torch.arange(before, tokens, size, device=device)[:, None]
    listed = start + torch.arange(-reach, size, device=device)
    listed = torch.where((listed >= 0) & (listed < tokens), listed, -1)
    return listed, listed - before, listed - before + reach


def _banded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    ramp: int,
    reach: int,
    dropout_p: float,
) -> Tensor:
    queries, tokens = query.shape[1], key.shape[1]
    before, size = tokens - queries, min(_BLOCK, queries)
    bias = _bias(spans.to(torch.promote_types(query.dtype, torch.float32)), ramp, reach, size)
    pieces = []
    for begin in range(0, queries, size):
        end = min(begin + size, queries)
        low = max(0, before + begin - reach)
        # Of the columns of a block, which begin `reach` keys before its first query.
        skipped = low - (before + begin - reach)
        pieces.append(_Block(slice(begin, end), slice(low, before + end), skipped, dropout_p))
    tensors = (t.transpose(1, 2) for t in (query, key, value))
    return in_pieces(pieces, 2, *tensors, bias, random=dropout_p > 0).transpose(1, 2)


def _bias(spans: Tensor, ramp: int, reach: int, size: int) -> Tensor:
    """[heads, size, reach + size]: log m, -inf where nobody looks; queries are the last tokens."""
    distance = torch.arange(reach, -1, -1, device=spans.device)
    left = (ramp + spans[:, None] - distance) / ramp
    seen = left > 0
    # No logarithm, and no gradient of it, where nothing is left.
    row = torch.where(seen, left.clamp(max=1.0), 1.0).log().masked_fill(~seen, -torch.inf)
    row = pad(row, (size - 1, 0), value=-torch.inf)[:, None].expand(-1, size, -1)
    shifted = relative_shift(row)
    place = torch.arange(reach + size, device=spans.device)
    return shifted.masked_fill(place > place[reach:, None], -torch.inf)


class _Block(NamedTuple):
    """A block of queries and the stretch of keys that these see: a `Piece` of [batch, heads,
    tokens, head_dim]."""

    own: slice
    keys: slice
    skipped: int  # columns of the bias for keys before the first
    dropout_p: float

    def take(self, *states: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[:, :, self.keys] for t in states)

    def add(self, totals: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        for total, own in zip(totals, more, strict=True):
            total[:, :, self.keys] += own

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        columns = slice(self.skipped, self.skipped + key.shape[2])
        bias = learned[0][:, : query.shape[2], columns]
        wide = [t.to(bias.dtype) for t in (query, key, value)]
        with torch.autocast(query.device.type, enabled=False):
            scores = (wide[0] * query.shape[3] ** -0.5) @ wide[1].mT
            weights = dropout(scores.add_(bias).softmax(-1), self.dropout_p)
            return (weights @ wide[2]).to(query.dtype)
