"""One encoder layer: attention, then feed-forward, each added to its input and normalised."""

from collections.abc import Callable

from torch import Tensor, nn

from longspan.ops.window import Visibility


class Block(nn.Module):
    """[batch, tokens, dim] -> the same, with the norm behind the residual as BERT has it.

    Args:
        attention: a layer of the registry, without its output projection.
        dim, hidden_dim: of the tokens, and inside the feed-forward part.
        activation: of the feed-forward part.
        dropout: on what is added to the residual.
    """

    def __init__(
        self,
        attention: nn.Module,
        dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor],
        norm_eps: float = 1e-12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.project = nn.Linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.up = nn.Linear(dim, hidden_dim)
        self.activation = activation
        self.down = nn.Linear(hidden_dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, seen: Visibility, positions: Tensor | None = None) -> Tensor:
        """`seen` and `positions` describe the batch, see `WindowAttention.forward`."""
        mixed = self.project(self.attention(hidden, seen=seen, positions=positions))
        hidden = self.attention_norm(hidden + self.dropout(mixed))
        fed = self.down(self.activation(self.up(hidden)))
        return self.feed_forward_norm(hidden + self.dropout(fed))
