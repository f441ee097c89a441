"""What a call asks for: everything a backend needs to compute the rows of global tokens."""

from typing import NamedTuple

from torch import Tensor

from longspan.ops.window.pattern import Visibility


class Call(NamedTuple):
    """One call, its projections stacked: of keys and values, and before them of queries unless
    those are given."""

    query: Tensor | None  # [batch, g, heads, head_dim]; None: made of the hidden states
    hidden: Tensor  # [batch, tokens, dim]
    weight: Tensor  # [2 or 3 * heads * head_dim, dim]
    bias: Tensor | None  # [1 or 3 * heads * head_dim]: of the values alone, or of all three
    positions: Tensor  # [batch, g], -1 = no query
    seen: Visibility
    seed: Tensor | None
    heads: int
    causal: bool
    scale: float
    dropout_p: float

    @property
    def head_dim(self) -> int:
        return self.weight.shape[0] // (self.heads * (3 if self.query is None else 2))

    def weights(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Of queries, keys and values, each [heads * head_dim, dim]."""
        parts = self.weight.split(self.heads * self.head_dim)
        return (parts[0] if self.query is None else None), parts[-2], parts[-1]

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Of queries and values, each [heads * head_dim]. A key's bias cannot change the result: it
        shifts all scores of a row alike."""
        if self.bias is None:
            return None, None
        parts = self.bias.split(self.heads * self.head_dim)
        return (parts[0] if self.query is None else None), parts[-1]
