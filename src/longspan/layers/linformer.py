"""Linformer: every token sees the whole document, made into a constant number of keys."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longspan.layers.base import AttentionLayer
from longspan.layers.document import Chosen, DocumentAttention
from longspan.ops.lowrank import (
    convolve_tokens,
    count_tokens,
    lowrank_attention,
    pool_tokens,
    project_tokens,
)

SHARING = ("none", "heads", "key-value", "layers")
REDUCTIONS = ("linear", "pool", "convolution")


class Reduction(nn.Module):
    """Fewer keys and values: [batch, n, heads, head_dim] -> [batch, about rank, ...], each."""

    def __init__(
        self, kind: str, length: int, rank: int, heads: int, head_dim: int, sharing: str
    ) -> None:
        super().__init__()
        self.kind, self.length, self.rank = kind, length, rank
        self.size = -(-length // rank)  # tokens per key of pool and convolution
        matrices = 1 if sharing in ("key-value", "layers") else 2
        shape = {
            "linear": (rank, length),
            "convolution": (self.size, head_dim, head_dim),
        }.get(kind)
        self.weight = None
        if shape is not None:
            bound = rank**-0.5 if kind == "linear" else (self.size * head_dim) ** -0.5
            own = heads if sharing == "none" else 1
            self.weight = nn.Parameter(torch.empty(matrices, own, *shape).uniform_(-bound, bound))

    def forward(
        self, key: Tensor, value: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values, and which of them stand for any token."""
        if valid is not None:
            # Padding would otherwise be mixed into what stands for the document.
            key, value = (t.masked_fill(~valid[..., None, None], 0.0) for t in (key, value))
        if self.kind == "linear":
            first, last = self._matrices()
            return project_tokens(key, first), project_tokens(value, last), None
        visible = None if valid is None else count_tokens(key, self.size, valid) > 0
        if visible is not None:
            # A row of padding alone: its output is dropped, but must not be NaN before that.
            visible = visible | ~visible.any(dim=1, keepdim=True)
        if self.weight is None:
            return pool_tokens(key, self.size, valid), pool_tokens(value, self.size, valid), visible
        first, last = self._matrices()
        return convolve_tokens(key, first), convolve_tokens(value, last), visible

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """That of keys and that of values."""
        assert self.weight is not None
        if self.weight.shape[0] == 1:  # a view, whose gradient is not filled with zeros first
            own = self.weight.flatten(0, 1)
            return own, own
        return self.weight[0], self.weight[1]


class LinformerAttention(DocumentAttention):
    """Softmax attention to `rank` keys, each a mixture of all tokens' keys.

    There is a weight for every place up to `length`, so that longer documents are refused; shorter
    ones use the weights of the places they have. A key mixes later tokens with earlier ones, which
    leaves no causal form. Global tokens change nothing: every token sees its whole document.

    Args:
        length: the longest document.
        rank: keys that stand for a document of that length.
        reduction: "linear" (any mixture), "pool" (means of neighbours), "convolution" (weighted
            sums of neighbours).
        sharing: whose weights are the same: "none" (each head has its own for keys and for
            values), "heads", "key-value" (heads', and keys and values) or "layers" (all that, and
            over the layers of the model that ask for it).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        length: int,
        rank: int,
        *,
        reduction: str = "linear",
        sharing: str = "key-value",
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias)
        if not 1 <= rank <= length:
            raise ValueError(f"rank={rank} must be from 1 to length={length}")
        for name, given, known in (
            ("reduction", reduction, REDUCTIONS),
            ("sharing", sharing, SHARING),
        ):
            if given not in known:
                raise ValueError(f"{name}={given!r} is unknown; choose from {', '.join(known)}")
        self.sharing = sharing
        self.own: Reduction | None = Reduction(
            reduction, length, rank, heads, self.head_dim, sharing
        )
        # In a list, so that weights of another layer are not counted among this one's.
        self._lent: list[Reduction] = []

    @property
    def reduction(self) -> Reduction:
        return self._lent[0] if self.own is None else self.own

    def follow(self, before: Sequence[AttentionLayer]) -> None:
        if self.sharing != "layers":
            return
        for other in before:
            if isinstance(other, LinformerAttention) and other.own and other.sharing == "layers":
                mine, theirs = (
                    (r.kind, r.length, r.rank, one.heads)
                    for one, r in ((self, self.reduction), (other, other.own))
                )
                if mine != theirs:
                    raise ValueError(
                        "linformer layers that share one projection must agree in reduction, "
                        f"length, rank and heads: {theirs} and {mine}"
                    )
                self.own, self._lent = None, [other.own]
                return

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        reduce = self.reduction
        beyond = hidden.shape[1] - reduce.length
        if beyond > 0:
            # A batch may be padded further than its documents go; a graph cannot look.
            if valid is None or torch.compiler.is_compiling() or valid[:, reduce.length :].any():
                raise ValueError(
                    f"{hidden.shape[1]} tokens, but this linformer layer has weights for "
                    f"length={reduce.length}: shorten the input, or train with a greater length"
                )
            own = slice(reduce.length)
            out = self.attend(
                hidden[:, own],
                valid=valid[:, own],
                chosen=None,
                position_ids=None if position_ids is None else position_ids[:, own],
            )
            return nn.functional.pad(out, (0, 0, 0, beyond))
        query, key, value = self.project(hidden, position_ids)
        key, value, visible = reduce(key, value, valid)
        out = lowrank_attention(
            *(query, key, value),
            visible=visible,
            dropout_p=self.dropout_p,
            scale=1.0 / math.sqrt(self.head_dim),
        )
        return out.flatten(2)
