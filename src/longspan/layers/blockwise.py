"""BlockBERT: every head pairs each block of tokens with one block, its own or another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.layers.document import DocumentAttention
from longspan.ops.listed import listed_attention, tokens_of


class BlockwiseAttention(DocumentAttention):
    """A document is cut into blocks. In each head the tokens of a block see all of one block, and
    blocks are permuted: with shift s the i-th sees the (i + s)-th, counted in a circle. Over
    layers, what heads saw in different blocks comes together. Global tokens change nothing.

    Args:
        block: tokens; the last block of a document may have fewer.
        shifts: one per head, in blocks; by default two thirds of the heads see their own block,
            the others, one at least, by turns the next and the one before (8, 2 and 2 of 12).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        block: int = 256,
        shifts: Sequence[int] | None = None,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias)
        if block < 1:
            raise ValueError(f"block={block} must be at least 1 token")
        if shifts is None:
            others = max(heads // 3, heads > 1)
            shifts = [0] * (heads - others) + [1 - 2 * (head % 2) for head in range(others)]
        if len(shifts) != heads or not all(type(shift) is int for shift in shifts):
            raise ValueError(f"shifts={shifts!r} must be {heads} whole numbers, one per head")
        self.block, self.shifts = block, tuple(shifts)

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Tensor | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        query, key, value = self.project(hidden, position_ids)
        listed = self._listed(hidden, valid)
        if valid is not None:
            there = valid[:, None, None].expand(-1, *listed.shape[1:3], -1)
            listed = torch.where(there.gather(-1, listed.clamp(min=0)), listed, -1)
        out = listed_attention(
            *(query, key, value), listed, size=self.block, dropout_p=self.dropout_p
        )
        return out.flatten(2)

    def _listed(self, hidden: Tensor, valid: Tensor | None) -> Tensor:
        """[batch or 1, heads, blocks, block]: the tokens of the block that each block sees."""
        place = torch.arange(hidden.shape[1], device=hidden.device)
        block = torch.arange(-(-hidden.shape[1] // self.block), device=hidden.device)
        blocks = block[-1:] + 1  # of each document
        if valid is not None:
            blocks = torch.where(valid, place // self.block + 1, 1).amax(1)
        # Numbers from the host, put together on the device: a tensor of them would wait for it.
        shifted = torch.stack([block + shift for shift in self.shifts])
        paired = shifted % blocks[:, None, None]
        return tokens_of(paired[..., None], self.block, hidden.shape[1])
