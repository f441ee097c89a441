"""One decoder layer: causal attention, then feed-forward, each added to its input."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from longspan.layers.causal import Attended, CausalAttention


class DecoderBlock(nn.Module):
    """[batch, tokens, dim] -> the same, and the layer's state as `layers/causal.py` says.

    Args:
        attention: a causal layer of the registry, without its output projection.
        dim, hidden_dim: of the tokens, and inside the feed-forward part.
        activation: of the feed-forward part.
        norm: makes one of the two norms.
        pre_norm: norms stand before attention and feed-forward, inside the residual; else behind.
        dropout: on what is added to the residual.
        activation_dropout: inside the feed-forward part.
    """

    def __init__(
        self,
        attention: CausalAttention,
        dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor],
        norm: Callable[[int], nn.Module],
        pre_norm: bool = True,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        attention_bias: bool = False,
        feed_forward_bias: bool = True,
    ) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention_norm = norm(dim)
        self.attention = attention
        self.project = nn.Linear(dim, dim, bias=attention_bias)
        self.feed_forward_norm = norm(dim)
        self.up = nn.Linear(dim, hidden_dim, bias=feed_forward_bias)
        self.activation = activation
        self.down = nn.Linear(hidden_dim, dim, bias=feed_forward_bias)
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(activation_dropout)

    def forward(
        self, hidden: Tensor, first: int = 0, state: Any = None, keep_state: bool = False
    ) -> Attended:
        mixed = self.mix(hidden, first, state, keep_state)
        hidden = hidden + mixed.out
        if not self.pre_norm:
            hidden = self.attention_norm(hidden)
        hidden = hidden + self.feed(hidden)
        if not self.pre_norm:
            hidden = self.feed_forward_norm(hidden)
        # Not `_replace`, which torch 2.11 cannot trace.
        return Attended(hidden, *mixed[1:])

    def mix(
        self, hidden: Tensor, first: int | Tensor = 0, state: Any = None, keep_state: bool = False
    ) -> Attended:
        """What attention adds, and the layer's state."""
        inputs = self.attention_norm(hidden) if self.pre_norm else hidden
        mixed = self.attention(inputs, first, state, keep_state)
        return Attended(self.dropout(self.project(mixed.out)), *mixed[1:])

    def feed(self, hidden: Tensor) -> Tensor:
        """What the feed-forward part adds."""
        inputs = self.feed_forward_norm(hidden) if self.pre_norm else hidden
        return self.dropout(self.down(self.activation_dropout(self.activation(self.up(inputs)))))
