"""Longformer's self-attention: a window for every token, separate projections for global ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longspan.ops.rows import (
    global_attention,
    global_positions,
    global_weights,
    take_rows,
)
from longspan.ops.window import Visibility, window_attention
from longspan.ops.window import visibility as describe
from longspan.ops.window.maps import AttentionMap, attention_map
from longspan.ops.window.pattern import check_dilation, check_window


class WindowAttention(nn.Module):
    """[batch, tokens, dim] -> [batch, tokens, dim], before the output projection.

    Every token attends to its window and to the global tokens through one set of projections;
    the rows of the global tokens are computed over the whole document through a second set, which
    starts as a copy of the first, as in the paper.

    Args:
        dim, heads: model size; head_dim = dim / heads.
        window, dilation: as in `window_attention`.
        dropout: on the attention weights, while training.
        separate_global: False shares the projections, so global rows need no second set.
        backend: of `window_attention`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int | tuple[int, int],
        *,
        dilation: int | Sequence[int] = 1,
        dropout: float = 0.0,
        separate_global: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        self.heads = heads
        self.window = check_window(window)
        self.dilation = check_dilation(dilation, heads)
        self.dropout = dropout
        self.backend = backend
        self.qkv = nn.Linear(dim, 3 * dim)
        self.qkv_global = nn.Linear(dim, 3 * dim) if separate_global else None
        self.copy_global()

    @torch.no_grad()
    def copy_global(self) -> None:
        """Make the global projections a copy of the local ones (again, after pretraining)."""
        if self.qkv_global is not None:
            self.qkv_global.load_state_dict(self.qkv.state_dict())

    @property
    def causal(self) -> bool:
        return self.window[1] == 0

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        seen: Visibility | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Masks as in `window_attention`, or what was made of them once for all layers: `seen`
        from `visibility(...)` and, with separate projections, `positions` from
        `global_positions(global_mask, most)`. Without `positions` the number of global tokens is
        read from the mask, which on a GPU waits for it."""
        if seen is None:
            seen = describe(
                hidden,
                attention_mask=attention_mask,
                global_mask=global_mask,
                cu_seqlens=cu_seqlens,
            )
        dropout_p = self.dropout if self.training else 0.0
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).unbind(2)
        rows = self.qkv_global is None
        if not rows and seen.rank is not None:
            if positions is None:
                chosen = seen.is_global()
                assert chosen is not None
                positions = global_positions(chosen)
            rows = (self._global_rows(hidden, seen, positions, dropout_p), positions)
        return window_attention(
            query,
            key,
            value,
            window=self.window,
            dilation=self.dilation,
            visibility=seen,
            dropout_p=dropout_p,
            global_rows=rows,
            backend=self.backend,
        ).flatten(2)

    @torch.no_grad()
    def map(
        self, hidden: Tensor, *, seen: Visibility, positions: Tensor | None = None
    ) -> AttentionMap:
        """The attention weights of a call, as a band, columns and rows, without n x n memory."""
        query, key, _ = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).unbind(2)
        made = attention_map(
            query, key, window=self.window, dilation=self.dilation, seen=seen, places=positions
        )
        chosen = seen.is_global()
        if positions is None or made.columns is None or chosen is None:
            return made
        project = self.qkv if self.qkv_global is None else self.qkv_global
        key_weight = project.weight.split(hidden.shape[2])[1]
        rows, blank = global_weights(
            self._global_query(project, hidden, positions),
            hidden,
            key_weight,
            positions=positions,
            seen=seen,
            causal=self.causal,
            late=True,
        )
        local = ~chosen[..., None, None]
        rows = rows.masked_fill(blank[..., None, None], 0.0)
        return made._replace(band=made.band * local, columns=made.columns * local, rows=rows)

    def _global_query(self, project: nn.Linear, hidden: Tensor, positions: Tensor) -> Tensor:
        """[batch, g, heads, head_dim]: the queries of the global tokens alone."""
        dim = hidden.shape[2]
        query = linear(take_rows(hidden, positions), project.weight[:dim], project.bias[:dim])
        return query.unflatten(-1, (self.heads, -1))

    def _global_rows(
        self, hidden: Tensor, seen: Visibility, positions: Tensor, dropout_p: float
    ) -> Tensor:
        """[batch, g, heads, head_dim]: what each global token makes of its whole document."""
        assert self.qkv_global is not None
        dim = hidden.shape[2]
        _, key_weight, value_weight = self.qkv_global.weight.split(dim)
        return global_attention(
            self._global_query(self.qkv_global, hidden, positions),
            hidden,
            key_weight,
            value_weight,
            self.qkv_global.bias[2 * dim :],
            positions=positions,
            seen=seen,
            causal=self.causal,
            dropout_p=dropout_p,
        )
