"""BigBird: blocks of tokens see their neighbours, a few blocks at random, and global tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.layers.base import AttentionLayer
from longspan.layers.causal import CausalAttention
from longspan.layers.causal_blocks import CausalBlocks, check_block
from longspan.layers.document import Chosen, DocumentAttention
from longspan.ops.listed import (
    count_blocks,
    earlier_random_blocks,
    listed_attention,
    near_blocks,
    random_blocks,
    tokens_of,
)
from longspan.ops.once import made_once
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

    needs_positions = True  # their number: else every layer would have to wait for it

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
        check_block(block)
        if window < 1 or window % 2 == 0:
            raise ValueError(
                f"window={window} blocks must be an odd number: the block itself, and as many on "
                "each side"
            )
        _check_others(random, global_blocks)
        self.block, self.window, self.random = block, window, random
        self.global_blocks, self.seed = global_blocks, seed
        self.number = 0

    def follow(self, before: Sequence[AttentionLayer]) -> None:
        self.number = len(before)

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        query, key, value = self.project(hidden, position_ids)
        listed = self._listed(hidden, valid)
        if chosen is None:
            out = self._by_blocks(query, key, value, listed, valid)
        else:
            out = self._by_tokens(query, key, value, listed, valid, chosen)
        return out.flatten(2)

    def _by_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, listed: Tensor, valid: Tensor | None
    ) -> Tensor:
        """The first blocks are global and no other tokens."""
        tokens = query.shape[1]
        room = min(tokens, self.global_blocks * self.block)
        first, rest = query.split((room, tokens - room), 1)
        if room < tokens:
            rest = listed_attention(
                *(rest, key, value, listed[:, :, self.global_blocks :]),
                size=self.block,
                width=self.block,
                valid=valid,
                dropout_p=self.dropout_p,
            )
        if room == 0:
            return rest
        return torch.cat((self._rows(first, key, value, valid), rest), 1)

    def _by_tokens(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        listed: Tensor,
        valid: Tensor | None,
        chosen: Chosen,
    ) -> Tensor:
        place = torch.arange(query.shape[1], device=query.device)
        room = self.global_blocks * self.block
        mask = chosen.mask | (place < room)
        mask = mask if valid is None else mask & valid
        at = global_positions(mask, None if chosen.most is None else room + chosen.most)
        # Global keys are listed once, for all blocks, so not in their own blocks again.
        listed = tokens_of(listed[..., : self.window + self.random], self.block, query.shape[1])
        listed = listed.expand(query.shape[0], -1, -1, -1)
        hide = mask if valid is None else mask | ~valid
        hide = hide[:, None, None].expand(-1, *listed.shape[1:3], -1)
        listed = torch.where(hide.gather(-1, listed.clamp(min=0)), -1, listed)
        listed = torch.cat((listed, at[:, None, None].expand(-1, *listed.shape[1:3], -1)), -1)
        out = listed_attention(
            *(query, key, value, listed), size=self.block, dropout_p=self.dropout_p
        )
        if at.shape[1] == 0:
            return out
        index = at.clamp(min=0)[..., None, None].expand(-1, -1, *query.shape[2:])
        return put_rows(out, self._rows(query.gather(1, index), key, value, valid), at)

    def _listed(self, hidden: Tensor, valid: Tensor | None) -> Tensor:
        """[batch or 1, heads, blocks, count]: see `_blocks_seen`."""
        most = -(-hidden.shape[1] // self.block)
        seed = self.seed + self.number
        about = (most, self.heads, self.window, self.random, self.global_blocks, seed)
        if valid is None:
            return _all_alike(hidden, *about)[0]
        return _blocks_seen(count_blocks(valid, self.block), *about)

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
        """[batch, g, heads, head_dim]: what global tokens make of the whole document."""
        mask = None
        if valid is not None:
            # A row of padding alone is zero in the end, but must not be NaN on the way.
            mask = (valid | ~valid.any(dim=1, keepdim=True))[:, None, None]
        attended = scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)),
            attn_mask=mask,
            dropout_p=self.dropout_p,
        )
        return attended.transpose(1, 2)


class CausalBigBird(CausalBlocks):
    """A token sees its own block up to itself, and whole blocks before: those right before it, the
    text's first ones, and some at random, which are others in each head and layer and stay the
    same however long the text gets. The state holds all keys and values, as any of them may still
    be seen.

    Args:
        block: tokens.
        window: blocks, the last of which is the token's own.
        random: blocks.
        global_blocks: blocks at the text's beginning that all tokens see.
        seed: of the random blocks; a layer adds its number.
        base: of the rotary angles.
        norm_keys: scale queries and keys to one length before they meet.
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
        base: float = 10000.0,
        norm_keys: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        about = {"base": base, "norm_keys": norm_keys, "dropout": dropout, "bias": bias}
        super().__init__(dim, heads, block, back=None, **about)
        if window < 1:
            raise ValueError(f"window={window} blocks must be at least 1, the token's own")
        _check_others(random, global_blocks)
        self.window, self.random, self.global_blocks = window, random, global_blocks
        self.seed, self.number = seed, 0

    def follow(self, before: Sequence[CausalAttention]) -> None:
        self.number = len(before)

    def blocks_seen(self, like: Tensor, begin: int, end: int) -> Tensor:
        seed = self.seed + self.number
        about = (self.heads, self.window, self.random, self.global_blocks, seed)
        return _blocks_before(like, begin, end, *about)[0]


def _check_others(random: int, global_blocks: int) -> None:
    if random < 0 or global_blocks < 0:
        raise ValueError(f"random={random}, global_blocks={global_blocks} must not be negative")


@made_once
def _all_alike(device: torch.device, most: int, *about: int) -> tuple[Tensor]:
    """For documents that fill their rows."""
    return (_blocks_seen(torch.full((1,), most, device=device), most, *about),)


def _blocks_seen(
    blocks: Tensor, most: int, heads: int, window: int, random: int, first: int, seed: int
) -> Tensor:
    """[batch, heads, most, window + random + first]: numbers of the blocks that each block of
    documents of `blocks` [batch] blocks sees, -1 = none, the `first` ones last and only there."""
    some = random_blocks(blocks, most, heads, random, window // 2, seed)
    near = near_blocks(most, window // 2, blocks.device).expand(*some.shape[:2], -1, -1)
    return _first_ones_last(torch.cat((near, some), -1), first, most)


@made_once
def _blocks_before(
    device: torch.device,
    begin: int,
    end: int,
    heads: int,
    window: int,
    random: int,
    first: int,
    seed: int,
) -> tuple[Tensor]:
    """[1, heads, blocks, window + random + first], of a text's blocks from `begin` to `end`."""
    place = torch.arange(begin, end, device=device)
    some = earlier_random_blocks(place, heads, random, window, seed)
    near = place[:, None] - torch.arange(window, device=device)
    seen = torch.cat((near.expand(heads, -1, -1), some), -1)
    return (_first_ones_last(seen, first, end)[None],)


def _first_ones_last(seen: Tensor, first: int, blocks: int) -> Tensor:
    """The `first` blocks, which all see, of so many that there are, behind the others
    [..., count] and only there."""
    seen = torch.where(seen < first, -1, seen)
    everywhere = torch.arange(first, device=seen.device)
    everywhere = torch.where(everywhere < blocks, everywhere, -1)
    return torch.cat((seen, everywhere.expand(*seen.shape[:-1], -1)), -1)
