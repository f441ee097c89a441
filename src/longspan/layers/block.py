"""One encoder layer: attention, then feed-forward, each added to its input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.layers.base import AttentionLayer
from longspan.layers.dense import Projection, as_it_is, in_pieces, one_product, prepared
from longspan.layers.quantized import QuantizedLinear
from longspan.ops.shorten import Pools
from longspan.ops.window import Visibility

_PLAIN = (nn.Linear, QuantizedLinear, nn.LayerNorm, nn.Identity, nn.Dropout)


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
        mixed = self._attend(hidden, seen, positions, position_ids, pools)
        kept = hidden if pools is None else pools.mean(hidden)
        # Of pieces, too, but MKL's layout (11 MB or more) does not pay for a weight of this size.
        output, feed = self._prepared(self.project, mixed), self._feed(mixed)
        plain = self._is_plain()
        # What such a product has made nobody else has: adding to it in place takes half the time.
        products = all(one_product(layer, mixed) for layer in (self.project, self.down))
        ours = products and plain and kept.dtype == mixed.dtype

        def add(made: Tensor, kept: Tensor) -> Tensor:
            return made.add_(kept) if ours else made + kept

        def rest(mixed: Tensor, kept: Tensor) -> Tensor:
            hidden = add(self.dropout(output(mixed)), kept)
            if self.norm_first:
                return add(feed(self.feed_forward_norm(hidden)), hidden)
            hidden = self.attention_norm(hidden)
            return self.feed_forward_norm(add(feed(hidden), hidden))

        return in_pieces(rest, mixed, kept) if plain else rest(mixed, kept)

    def mix(
        self,
        hidden: Tensor,
        seen: Visibility,
        positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        pools: Pools | None = None,
    ) -> Tensor:
        """What attention adds."""
        mixed = self._attend(hidden, seen, positions, position_ids, pools)
        return self.dropout(self._prepared(self.project, mixed)(mixed))

    def feed(self, hidden: Tensor) -> Tensor:
        """What the feed-forward part adds."""
        if self.norm_first:
            hidden = self.feed_forward_norm(hidden)
        feed = self._feed(hidden)
        return in_pieces(feed, hidden) if self._is_plain() else feed(hidden)

    def attention_input(self, hidden: Tensor) -> Tensor:
        """What the attention is given of a block's input."""
        return self.attention_norm(hidden) if self.norm_first else hidden

    def _attend(
        self,
        hidden: Tensor,
        seen: Visibility,
        positions: Tensor | None,
        position_ids: Tensor | None,
        pools: Pools | None,
    ) -> Tensor:
        about: dict[str, Any] = {
            "seen": seen,
            "positions": positions,
            "position_ids": position_ids,
        }
        if pools is not None:
            about["pools"] = pools
        return self.attention(self.attention_input(hidden), **about)

    def _feed(self, like: Tensor) -> Callable[[Tensor], Tensor]:
        """The feed-forward part, for the pieces of a tensor like this one."""
        up = self._prepared(self.up, like, in_pieces=True)
        down = self._prepared(self.down, like, in_pieces=True)

        def feed(tokens: Tensor) -> Tensor:
            if self.gated:
                inner, gate = up(tokens).chunk(2, dim=-1)
                inner = self.activation(inner) * gate
            else:
                inner = up(tokens, self.activation)
            return self.dropout(down(self.inner_dropout(inner)))

        return feed

    def _prepared(self, layer: nn.Module, like: Tensor, *, in_pieces: bool = False) -> Projection:
        if self.attention.whole_window is not None:  # another product rounds in another way
            return as_it_is(layer)
        return prepared(layer, like, in_pieces=in_pieces)

    def _is_plain(self) -> bool:
        """Whether tokens may go through a few at a time, and sums be made in place: nothing is to
        be rounded as elsewhere, and no part is anything but what it was built as, or from int8
        weights. An adapter may look along the tokens, and whoever watches a part wants to see all
        of them."""
        parts = (self.project, self.up, self.down, self.attention_norm, self.feed_forward_norm)
        free = self.attention.whole_window is None and not torch.compiler.is_compiling()
        return free and all(
            type(part) in _PLAIN
            and "forward" not in vars(part)
            and not (part._forward_hooks or part._forward_pre_hooks)
            for part in (*parts, self.dropout, self.inner_dropout)
        )
