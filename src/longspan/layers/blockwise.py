"""BlockBERT: every head pairs each block of tokens with one block, its own or another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.layers.causal_blocks import CausalBlocks, check_block
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
        check_block(block)
        self.block, self.shifts = block, _shifts(shifts, heads, [1, -1])

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
        (shifted,) = _shifted(hidden, 0, blocks, self.shifts)
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


class CausalBlockwise(CausalBlocks):
    """In each head a token sees one block: its own up to itself, or all of one before. Heads that
    would see one before the text's first see nothing, and are zero.

    Args:
        block: tokens.
        shifts: one per head, in blocks, at most 0; by default two thirds of the heads see their
            own block, the others, one at least, that before it.
        base: of the rotary angles.
        norm_keys: scale queries and keys to one length before they meet.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        block: int = 256,
        shifts: Sequence[int] | None = None,
        base: float = 10000.0,
        norm_keys: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        found = _shifts(shifts, heads, [-1])
        if max(found) > 0:
            raise ValueError(f"shifts={shifts!r} must be 0 or below: no token sees later blocks")
        about = {"base": base, "norm_keys": norm_keys, "dropout": dropout, "bias": bias}
        super().__init__(dim, heads, block, back=-min(found), **about)
        self.shifts = found

    def blocks_seen(self, like: Tensor, begin: int, end: int) -> Tensor:
        (shifted,) = _shifted(like, begin, end, self.shifts)
        return shifted.clamp(min=-1)[..., None]


def _shifts(given: Sequence[int] | None, heads: int, others: list[int]) -> tuple[int, ...]:
    """One per head: as given, or no shift for two thirds of them and these for the others, by
    turns."""
    if given is None:
        shifted = max(heads // 3, heads > 1)
        given = [0] * (heads - shifted) + [others[head % len(others)] for head in range(shifted)]
    if len(given) != heads or not all(type(shift) is int for shift in given):
        raise ValueError(f"shifts={given!r} must be {heads} whole numbers, one per head")
    return tuple(given)


@made_once
def _shifted(device: torch.device, begin: int, end: int, shifts: tuple[int, ...]) -> tuple[Tensor]:
    """[1, heads, blocks]: the numbers of blocks, beyond the last and before the first too."""
    block = torch.arange(begin, end, device=device)
    # Numbers from the host, put together on the device: a tensor of them would wait for it.
    return (torch.stack([block + shift for shift in shifts])[None],)
