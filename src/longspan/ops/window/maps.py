"""Attention weights without n x n memory, for looking at: the window as a band, global keys as
columns, global queries as rows. Plain PyTorch; what it costs is what it returns."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.window.pattern import Visibility, check_dilation, check_window

# Tokens whose windows are gathered at a time, which bounds the memory besides the result.
_CHUNK = 32


class AttentionMap(NamedTuple):
    """Who looks at whom, and how much. The weights of a row add up to 1, or to 0 for padding.

    `band[b, i, h, o]` is the weight of token i on token i + (o - left) * dilation[h], and
    `columns[b, i, h, g]` that on global token places[b, g] where the window does not hold it.
    `rows[b, g, h, j]` are the weights of global token places[b, g] on every token j; such a token
    has no weights in the other two. Slots of `places` without a token hold -1.
    """

    band: Tensor  # [batch, tokens, heads, left + 1 + right]
    columns: Tensor | None  # [batch, tokens, heads, g]
    rows: Tensor | None  # [batch, g, heads, tokens]
    places: Tensor | None  # [batch, g]
    left: int
    dilation: tuple[int, ...]

    def row(self, token: int, head: int, batch: int = 0) -> tuple[Tensor, Tensor]:
        """(positions, weights) of all tokens that one token looks at, in their order."""
        batch_size, tokens, heads, width = self.band.shape
        for name, given, size in (
            ("token", token, tokens),
            ("head", head, heads),
            ("batch", batch, batch_size),
        ):
            if not 0 <= given < size:
                raise IndexError(f"{name}={given} is not in 0 to {size - 1}")
        if self.places is not None and self.rows is not None:
            slot = (self.places[batch] == token).nonzero()
            if len(slot):
                weights = self.rows[batch, slot[0, 0], head]
                seen = weights.nonzero().squeeze(1)
                return seen, weights[seen]
        step = self.dilation[head]
        positions = token + step * (torch.arange(width, device=self.band.device) - self.left)
        weights = self.band[batch, token, head]
        if self.places is not None and self.columns is not None:
            positions = torch.cat([positions, self.places[batch].to(positions.dtype)])
            weights = torch.cat([weights, self.columns[batch, token, head]])
        seen = weights.nonzero().squeeze(1)
        positions, order = positions[seen].sort()
        return positions, weights[seen][order]

    def cut(self, tokens: int) -> "AttentionMap":
        """The same of the first so many tokens, behind which there is padding."""
        return self._replace(
            band=self.band[:, :tokens],
            columns=None if self.columns is None else self.columns[:, :tokens],
            rows=None if self.rows is None else self.rows[..., :tokens],
        )


def attention_map(
    query: Tensor,
    key: Tensor,
    *,
    window: int | tuple[int, int],
    dilation: int | Sequence[int] = 1,
    seen: Visibility | None = None,
    places: Tensor | None = None,
    scale: float | None = None,
) -> AttentionMap:
    """The weights that `window_attention` gives to [batch, tokens, heads, head_dim]. Rows of
    global tokens are zero: they come from projections of their own, which the caller knows.

    Args:
        seen: padding, documents and global tokens, from `visibility(...)`.
        places: [batch, g] positions of the global tokens, from `global_positions(...)`.
    """
    batch, tokens, heads, head_dim = query.shape
    left, right = check_window(window)
    steps = check_dilation(dilation, heads)
    key = key.repeat_interleave(heads // key.shape[2], dim=2)
    factor = head_dim**-0.5 if scale is None else scale
    step = torch.tensor(steps, device=query.device)
    position = torch.arange(tokens, device=query.device)
    if seen is None or seen.start is None or seen.stop is None:
        start = torch.zeros(batch, tokens, dtype=torch.int64, device=query.device)
        stop = start + tokens
    else:
        start, stop = seen.start.long(), seen.stop.long()
    offset = torch.arange(-left, right + 1, device=query.device)
    everyone = torch.arange(batch, device=query.device)[:, None, None, None]
    head = torch.arange(heads, device=query.device)[:, None]
    band, columns = [], []
    for chunk in position.split(_CHUNK):
        q = query[:, chunk].float() * factor
        where = chunk[:, None, None] + step[:, None] * offset  # [chunk, heads, width]
        at = where.clamp(0, tokens - 1)
        keys = key[everyone, at, head].float()  # [batch, chunk, heads, width, head_dim]
        scores = [(q[..., None, :] * keys).sum(-1)]
        low, high = start[:, chunk, None, None], stop[:, chunk, None, None]
        valid = stop.gather(1, at.flatten().expand(batch, -1)).view(batch, *at.shape) > 0
        visible = [(where >= low) & (where < high) & valid]
        if places is not None:
            far = places.clamp(min=0).long()
            keys = key.gather(1, far[..., None, None].expand(-1, -1, heads, head_dim)).float()
            scores.append(torch.einsum("bihd,bghd->bihg", q, keys))
            apart = far[:, None, None, :] - chunk[:, None, None]  # [batch, chunk, 1, g]
            stride = step[:, None]
            inside = (apart % stride == 0) & (apart >= -left * stride) & (apart <= right * stride)
            ok = (places >= 0)[:, None, None, :] & ~inside
            ok = ok & (far[:, None, None, :] >= low) & (far[:, None, None, :] < high)
            ok = ok & (apart <= 0) if right == 0 else ok
            itself = (places[:, None] == chunk[:, None]).any(-1)[..., None, None]
            visible = [part & ~itself for part in (*visible, ok)]
        joined, mask = torch.cat(scores, -1), torch.cat(visible, -1)
        blank = ~mask.any(-1, keepdim=True)
        weights = joined.masked_fill(~mask & ~blank, -torch.inf).softmax(-1)
        weights = weights.masked_fill(blank, 0.0)
        band.append(weights[..., : left + 1 + right])
        columns.append(weights[..., left + 1 + right :])
    return AttentionMap(
        torch.cat(band, 1),
        None if places is None else torch.cat(columns, 1),
        None,
        places,
        left,
        steps,
    )
