"""BigBird: blocks of tokens see their neighbours, a few blocks at random, and global tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.layers.base import AttentionLayer
from longspan.layers.document import DocumentAttention
from longspan.ops.listed import listed_attention, near_blocks, random_blocks, tokens_of
from longspan.ops.rows import global_positions
from longspan.ops.window.reference import put_rows


class BigBirdAttention(DocumentAttention):
    """A block of tokens sees whole blocks: those around it, and some at random, which are others
    in each head and layer and for documents of other lengths. Global tokens see and are seen by
    the whole document: those of its first blocks and those that the model is told are global.

    Args:
        block: tokens.
        window: blocks, an odd number: as many on each side, and the block itself.
        random: blocks.
        global_blocks: blocks at a document's beginning that are global.
        seed: of the random blocks; a layer adds its number.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        block: int = 64,
        window: int = 3,
        random: int = 3,
        global_blocks: int = 2,
        seed: int = 0,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias)
        if block < 1:
            raise ValueError(f"block={block} must be at least 1 token")
        if window < 1 or window % 2 == 0:
            raise ValueError(
                f"window={window} blocks must be an odd number: the block itself, and as many on "
                "each side"
            )
        if random < 0 or global_blocks < 0:
            raise ValueError(f"random={random}, global_blocks={global_blocks} must not be negative")
        self.block, self.window, self.random = block, window, random
        self.global_blocks, self.seed = global_blocks, seed
        self.number = 0

    def share(self, before: Sequence[AttentionLayer]) -> None:
        self.number = len(before)

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Tensor | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        query, key, value = self.project(hidden, position_ids)
        chosen, columns = self._global(hidden, valid, chosen)
        listed = self._listed(hidden, valid)
        # Global keys are listed once, for all blocks, so not in their own blocks again.
        hide = chosen if valid is None else chosen | ~valid
        hide = hide[:, None, None].expand(-1, *listed.shape[1:3], -1)
        listed = torch.where(hide.gather(-1, listed.clamp(min=0)), -1, listed)
        listed = torch.cat((listed, columns[:, None, None].expand(-1, *listed.shape[1:3], -1)), -1)
        out = listed_attention(
            *(query, key, value), listed, size=self.block, dropout_p=self.dropout_p
        )
        if columns.shape[1] > 0:
            rows = self._rows(query, key, value, columns, valid)
            out = put_rows(out, rows, columns)
        return out.flatten(2)

    def _global(
        self, hidden: Tensor, valid: Tensor | None, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Which tokens are global, [batch, tokens], and where, [batch, g], -1 for an empty slot."""
        batch, tokens = hidden.shape[:2]
        place = torch.arange(tokens, device=hidden.device)
        first = (place < self.global_blocks * self.block).expand(batch, tokens)
        first = first if valid is None else first & valid
        if chosen is not None:
            both = first | chosen
            return both, global_positions(both)
        room = min(tokens, self.global_blocks * self.block)
        return first, torch.where(first, place, -1)[:, :room]

    def _listed(self, hidden: Tensor, valid: Tensor | None) -> Tensor:
        """[batch, heads, blocks, count]: the tokens of the blocks that each block sees."""
        batch, tokens = hidden.shape[:2]
        most, reach = -(-tokens // self.block), self.window // 2
        blocks = torch.full((batch,), most, device=hidden.device)
        if valid is not None:
            place = torch.arange(tokens, device=hidden.device)
            blocks = torch.where(valid, place // self.block + 1, 1).amax(1)
        some = random_blocks(blocks, most, self.heads, self.random, reach, self.seed + self.number)
        near = near_blocks(most, reach, hidden.device).expand(batch, self.heads, -1, -1)
        return tokens_of(torch.cat((near, some), -1), self.block, tokens)

    def _rows(
        self, query: Tensor, key: Tensor, value: Tensor, at: Tensor, valid: Tensor | None
    ) -> Tensor:
        """[batch, g, heads, head_dim]: what global tokens make of the whole document."""
        index = at.clamp(min=0)[..., None, None].expand(-1, -1, *query.shape[2:])
        mask = None
        if valid is not None:
            # A row of padding alone is zero in the end, but must not be NaN on the way.
            mask = (valid | ~valid.any(dim=1, keepdim=True))[:, None, None]
        attended = scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query.gather(1, index), key, value)),
            attn_mask=mask,
            dropout_p=self.dropout_p,
        )
        return attended.transpose(1, 2)
