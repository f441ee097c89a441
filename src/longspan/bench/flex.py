"""FlexAttention's description of a band, which more than one benchmark gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128  # FlexAttention's own default


def block_mask(
    tokens: int, left: int, right: int, device: torch.device, first: int = 0
) -> BlockMask:
    """What `create_block_mask` makes of a band and the `first` tokens being global, but worked out
    block by block: that function looks at all n x n pairs, and to spare their memory has to be
    compiled for each length."""
    from torch.nn.attention.flex_attention import BlockMask

    def band(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j <= left) & (j - i <= right)

    def band_or_global(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Comparing positions is the cheapest form for FlexAttention; a mask in memory, which is
        # what we are given, would cost it more.
        return ((i - j <= left) & (j - i <= right)) | (i < first) | (j < first)

    begin = torch.arange(0, tokens, _BLOCK, device=device)
    end = (begin + _BLOCK - 1).clamp(max=tokens - 1)
    least, most = begin[:, None] - end[None, :], end[:, None] - begin[None, :]  # of i - j
    inside = end < first
    some = (least <= left) & (most >= -right)
    some = some | (begin < first)[:, None] | (begin < first)[None, :]
    # A ragged last block is never whole: its kernel has to mask what lies beyond the end.
    ragged = (end - begin + 1) < _BLOCK
    whole = ((least >= -right) & (most <= left)) | inside[:, None] | inside[None, :]
    whole = whole & ~ragged[:, None] & ~ragged[None, :]

    def lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks each row has, and which; those it has not stand behind."""
        order = chosen.int().argsort(dim=1, descending=True, stable=True)
        return chosen.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    return BlockMask.from_kv_blocks(
        *lists(some & ~whole),
        *lists(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=band_or_global if first else band,
        seq_lengths=(tokens, tokens),
    )
