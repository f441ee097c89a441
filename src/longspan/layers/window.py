"""Longformer's self-attention: a window for every token, separate projections for global ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longspan.layers.base import AttentionLayer
from longspan.layers.dense import one_product, prepared, project
from longspan.layers.position import rotate
from longspan.ops.rows import global_positions, global_rows, global_weights, take_rows
from longspan.ops.window import Visibility, chunks, window_attention
from longspan.ops.window import visibility as describe
from longspan.ops.window.maps import AttentionMap, attention_map
from longspan.ops.window.pattern import check_dilation, check_window

# Bytes of queries, keys and values at a time where nothing has to be kept for gradients. Beyond 32
# MB the C library asks the system for new memory each time, which is slow to fill: page by page.
_BYTES = 24 << 20


class WindowAttention(AttentionLayer):
    """[batch, tokens, dim] -> [batch, tokens, dim], before the output projection.

    Every token attends to its window and to the global tokens through one set of projections;
    the rows of the global tokens are computed over the whole document through a second set, which
    starts as a copy of the first, as in the paper.

    With rotary positions the second set is left out. It is cheap only because its weights are
    applied to the few global rows instead of to all tokens, and that needs a score of the form
    q W x: turning each key by its position stands between W and x, and a second projection and
    rotation of every token would cost as much again as the layer. Global tokens then use the
    projections of all others.

    Args:
        dim, heads: model size; head_dim = dim / heads.
        window, dilation: as in `window_attention`.
        dropout: on the attention weights, while training.
        separate_global: False shares the projections, so global rows need no second set; by
            default they are separate unless positions are rotary.
        global_tokens: False makes a layer of windows alone, in which no token is global whatever
            the masks say, as the local layers of ModernBERT are.
        rotary: turn queries and keys by their positions, with this base (10,000 is usual); None
            leaves positions to the model.
        bias: of the projections.
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
        separate_global: bool | None = None,
        global_tokens: bool = True,
        rotary: float | None = None,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        if rotary is not None and (rotary <= 0 or dim // heads % 2):
            raise ValueError(
                f"rotary={rotary} must be above 0, and the head size, here {dim // heads}, even"
            )
        possible = rotary is None and global_tokens
        if separate_global and not possible:
            raise ValueError(
                "separate_global=True goes neither with rotary positions nor with "
                "global_tokens=False; leave it out"
            )
        separate = possible if separate_global is None else separate_global
        self.heads = heads
        self.window = check_window(window)
        self.dilation = check_dilation(dilation, heads)
        self.dropout = dropout
        self.global_tokens = global_tokens
        self.rotary = rotary
        self.backend = backend
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.qkv_global = nn.Linear(dim, 3 * dim, bias=bias) if separate else None
        self.copy_global()

    @torch.no_grad()
    def copy_global(self) -> None:
        """Make the global projections a copy of the local ones (again, after pretraining)."""
        if self.qkv_global is not None:
            self.qkv_global.load_state_dict(self.qkv.state_dict())

    @property
    def needs_positions(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.qkv_global is not None

    @property
    def whole_window(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 2 * max(*self.window, 1) if self.backend == "chunks" else None

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
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Masks as in `window_attention`, or what was made of them once for all layers: `seen`
        from `visibility(...)` and, with separate projections, `positions` from
        `global_positions(global_mask, most)`. Without `positions` the number of global tokens is
        read from the mask, which on a GPU waits for it. `position_ids` [batch, tokens] are for
        rotation, which by default counts from the beginning of each document."""
        if seen is None:
            seen = describe(
                hidden,
                attention_mask=attention_mask,
                global_mask=global_mask,
                cu_seqlens=cu_seqlens,
            )
        seen = self._own(seen)
        dropout_p = self.dropout if self.training else 0.0
        rows = None
        if self.qkv_global is not None and seen.rank is not None:
            if positions is None:
                chosen = seen.is_global()
                assert chosen is not None
                positions = global_positions(chosen)
            rows = self._global_rows(hidden, seen, positions, dropout_p)

        def attend(some: slice) -> Tensor:
            tensors = (self._project(hidden, some),)
            if self.rotary is not None:
                tensors = self._apart(*tensors, seen, position_ids)
            given = self.qkv_global is None
            if rows is not None and positions is not None:
                given = rows[:, :, some], positions
            return window_attention(
                *tensors,
                window=self.window,
                dilation=self.dilation[some],
                visibility=seen,
                dropout_p=dropout_p,
                global_rows=given,
                backend=self.backend,
            )

        few = self._at_a_time(hidden)
        if few >= self.heads:
            out = attend(slice(None)).flatten(2)
            return chunks.laid_out(out) if self.backend == "chunks" else out
        out = hidden.new_empty(hidden.shape).unflatten(2, (self.heads, -1))
        for first in range(0, self.heads, few):
            some = slice(first, first + few)
            out[:, :, some] = attend(some)
        return out.flatten(2)

    @torch.no_grad()
    def map(
        self,
        hidden: Tensor,
        *,
        seen: Visibility,
        positions: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> AttentionMap:
        """The attention weights of a call, as a band, columns and rows, without n x n memory."""
        seen = self._own(seen)
        positions = positions if self.global_tokens else None
        query, key, _ = self._apart(self._project(hidden), seen, position_ids)
        made = attention_map(
            query, key, window=self.window, dilation=self.dilation, seen=seen, places=positions
        )
        if positions is None:
            return made
        scale = (hidden.shape[2] // self.heads) ** -0.5
        about = {"positions": positions, "seen": seen, "causal": self.causal, "scale": scale}
        if self.qkv_global is None:
            # Keys as they are, rotated or not, projected by nothing further.
            dim = hidden.shape[2]
            rows, blank = global_weights(
                take_rows(query.flatten(2), positions).unflatten(-1, (self.heads, -1)),
                key.flatten(2),
                torch.eye(dim, device=key.device, dtype=key.dtype),
                late=False,
                **about,
            )
        else:
            key_weight = self.qkv_global.weight.split(hidden.shape[2])[1]
            query = self._global_query(self.qkv_global, hidden, positions)
            rows, blank = global_weights(query, hidden, key_weight, late=True, **about)
        return made._replace(rows=rows.masked_fill(blank[..., None, None], 0.0))

    def _own(self, seen: Visibility) -> Visibility:
        """What this layer makes of a description for all layers."""
        return seen if self.global_tokens else seen._replace(rank=None, places=None)

    def _at_a_time(self, hidden: Tensor) -> int:
        """Heads that are projected and attended to together."""
        if self.backend == "chunks" or not one_product(self.qkv, hidden):
            return self.heads
        return max(1, self.heads * _BYTES // (3 * hidden.numel() * hidden.itemsize))

    def _project(self, hidden: Tensor, some: slice = slice(None)) -> Tensor:
        """Queries, keys and values of some heads, [batch, tokens, 3, heads, head_dim]."""
        if self.backend == "chunks" and type(self.qkv) is nn.Linear:
            biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
            pairs = zip(self.qkv.weight.chunk(3), biases, strict=True)
            three = torch.stack([chunks.project(hidden, *pair) for pair in pairs], dim=2)
            return three.unflatten(-1, (self.heads, -1))
        if some == slice(None):
            return project(self.qkv, hidden).unflatten(-1, (3, self.heads, -1))
        rows = torch.arange(self.qkv.out_features).view(3, self.heads, -1)[:, some]
        stacked = prepared(self.qkv, hidden, rows.flatten())(hidden)
        return stacked.unflatten(-1, (*rows.shape[:2], -1))

    def _apart(
        self, stacked: Tensor, seen: Visibility, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The three of them, rotated if they are to be."""
        query, key, value = stacked.unbind(2)
        if self.rotary is None:
            return query, key, value
        if position_ids is None:
            position_ids = torch.arange(stacked.shape[1], device=stacked.device)[None]
            if seen.start is not None:
                position_ids = position_ids - seen.start
        query, key = rotate(query, key, position=position_ids, base=self.rotary)
        return query, key, value

    def _global_query(self, layer: nn.Linear, hidden: Tensor, positions: Tensor) -> Tensor:
        """[batch, g, heads, head_dim]: the queries of the global tokens alone."""
        dim = hidden.shape[2]
        bias = None if layer.bias is None else layer.bias[:dim]
        query = linear(take_rows(hidden, positions), layer.weight[:dim], bias)
        return query.unflatten(-1, (self.heads, -1))

    def _global_rows(
        self, hidden: Tensor, seen: Visibility, positions: Tensor, dropout_p: float
    ) -> Tensor:
        """[batch, g, heads, head_dim]: what each global token makes of its whole document."""
        assert self.qkv_global is not None
        # Who asks for one of the slower backends wants PyTorch's own operations.
        backend = {"auto": "auto", "triton": "auto", "chunks": "chunks"}.get(self.backend, "plain")
        return global_rows(
            hidden,
            self.qkv_global.weight,
            self.qkv_global.bias,
            heads=self.heads,
            positions=positions,
            seen=seen,
            causal=self.causal,
            dropout_p=dropout_p,
            backend=backend,
        )
