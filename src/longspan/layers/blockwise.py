"""BlockBERT: every head pairs each block of tokens with one block, its own or another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.layers.document import Chosen, DocumentAttention
from longspan.ops.listed import count_blocks, listed_attention
from longspan.ops.once import made_once


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
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        query, key, value = self.project(hidden, position_ids)
        blocks = -(-hidden.shape[1] // self.block)
        (shifted,) = _shifted(hidden, blocks, self.shifts)
        if valid is not None:
            blocks = count_blocks(valid, self.block)[:, None, None]
        out = listed_attention(
            *(query, key, value),
            (shifted % blocks)[..., None],
            size=self.block,
            width=self.block,
            valid=valid,
            dropout_p=self.dropout_p,
        )
        return out.flatten(2)


@made_once
def _shifted(device: torch.device, blocks: int, shifts: tuple[int, ...]) -> tuple[Tensor]:
    """[1, heads, blocks]: the numbers of blocks, beyond the last and before the first too."""
    block = torch.arange(blocks, device=device)
    # Numbers from the host, put together on the device: a tensor of them would wait for it.
    return (torch.stack([block + shift for shift in shifts])[None],)
