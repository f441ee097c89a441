"""The rows of many global tokens: every token is projected, and the rows are those that
`window_attention` computes, so that memory stays linear and packed documents cost their own."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from longspan.ops.rows.positions import take_rows
from longspan.ops.window.api import window_attention
from longspan.ops.window.pattern import Visibility, visibility


def attend(
    query: Tensor,
    hidden: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    value_bias: Tensor | None,
    *,
    positions: Tensor,
    seen: Visibility,
    causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`global_attention` as the smallest window there is, of which only the rows are taken."""
    batch, tokens, _ = hidden.shape
    heads, head_dim = query.shape[2:]
    keys = linear(hidden, key_weight)
    values = linear(hidden, value_weight, value_bias)
    blank = positions < 0
    # Empty slots share a spare token behind the others.
    at = torch.where(blank, tokens, positions).long()
    chosen = hidden.new_zeros((batch, tokens + 1), dtype=torch.bool).scatter(1, at, True)
    chosen = chosen[:, :tokens] if seen.stop is None else chosen[:, :tokens] & (seen.stop > 0)
    at = at[..., None].expand(-1, -1, heads * head_dim)
    spread = keys.new_zeros((batch, tokens + 1, heads * head_dim))
    spread = spread.scatter(1, at, query.flatten(2).to(keys.dtype))[:, :tokens]
    ranks = visibility(hidden, global_mask=chosen)
    whole = window_attention(
        *(t.unflatten(-1, (heads, head_dim)) for t in (spread, keys, values)),
        # A window without a right side would be causal.
        window=(0, 0 if causal else 1),
        visibility=seen._replace(rank=ranks.rank, places=ranks.places),
        dropout_p=dropout_p,
        scale=scale,
    )
    rows = take_rows(whole.flatten(2), positions).unflatten(-1, (heads, head_dim))
    return rows.masked_fill(blank[..., None, None], 0.0)
