"""Poolingformer's second level: attention within a wide window to pools of neighbouring tokens.

Pool p stands for the tokens from p * stride on, `kernel` of them or as many as there are. A query
sees a pool if all of its places lie in the query's window. Time and memory n * window / stride.
"""

import torch
from torch import Tensor

from longspan.ops.listed import listed_attention

POOLS = ("mean", "max", "convolution")
_QUERIES = 128  # in a block, about


def pool_neighbours(
    states: Tensor,
    kernel: int,
    stride: int,
    how: str = "mean",
    *,
    valid: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """[batch, tokens, heads, head_dim] -> [batch, ceil(tokens / stride), heads, head_dim].

    Args:
        how: "mean"; "max"; or "convolution" with weights of its own for each pool, a softmax over
            its tokens of `weight` [kernel, head_dim] and `bias` [kernel] applied to the middle one.
        valid: bool [batch, tokens], False = padding, which is in no pool; empty ones are zero.
    """
    place, real = _members(states, kernel, stride, valid)
    taken = states[:, place]  # [batch, pools, kernel, heads, head_dim]
    real = real[..., None, None]
    if how == "max":
        most = taken.masked_fill(~real, -torch.inf).amax(2)
        return most.masked_fill(~real.any(2), 0.0)
    taken = taken.masked_fill(~real, 0.0)
    # Under autocast a GPU adds up, and takes a softmax, in float32: queries would not fit.
    if how == "mean":
        mean = taken.sum(2) / real.sum(2).clamp(min=1).to(states.dtype)
        return mean.to(states.dtype)
    assert weight is not None
    middle = taken[:, :, kernel // 2] @ weight.mT.to(states.dtype)
    if bias is not None:
        middle = middle + bias.to(states.dtype)
    share = middle.transpose(2, 3)[..., None]  # [batch, pools, kernel, heads, 1]
    share = share.masked_fill(~real, torch.finfo(share.dtype).min).softmax(2)
    return (taken * share).sum(2).to(states.dtype)


def count_members(states: Tensor, kernel: int, stride: int, valid: Tensor | None) -> Tensor:
    """[batch, pools]: how many tokens each stands for."""
    return _members(states, kernel, stride, valid)[1].sum(2).expand(states.shape[0], -1)


def _members(
    states: Tensor, kernel: int, stride: int, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Places [pools, kernel] of the tokens of each pool, and which of them are there, [batch or 1,
    pools, kernel]."""
    tokens = states.shape[1]
    first = torch.arange(0, tokens, stride, device=states.device)
    place = first[:, None] + torch.arange(kernel, device=states.device)
    real = (place < tokens)[None]
    place = place.clamp(max=tokens - 1)
    return place, real if valid is None else real & valid[:, place]


def pooled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: tuple[int, int],
    kernel: int,
    stride: int,
    visible: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """[batch, tokens, heads, head_dim]; a query that sees no pool gets zeros.

    Args:
        query: [batch, tokens, heads, head_dim].
        key, value: [batch, pools, heads, head_dim].
        window: (left, right), in tokens.
        kernel, stride: of the pools.
        visible: bool [batch, pools], False = stands for no token; None = all do.
    """
    left, right = window
    size = stride * -(-_QUERIES // stride)
    blocks, per_block = -(-query.shape[1] // size), size // stride
    before = -(-left // stride)
    count = before + per_block + right // stride + 1
    first = torch.arange(blocks, device=query.device)[:, None] * per_block - before
    listed = first + torch.arange(count, device=query.device)
    listed = torch.where((listed >= 0) & (listed < key.shape[1]), listed, -1)[None, None]
    begin = listed[0, 0] * stride
    return listed_attention(
        *(query, key, value, listed),
        size=size,
        first=begin + kernel - 1 - right,
        last=begin + left,
        valid=visible,
        dropout_p=dropout_p,
    )
