"""Documents made shorter: means of neighbouring tokens, the first token kept apart (Funnel)."""

from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.packed import Document, documents_of
from longspan.ops.window.pattern import Visibility


class Pools(NamedTuple):
    """Which tokens are put together. A document's first token is a pool by itself, so that what
    stands for the whole document is not mixed with its second token; then follow `stride` tokens
    each, the last pool having what is left. Rows of pools begin with their document, wherever it
    stood; packed documents follow one another without gaps."""

    slot: Tensor  # [batch, tokens]: the pool that a token is in; `length` for padding
    length: int  # pools in a row
    # Packed documents, where they stand among the tokens and among the pools.
    documents: tuple[Document, ...] = ()
    shortened: tuple[Document, ...] = ()

    @property
    def bounds(self) -> Tensor | None:
        """[documents + 1]: where packed documents begin and end among the pools."""
        if not self.documents:
            return None
        ends = [0, *(one.end for one in self.shortened)]
        return torch.tensor(ends, device=self.slot.device)

    def mean(self, states: Tensor) -> Tensor:
        """[batch, tokens, dim] -> [batch, length, dim]; a pool of padding alone is zero."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        count = self._sum(torch.ones_like(wide[..., :1]))
        return (self._sum(wide) / count.clamp(min=1)).to(states.dtype)

    def any(self, mask: Tensor) -> Tensor:
        """Bool [batch, tokens] -> [batch, length]: whether it holds for a token of the pool."""
        return self._sum(mask[..., None].float())[..., 0] > 0

    def earliest(self, numbers: Tensor) -> Tensor:
        """[batch or 1, tokens] -> [batch, length]: the smallest of each pool, 0 if it has none."""
        batch = self.slot.shape[0]
        most = torch.iinfo(numbers.dtype).max
        found = numbers.new_full((batch, self.length + 1), most)
        found = found.scatter_reduce(1, self.slot, numbers.expand(batch, -1), "amin")
        return torch.where(found == most, 0, found)[:, : self.length]

    def spread(self, pools: Tensor) -> Tensor:
        """[batch, length, dim] -> [batch, tokens, dim]: each token's pool; 0 for padding."""
        at = self.slot[..., None].expand(-1, -1, pools.shape[2])
        return torch.nn.functional.pad(pools, (0, 0, 0, 1)).gather(1, at)

    def _sum(self, states: Tensor) -> Tensor:
        """Over the tokens of each pool."""
        batch, _, dim = states.shape
        row = torch.arange(batch, device=states.device)[:, None] * (self.length + 1)
        sums = states.new_zeros(batch * (self.length + 1), dim)
        sums = sums.index_add(0, (row + self.slot).flatten(), states.flatten(0, 1))
        return sums.unflatten(0, (batch, -1))[:, : self.length]


def count_pools(tokens: int, stride: int) -> int:
    """How many pools a document of so many tokens becomes."""
    return 1 + -(-(tokens - 1) // stride)


def shorten(like: Tensor, seen: Visibility, stride: int) -> Pools:
    """The pools of a batch [batch, tokens, ...]. A single row with padding may be packed: where its
    documents are is read back from the device."""
    batch, tokens = like.shape[:2]
    place = torch.arange(tokens, device=like.device).expand(batch, tokens)
    length, valid = count_pools(tokens, stride), seen.valid()
    if seen.start is None or seen.stop is None or valid is None:
        return Pools((place + stride - 1) // stride, length)
    slot = (place - seen.start + stride - 1) // stride
    documents, shortened, done = [], [], 0
    if batch == 1:
        documents = documents_of(seen)
        for one in documents:
            slot[:, one.begin : one.end] += done
            begin, done = done, done + count_pools(one.length, stride)
            shortened.append(Document(begin, done, one.global_tokens))
        length = max(1, done)
    slot = torch.where(valid, slot, length)
    return Pools(slot, length, tuple(documents), tuple(shortened))
