"""The oracle: dense softmax attention under an explicit mask. Slow, n^2, and obviously right."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.ops.window import dropout
from longspan.ops.window.pattern import Pattern, Visibility


def visible(
    like: Tensor, pattern: Pattern, together: Tensor | None, chosen: Tensor | None
) -> Tensor:
    """Bool [batch, heads, query, key] for tensors [batch, tokens, heads, dim]: may i look at j?

    `together` [batch, query, key] says that both are tokens of one document, `chosen`
    [batch, tokens] which of them are global.
    """
    batch, tokens = like.shape[:2]
    position = torch.arange(tokens, device=like.device)
    offset = position[None, :] - position[:, None]  # key minus query
    step = torch.tensor(pattern.dilation, device=like.device)[:, None, None]
    band = (
        (offset % step == 0) & (offset >= -pattern.left * step) & (offset <= pattern.right * step)
    )
    mask = band.expand(batch, -1, tokens, tokens)
    if chosen is not None:
        mask = mask | chosen[:, None, None, :]
        rows = chosen[:, None, :, None]
        mask = mask | rows if pattern.global_rows else mask & ~rows
    if pattern.causal:
        mask = mask & (offset <= 0)
    return mask if together is None else mask & together[:, None]


def together_from_masks(
    like: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Bool [batch, query, key]: are both valid, and in the same document?"""
    if attention_mask is None and cu_seqlens is None:
        return None
    batch, tokens = like.shape[:2]
    mask = torch.ones(batch, tokens, tokens, dtype=torch.bool, device=like.device)
    if cu_seqlens is not None:
        position = torch.arange(tokens, device=like.device)
        document = torch.searchsorted(cu_seqlens.to(like.device), position, right=True)
        mask = mask & (document[:, None] == document[None, :])
    if attention_mask is not None:
        valid = attention_mask.bool()
        mask = mask & valid[:, :, None] & valid[:, None, :]
    return mask


def together_from_visibility(seen: Visibility) -> Tensor | None:
    """The same from a prepared `Visibility`, for a caller who no longer has the masks."""
    if seen.start is None or seen.stop is None:
        return None
    position = torch.arange(seen.stop.shape[1], device=seen.stop.device)
    inside = (position >= seen.start[..., None]) & (position < seen.stop[..., None])
    return inside & (seen.stop > 0)[:, None, :]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, pattern: Pattern, seed: Tensor | None
) -> Tensor:
    """softmax(q k^T * scale) v under `mask`; rows that see nothing are zero. Differentiable."""
    batch, tokens, heads, _ = query.shape
    key = key.repeat_interleave(heads // key.shape[2], dim=2)
    value = value.repeat_interleave(heads // value.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * pattern.scale
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    scores = scores.masked_fill(~mask, -torch.inf)
    # A row of -inf would give NaN: let it see everything, then blank it.
    blank = ~mask.any(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blank, 0.0), dim=-1).masked_fill(blank, 0.0)
    if seed is not None:
        stream = torch.arange(batch * heads, device=query.device).view(batch, heads, 1, 1)
        position = torch.arange(tokens, device=query.device)
        keep = dropout.kept(seed, stream, position[:, None], position, pattern.dropout_p)
        weights = weights * keep / (1.0 - pattern.dropout_p)
    return torch.einsum("bhij,bjhd->bihd", weights.to(value.dtype), value)


def put_rows(out: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """`out` with rows [batch, g, heads, dim] at tokens [batch, g], none where it is negative."""
    tokens = out.shape[1]
    # One token more for the rest: to leave it out would be to wait for the device.
    place = torch.where(at < 0, tokens, at).long()[..., None, None].expand_as(rows)
    wide = pad(out, (0, 0, 0, 0, 0, 1))
    return wide.scatter(1, place, rows.to(out.dtype))[:, :tokens]
