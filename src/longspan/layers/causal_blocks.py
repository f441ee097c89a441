"""What causal layers share whose tokens see whole blocks of those before them."""

from torch import Tensor

from longspan.layers.causal import Attended, Cache, CausalAttention
from longspan.ops.listed import blocks_asking, causal_listed_attention


class CausalBlocks(CausalAttention):
    """The text is cut into blocks from its first token on, however much of it is read at a time; a
    subclass says which of them each one sees. A token sees these up to itself.

    Args:
        block: tokens.
        back: blocks before its own that a token may see, of which the state holds keys and values;
            None = all.
        base: of the rotary angles.
        norm_keys: scale queries and keys to one length before they meet.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        block: int,
        *,
        back: int | None,
        base: float,
        norm_keys: bool,
        dropout: float,
        bias: bool,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias, base=base, norm_keys=norm_keys)
        check_block(block)
        self.block, self.back = block, back

    def blocks_seen(self, like: Tensor, begin: int, end: int) -> Tensor:
        """[1, heads, blocks, count]: of those from number `begin` to `end` among the blocks that
        are known; -1 = none. Those behind it a token does not see anyway."""
        raise NotImplementedError

    def forward(
        self, hidden: Tensor, first: int = 0, state: Cache | None = None, keep_state: bool = False
    ) -> Attended:
        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        known = Cache.join(state, key, value)
        listed = self.blocks_seen(query, *blocks_asking(query, known.key, self.block))
        about = {"size": self.block, "width": self.block, "dropout_p": self.dropout_p}
        out = causal_listed_attention(query, known.key, known.value, listed, **about)
        return Attended(out.flatten(2), self._kept(known) if keep_state else None)

    def _kept(self, known: Cache) -> Cache:
        """It begins with a block, as the text does."""
        if self.back is None:
            return known.last(None)
        tokens = known.key.shape[1]
        return known.last(tokens - max(0, tokens // self.block - self.back) * self.block)


def check_block(block: int) -> None:
    if block < 1:
        raise ValueError(f"block={block} must be at least 1 token")
