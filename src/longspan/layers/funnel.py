"""Funnel-Transformer: attention whose output is shorter than its input."""

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from longspan.layers.document import Chosen, DocumentAttention
from longspan.layers.position import rotate
from longspan.ops.packed import as_rows, cut, in_batches, joined
from longspan.ops.shorten import Pools, shorten
from longspan.ops.window import Visibility


class FunnelAttention(DocumentAttention):
    """[batch, tokens, dim] -> [batch, pools, dim]: means of neighbouring tokens ask, and all tokens
    of the document answer; see `longspan.ops.shorten` for how tokens are put together. The layers
    after it read the shorter document, until a model repeats each pool for its tokens again. With
    stride 1 it is softmax attention over whole documents. Time is quadratic in what is still left
    of a document, memory is not. Global tokens change nothing.

    Args:
        stride: tokens in a pool.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        stride: int = 2,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias)
        if stride < 1:
            raise ValueError(f"stride={stride} must be at least 1 token")
        self.shortens = stride

    def forward(
        self,
        hidden: Tensor,
        *,
        seen: Visibility | None = None,
        positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        pools: Pools | None = None,
    ) -> Tensor:
        """`pools` are what `shorten` makes of the batch, where that is known already."""
        seen = Visibility() if seen is None else seen
        if self.shortens == 1:
            return super().forward(hidden, seen=seen, position_ids=position_ids)
        pools = shorten(hidden, seen, self.shortens) if pools is None else pools
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        tensors, valid = self._project(hidden, pools, position_ids), seen.valid()
        if not pools.documents:
            out = self._softmax(*tensors, valid)
        else:
            assert valid is not None
            out = self._unpacked_pools(*tensors, valid, pools)
        return out if valid is None else out.masked_fill(~pools.any(valid)[..., None], 0.0)

    def _unpacked_pools(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, pools: Pools
    ) -> Tensor:
        queries = cut(query, pools.shortened)
        keys, values, real = (cut(row, pools.documents) for row in (key, value, valid))

        def attend(numbers: list[int]) -> Tensor:
            return self._softmax(*(as_rows(t, numbers) for t in (queries, keys, values, real)))

        parts = in_batches([one.length for one in pools.shortened], attend)
        return joined(parts, pools.shortened, pools.length)

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        return self._softmax(*self.project(hidden, position_ids), valid)

    def _project(
        self, hidden: Tensor, pools: Pools, position_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, pools, heads, head_dim]; keys and values [batch, tokens, ...]."""
        dim, bias = hidden.shape[2], self.qkv.bias
        biases = (None, None) if bias is None else bias.split((dim, 2 * dim))
        query = linear(pools.mean(hidden), self.qkv.weight[:dim], biases[0])
        both = linear(hidden, self.qkv.weight[dim:], biases[1])
        query = query.unflatten(-1, (self.heads, -1))
        key, value = both.unflatten(-1, (2, self.heads, -1)).unbind(2)
        if self.rotary is not None:
            places = pools.earliest(position_ids)
            (query,) = rotate(query, position=places, base=self.rotary)
            (key,) = rotate(key, position=position_ids, base=self.rotary)
        return query, key, value

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
        """[batch, queries, dim] of queries that see every key but padding."""
        mask = None
        if valid is not None:
            # A row of padding alone is zero in the end, but must not be NaN on the way.
            mask = (valid | ~valid.any(dim=1, keepdim=True))[:, None, None]
        out = scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)),
            attn_mask=mask,
            dropout_p=self.dropout_p,
        )
        return out.transpose(1, 2).flatten(2)
