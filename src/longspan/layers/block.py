"""One encoder layer: attention, then feed-forward, each added to its input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.layers.base import AttentionLayer
from longspan.layers.dense import prepared, project
from longspan.ops.shorten import Pools
from longspan.ops.window import Visibility

# Tokens that the feed-forward part takes at a time where nothing has to be kept for gradients: what
# is inside is four times as wide as what goes in.
_TOKENS = 512


class Block(nn.Module):
    """[batch, tokens, dim] -> the same, or fewer tokens if the attention returns fewer.

    Args:
        attention: a layer of the registry, without its output projection.
        dim, hidden_dim: of the tokens, and inside the feed-forward part.
        activation: of the feed-forward part.
        dropout: on what is added to the residual.
        inner_dropout: behind the activation.
        norm_first: norms stand before attention and feed-forward (ModernBERT), not behind the
            residuals (BERT). The hidden states then leave without a norm.
        normed: with `norm_first`, what comes in is normed already, so attention takes it as it is.
        gated: the feed-forward part multiplies its activation with a second projection.
        bias: of projections and norms.
    """

    def __init__(
        self,
        attention: AttentionLayer,
        dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor],
        norm_eps: float = 1e-12,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
        norm_first: bool = False,
        normed: bool = False,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.gated = gated
        self.attention = attention
        self.project = nn.Linear(dim, dim, bias=bias)
        self.attention_norm = (
            nn.Identity() if norm_first and normed else nn.LayerNorm(dim, eps=norm_eps, bias=bias)
        )
        self.up = nn.Linear(dim, 2 * hidden_dim if gated else hidden_dim, bias=bias)
        self.activation = activation
        self.down = nn.Linear(hidden_dim, dim, bias=bias)
        self.feed_forward_norm = nn.LayerNorm(dim, eps=norm_eps, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.inner_dropout = nn.Dropout(inner_dropout)

    def forward(
        self,
        hidden: Tensor,
        seen: Visibility,
        positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        pools: Pools | None = None,
    ) -> Tensor:
        """`seen`, `positions` and `position_ids` describe the batch, see `AttentionLayer`. With an
        attention that makes it shorter, `pools` say how, and fewer tokens are returned."""
        mixed = self.mix(hidden, seen, positions, position_ids, pools)
        hidden = mixed + (hidden if pools is None else pools.mean(hidden))
        if self.norm_first:
            return hidden + self.feed(hidden)
        hidden = self.attention_norm(hidden)
        return self.feed_forward_norm(hidden + self.feed(hidden))

    def mix(
        self,
        hidden: Tensor,
        seen: Visibility,
        positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        pools: Pools | None = None,
    ) -> Tensor:
        """What attention adds."""
        about: dict[str, Any] = {
            "seen": seen,
            "positions": positions,
            "position_ids": position_ids,
        }
        if pools is not None:
            about["pools"] = pools
        mixed = self.attention(self.attention_input(hidden), **about)
        return self.dropout(project(self.project, mixed))

    def feed(self, hidden: Tensor) -> Tensor:
        """What the feed-forward part adds."""
        return self.dropout(
            self._feed(self.feed_forward_norm(hidden) if self.norm_first else hidden)
        )

    def attention_input(self, hidden: Tensor) -> Tensor:
        """What the attention is given of a block's input."""
        return self.attention_norm(hidden) if self.norm_first else hidden

    def _feed(self, hidden: Tensor) -> Tensor:
        up, down = prepared(self.up, hidden), prepared(self.down, hidden)

        def some(tokens: Tensor) -> Tensor:
            if self.gated:
                inner, gate = up(tokens).chunk(2, dim=-1)
                inner = self.activation(inner) * gate
            else:
                inner = up(tokens, self.activation)
            return down(self.inner_dropout(inner))

        whole = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if whole or hidden.device.type != "cpu" or hidden.shape[:-1].numel() <= _TOKENS:
            return some(hidden)
        parts = hidden.flatten(0, -2).split(_TOKENS)
        return torch.cat([some(part) for part in parts]).view_as(hidden)
