"""Transformer-XL: attention over a segment and a memory of what came before it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from longspan.layers.causal import Attended, CausalAttention, RelativePositions
from longspan.ops.relative import banded_attention


class XLAttention(CausalAttention):
    """A segment attends to itself and to the layer's inputs of the `memory` tokens before it.

    The state is these inputs [batch, up to memory, dim]; no gradient flows into it. The two
    biases of the relative positions are the layer's own, not shared with other layers.

    Args:
        memory: tokens kept.
        same_length: every token sees exactly `memory` tokens, itself included, as soon as there
            are so many; otherwise those late in a segment see more than those early in it.
        clamp: the distance from which on all count as equal.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memory: int,
        *,
        same_length: bool = False,
        clamp: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias)
        if memory < 0 or (same_length and memory < 1):
            raise ValueError(f"memory={memory} must not be negative, nor 0 with same_length")
        self.memory, self.same_length = memory, same_length
        self.relative = RelativePositions(dim, heads, clamp)

    def forward(
        self, hidden: Tensor, first: int = 0, state: Any = None, keep_state: bool = False
    ) -> Attended:
        left = self.memory - 1 if self.same_length else None
        out = self.attend(hidden, state, left)
        return Attended(out, self.remember(state, hidden) if keep_state else None)

    def attend(self, hidden: Tensor, memory: Tensor | None, left: int | None) -> Tensor:
        """[batch, tokens, dim]: from the tokens, and the memory before them."""
        query, key, value = self.project(hidden)
        if memory is not None and memory.shape[1] > 0:
            weight, bias = self.key_value()
            old = linear(memory.to(hidden.dtype), weight, bias).unflatten(-1, (2, self.heads, -1))
            old_key, old_value = old.unbind(2)
            key, value = torch.cat((old_key, key), 1), torch.cat((old_value, value), 1)
        out = banded_attention(
            query,
            key,
            value,
            left=left,
            relative=self.relative(key.shape[1]),
            dropout_p=self.dropout_p,
        )
        return out.flatten(2)

    def key_value(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of keys and values alone: a memory asks no questions."""
        bias = self.qkv.bias
        return self.qkv.weight[self.dim :], None if bias is None else bias[self.dim :]

    def remember(self, memory: Tensor | None, hidden: Tensor) -> Tensor:
        """The last inputs, old ones included."""
        known = hidden.detach() if memory is None else torch.cat((memory, hidden.detach()), 1)
        return known[:, max(0, known.shape[1] - self.memory) :].clone()
