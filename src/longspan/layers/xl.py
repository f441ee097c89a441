"""Transformer-XL: attention over a segment and a memory of what came before it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from longspan.layers.causal import Attended, CausalAttention, RelativePositions
from longspan.ops.relative import banded_attention


class MemoryAttention(CausalAttention):
    """What layers share that remember their inputs.

    The state is a memory [batch, tokens, dim or 3 * dim]: inputs and, outside training, their keys
    and values behind them, so that nothing is projected twice. While training, weights change
    between segments, so that memories are projected anew. No gradient flows into it.
    """

    recurrent = True

    def key_value(self, memory: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, tokens, heads, head_dim] of a memory: it asks no questions."""
        memory = memory.to(dtype)
        if memory.shape[2] > self.dim:
            both = memory[..., self.dim :]
        else:
            bias = None if self.qkv.bias is None else self.qkv.bias[self.dim :]
            both = linear(memory, self.qkv.weight[self.dim :], bias)
        key, value = both.unflatten(-1, (2, self.heads, -1)).unbind(2)
        return key, value

    def fit(self, memory: Tensor) -> Tensor:
        """A memory as training, or all else, wants it, whichever made it."""
        if self.training:
            return memory[..., : self.dim]
        return self.remember(memory) if memory.shape[2] == self.dim else memory

    def remember(self, inputs: Tensor) -> Tensor:
        """A memory of some inputs [batch, tokens, dim]."""
        return self.memory_of(inputs, *self.key_value(inputs, inputs.dtype))

    def memory_of(self, inputs: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same where keys and values are known."""
        if self.training:
            return inputs.detach()
        together = (inputs.to(key.dtype), key.flatten(2), value.flatten(2))
        return torch.cat(together, 2).detach()


class XLAttention(MemoryAttention):
    """A segment attends to itself and to the layer's inputs of the `memory` tokens before it. The
    two biases of the relative positions are the layer's own, not shared with other layers.

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
        state = None if state is None else self.fit(state)
        left = self.memory - 1 if self.same_length else None
        out, new = self.attend(hidden, state, left)
        if not keep_state:
            return Attended(out)
        known = new if state is None else torch.cat((state, new), 1)
        return Attended(out, known[:, max(0, known.shape[1] - self.memory) :].clone())

    def attend(
        self, hidden: Tensor, memory: Tensor | None, left: int | None
    ) -> tuple[Tensor, Tensor]:
        """[batch, tokens, dim] from the tokens and the memory before them, and a memory of them."""
        query, key, value = self.project(hidden)
        new = self.memory_of(hidden, key, value)
        if memory is not None and memory.shape[1] > 0:
            old_key, old_value = self.key_value(memory, hidden.dtype)
            key, value = torch.cat((old_key, key), 1), torch.cat((old_value, value), 1)
        out = banded_attention(
            query,
            key,
            value,
            left=left,
            relative=self.relative(key.shape[1], hidden.shape[1]),
            dropout_p=self.dropout_p,
        )
        return out.flatten(2), new
