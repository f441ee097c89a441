"""The Sparse Transformer's two patterns: what is near, and a sample of all that is further back."""

import operator

import torch
from torch import Tensor

from longspan.layers.causal import Attended, Cache, CausalAttention
from longspan.ops.listed import blocks_asking, causal_listed_attention
from longspan.ops.once import made_once
from longspan.ops.relative import banded_attention
from longspan.ops.window import window_attention

PATTERNS = ("strided", "fixed")


class SparseAttention(CausalAttention):
    """With a stride near the root of the text's length, time is of the order n * sqrt(n).

    "strided": half of the heads see the last `stride` tokens, the other half every `stride`-th
    token back to the beginning, from the query on. "fixed": every head sees the tokens of its own
    block of `stride` up to itself, and the last `summary` tokens of every block before.

    The state holds all keys and values, as any of them may still be seen.

    Args:
        stride: tokens.
        pattern: "strided" or "fixed".
        summary: for "fixed".
        base: of the rotary angles.
        norm_keys: scale queries and keys to one length before they meet.
        backend: of `window_attention`, which serves "strided" where nothing is cached.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        stride: int,
        *,
        pattern: str = "strided",
        summary: int = 32,
        base: float = 10000.0,
        norm_keys: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias, base=base, norm_keys=norm_keys)
        if pattern not in PATTERNS:
            raise ValueError(f"pattern={pattern!r} is unknown; choose from {', '.join(PATTERNS)}")
        if stride < 1:
            raise ValueError(f"stride={stride} must be at least 1 token")
        if pattern == "strided" and heads < 2:
            raise ValueError("the strided pattern needs two heads: one sees near, one far")
        if pattern == "fixed" and not 1 <= summary <= stride:
            raise ValueError(f"summary={summary} must be from 1 to stride={stride}")
        self.stride, self.pattern, self.summary = stride, pattern, summary
        self.backend = backend

    def forward(
        self, hidden: Tensor, first: int = 0, state: Cache | None = None, keep_state: bool = False
    ) -> Attended:
        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        known = Cache.join(state, key, value)
        attend = self._strided if self.pattern == "strided" else self._fixed
        out = attend(query, *known).flatten(2)
        return Attended(out, known.last(None) if keep_state else None)

    def _strided(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        near = self.heads - self.heads // 2
        back = -(-_known(key.shape[1]) // self.stride)
        parts = []
        for heads, left, step in (
            (slice(0, near), self.stride - 1, 1),
            (slice(near, None), back, self.stride),
        ):
            tensors = [t[:, :, heads] for t in (query, key, value)]
            about = {"dilation": step, "dropout_p": self.dropout_p}
            if query.shape[1] == key.shape[1]:
                about |= {"window": (left, 0), "backend": self.backend}
                parts.append(window_attention(*tensors, **about))
            else:
                parts.append(banded_attention(*tensors, left=left, **about))
        return torch.cat(parts, dim=2)

    def _fixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = _known(key.shape[1])
        asking = blocks_asking(query, key, self.stride)
        (listed,) = _lists(query, *asking, tokens, self.stride, self.summary)
        return causal_listed_attention(
            query, key, value, listed[None, None], size=self.stride, dropout_p=self.dropout_p
        )


def _known(tokens: int) -> int:
    """A plain number, for which a compiled layer is compiled: windows take no other, and of lists
    that grow with the text torch 2.13 makes nothing for texts of any length."""
    return operator.index(tokens)


@made_once
def _lists(
    device: torch.device, begin: int, end: int, tokens: int, size: int, summary: int
) -> tuple[Tensor]:
    """For the blocks of `size` tokens from number `begin` to `end`: their own, and the `summary`
    last ones of each block before."""
    block = torch.arange(begin, end, device=device)[:, None]
    own = block * size + torch.arange(size, device=device)
    back = torch.arange(size - summary, size, device=device)
    before = torch.arange(tokens // size, device=device)[:, None] * size + back
    before = torch.where(before.flatten() < block * size, before.flatten(), -1)
    return (torch.cat((torch.where(own < tokens, own, -1), before), 1),)
