"""The rows of global tokens by PyTorch's own operations: any device, any dtype, the oracle."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from longspan.ops.window import dropout
from longspan.ops.window.pattern import Visibility


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
    seed: Tensor | None,
    scale: float,
    late: bool,
) -> Tensor:
    """`global_attention` with nothing left out."""
    batch, rows, heads, head_dim = query.shape
    tokens, dim = hidden.shape[1:]
    weights, blank = global_weights(
        query, hidden, key_weight, positions=positions, seen=seen, causal=causal, scale=scale,
        late=late, dtype=query.dtype if seed is None else None,
    )  # fmt: skip
    if seed is not None:
        weights = torch.where(_kept(seed, weights, positions, dropout_p), weights, 0.0)
        weights = weights / (1.0 - dropout_p)
    weights = weights.to(query.dtype)
    value_weight = value_weight.to(query.dtype).view(heads, head_dim, dim)
    if late:
        # Heads before rows, as `global_weights` has them in memory.
        pooled = torch.matmul(weights.transpose(1, 2).flatten(1, 2), hidden)
        pooled = pooled.view(batch, heads, rows, dim)
        out = torch.einsum("bhgD,hdD->bghd", pooled, value_weight)
    else:
        values = linear(hidden, value_weight.flatten(0, 1)).view(batch, tokens, heads, head_dim)
        out = torch.einsum("bghn,bnhd->bghd", weights, values)
    if value_bias is not None:
        bias = value_bias.to(query.dtype).view(heads, head_dim)
        # Weights add up to one, but for what dropout does to them.
        out = out + (bias if seed is None else bias * weights.sum(dim=-1, keepdim=True))
    return out.masked_fill(blank[..., None, None], 0.0)


def global_weights(
    query: Tensor,
    hidden: Tensor,
    key_weight: Tensor,
    *,
    positions: Tensor,
    seen: Visibility,
    causal: bool,
    scale: float,
    late: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The softmax in `global_attention`: weights [batch, g, heads, tokens] in `dtype`, by default
    at least float32, and which rows see nothing [batch, g] (their weights mean nothing)."""
    batch, rows, heads, head_dim = query.shape
    tokens, dim = hidden.shape[1:]
    key_weight = key_weight.to(query.dtype)
    if late:
        folded = torch.einsum("bghd,hdD->bhgD", query, key_weight.view(heads, head_dim, dim))
        folded = folded.flatten(1, 2)
        if hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16:
            # A CPU reads long rows of tokens faster as the left side of a product.
            scores = torch.matmul(hidden, folded.transpose(1, 2)).transpose(1, 2)
            scores = scores.float() * scale
        else:
            # The scale costs nothing inside of the product; `unused` is not read.
            unused = folded.new_empty(())
            scores = torch.baddbmm(unused, folded, hidden.transpose(1, 2), beta=0, alpha=scale)
        scores = scores.reshape(batch, heads, rows, tokens).transpose(1, 2)
    else:
        keys = linear(hidden, key_weight).view(batch, tokens, heads, head_dim)
        scores = torch.einsum("bghd,bnhd->bghn", query, keys)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    wide = torch.promote_types(scores.dtype, torch.float32)
    bias, blank = _visible(positions, tokens, seen, causal)
    if bias is not None:
        scores = scores.to(wide) + bias.to(wide)[:, :, None, :]
    if dtype == scores.dtype:  # one kernel, which computes in float32 all the same
        return torch.softmax(scores, dim=-1), blank
    weights = torch.softmax(scores, dim=-1, dtype=wide)
    return weights if dtype is None else weights.to(dtype), blank


def _kept(seed: Tensor, weights: Tensor, positions: Tensor, dropout_p: float) -> Tensor:
    """Which weights dropout leaves, bool [batch, g, heads, tokens]."""
    batch, _, heads, tokens = weights.shape
    stream = torch.arange(batch * heads, device=weights.device).view(batch, 1, heads, 1)
    key = torch.arange(tokens, device=weights.device)
    return dropout.kept(seed, stream, positions.long()[..., None, None], key, dropout_p)


def _visible(
    positions: Tensor, tokens: int, seen: Visibility, causal: bool
) -> tuple[Tensor | None, Tensor]:
    """What to add to the scores [batch, g, tokens], 0 or -inf, and which rows see nothing
    [batch, g]. The latter see everything instead, so that no softmax is NaN, and are blanked."""
    blank = positions < 0
    if not causal and seen.stop is None:
        return None, blank
    key = torch.arange(tokens, device=positions.device)
    at = positions.clamp(min=0).long()
    mask = (~blank)[..., None].expand(-1, -1, tokens)
    if causal:
        mask = mask & (key <= positions[..., None])
    if seen.start is not None and seen.stop is not None:
        mask = mask & (key >= seen.start.gather(1, at)[..., None])
        mask = mask & (key < seen.stop.gather(1, at)[..., None]) & (seen.stop > 0)[:, None, :]
    blank = ~mask.any(dim=-1)
    bias = torch.zeros((), device=positions.device).masked_fill(
        ~(mask | blank[..., None]), -torch.inf
    )
    return bias, blank
