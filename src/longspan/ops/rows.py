"""Rows of global tokens from projections of their own, as Longformer has them.

Longformer projects every token a second time so that a handful of global tokens can look at all of
them. For g global tokens those two n x D x D products are mostly waste: the scores are
`(q W_k) x^T` and the values `(p x) W_v`, so both weights can be applied to the g rows instead of
to the n tokens (*late projection*). That is cheaper as long as g * heads < D, and the key's bias
drops out altogether: it shifts all scores of a row alike.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

from longspan.ops.window.pattern import Visibility


def global_positions(global_mask: Tensor, most: int | None = None) -> Tensor:
    """Positions [batch, most] of the nonzero entries of a mask [batch, tokens], then -1.

    `most` is the capacity; None reads the largest count back from the device. A row with more
    global tokens than that is an error where the count can be seen without stalling a device.
    """
    chosen = global_mask != 0
    if not chosen.is_cuda and not torch.compiler.is_compiling():
        needed = int(chosen.sum(dim=1).max()) if chosen.numel() else 0
        if most is not None and needed > most:
            raise ValueError(f"{needed} global tokens in one row, but room for only {most}")
        most = needed if most is None else most
    elif most is None:
        most = int(chosen.sum(dim=1).max())
    batch, tokens = chosen.shape
    slot = torch.where(chosen, chosen.cumsum(dim=1) - 1, most).clamp(max=most)
    position = torch.arange(tokens, device=chosen.device).expand(batch, tokens)
    empty = torch.full((batch, most + 1), -1, device=chosen.device)
    return empty.scatter(1, slot, position)[:, :most]


def take_rows(hidden: Tensor, positions: Tensor) -> Tensor:
    """Rows [batch, g, dim] of [batch, tokens, dim]; an empty slot (-1) gets the first token's."""
    at = positions.clamp(min=0).long()[..., None].expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, at)


def global_attention(
    query: Tensor,
    hidden: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    value_bias: Tensor | None = None,
    *,
    positions: Tensor,
    seen: Visibility | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    late: bool | None = None,
) -> Tensor:
    """Attention of g global tokens to all tokens of their document, [batch, g, heads, head_dim].

    Args:
        query: [batch, g, heads, head_dim], projected and with its bias.
        hidden: [batch, tokens, dim], what keys and values are projected from.
        key_weight, value_weight: [heads * head_dim, dim], as in `nn.Linear`. There is no key
            bias because it cannot change the result.
        value_bias: [heads * head_dim] or None.
        positions: [batch, g] position of each query in `hidden`, -1 = no query: a zero row.
        seen: padding and documents, from `visibility(...)`.
        causal: see no token behind the query's own position.
        dropout_p, scale: as in `window_attention`.
        late: apply the projections to the rows (True) or to the tokens (False); by default
            whichever is cheaper.
    """
    _check(query, hidden, key_weight, value_weight, positions)
    batch, rows, heads, head_dim = query.shape
    tokens, dim = hidden.shape[1:]
    if late is None:
        late = rows * heads < dim
    weights, blank = global_weights(
        query, hidden, key_weight, positions=positions, seen=seen, causal=causal, scale=scale,
        late=late,
    )  # fmt: skip
    weights = weights.to(query.dtype)
    if dropout_p > 0:
        weights = dropout(weights, dropout_p)
    value_weight = value_weight.to(query.dtype).view(heads, head_dim, dim)
    if late:
        pooled = torch.matmul(weights.flatten(1, 2), hidden).view(batch, rows, heads, dim)
        out = torch.einsum("bghD,hdD->bghd", pooled, value_weight)
    else:
        values = linear(hidden, value_weight.flatten(0, 1)).view(batch, tokens, heads, head_dim)
        out = torch.einsum("bghn,bnhd->bghd", weights, values)
    if value_bias is not None:
        bias = value_bias.to(query.dtype).view(heads, head_dim)
        # Weights add up to one, but for what dropout does to them.
        out = out + (bias * weights.sum(dim=-1, keepdim=True) if dropout_p > 0 else bias)
    return out.masked_fill(blank[..., None, None], 0.0)


def global_weights(
    query: Tensor,
    hidden: Tensor,
    key_weight: Tensor,
    *,
    positions: Tensor,
    seen: Visibility | None = None,
    causal: bool = False,
    scale: float | None = None,
    late: bool,
) -> tuple[Tensor, Tensor]:
    """The softmax in `global_attention`: weights [batch, g, heads, tokens] in at least float32,
    and which rows see nothing [batch, g] (their weights mean nothing)."""
    batch, rows, heads, head_dim = query.shape
    tokens, dim = hidden.shape[1:]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    key_weight = key_weight.to(query.dtype)
    if late:
        folded = torch.einsum("bghd,hdD->bghD", query, key_weight.view(heads, head_dim, dim))
        scores = torch.matmul(folded.flatten(1, 2), hidden.transpose(1, 2))
        scores = scores.view(batch, rows, heads, tokens)
    else:
        keys = linear(hidden, key_weight).view(batch, tokens, heads, head_dim)
        scores = torch.einsum("bghd,bnhd->bghn", query, keys)
    # In the same kernel as the softmax, if compiled; on the queries it would be one of its own.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    bias, blank = _visible(positions, tokens, seen, causal)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)[:, :, None, :]
    return torch.softmax(scores, dim=-1), blank


def _visible(
    positions: Tensor, tokens: int, seen: Visibility | None, causal: bool
) -> tuple[Tensor | None, Tensor]:
    """What to add to the scores [batch, g, tokens], 0 or -inf, and which rows see nothing
    [batch, g]. The latter see everything instead, so that no softmax is NaN, and are blanked."""
    blank = positions < 0
    bounded = seen is not None and seen.stop is not None
    if not causal and not bounded:
        return None, blank
    key = torch.arange(tokens, device=positions.device)
    at = positions.clamp(min=0).long()
    mask = (~blank)[..., None].expand(-1, -1, tokens)
    if causal:
        mask = mask & (key <= positions[..., None])
    if seen is not None and seen.start is not None and seen.stop is not None:
        mask = mask & (key >= seen.start.gather(1, at)[..., None])
        mask = mask & (key < seen.stop.gather(1, at)[..., None]) & (seen.stop > 0)[:, None, :]
    blank = ~mask.any(dim=-1)
    bias = torch.zeros((), device=positions.device).masked_fill(
        ~(mask | blank[..., None]), -torch.inf
    )
    return bias, blank


def _check(
    query: Tensor, hidden: Tensor, key_weight: Tensor, value_weight: Tensor, positions: Tensor
) -> None:
    if query.dim() != 4 or hidden.dim() != 3 or query.shape[0] != hidden.shape[0]:
        raise ValueError(
            "query must be [batch, g, heads, head_dim] and hidden [batch, tokens, dim], got "
            f"{tuple(query.shape)} and {tuple(hidden.shape)}"
        )
    wanted = (query.shape[2] * query.shape[3], hidden.shape[2])
    for name, weight in (("key_weight", key_weight), ("value_weight", value_weight)):
        if tuple(weight.shape) != wanted:
            raise ValueError(
                f"{name} must be [heads * head_dim, dim] = {wanted}, got {tuple(weight.shape)}"
            )
    if positions.shape != query.shape[:2] or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"positions must be integers [batch, g] = {tuple(query.shape[:2])}, got "
            f"{positions.dtype} {tuple(positions.shape)}"
        )
