"""Poolingformer's second level: attention within a wide window to pools of neighbouring tokens.

Pool p stands for the tokens from p * stride on, `kernel` of them or as many as there are. A query
sees a pool if all of its places lie in the query's window. Time and memory n * window / stride.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.ops.listed import listed_attention
from longspan.ops.once import made_once

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
    real = _members(states, kernel, stride, valid)[:, :, None]
    if how == "max":
        hidden = states if valid is None else _blank(states, valid, -torch.inf)
        most = _neighbours(hidden, kernel, stride, -torch.inf).amax(-1)
        return most.masked_fill(~real.any(-1, keepdim=True), 0.0)
    taken = _neighbours(states if valid is None else _blank(states, valid, 0.0), kernel, stride)
    # Under autocast a GPU adds up, and takes a softmax, in float32: queries would not fit.
    if how == "mean":
        mean = taken.sum(-1) / real.sum(-1, keepdim=True).clamp(min=1).to(states.dtype)
        return mean.to(states.dtype)
    assert weight is not None
    share = taken[..., kernel // 2] @ weight.mT.to(states.dtype)  # [batch, pools, heads, kernel]
    if bias is not None:
        share = share + bias.to(states.dtype)
    share = share.masked_fill(~real, torch.finfo(share.dtype).min).softmax(-1)
    return (taken * share[..., None, :]).sum(-1).to(states.dtype)


def count_members(states: Tensor, kernel: int, stride: int, valid: Tensor | None) -> Tensor:
    """[batch, pools]: how many tokens each stands for."""
    return _members(states, kernel, stride, valid).sum(2).expand(states.shape[0], -1)


def _members(states: Tensor, kernel: int, stride: int, valid: Tensor | None) -> Tensor:
    """Bool [batch or 1, pools, kernel]: which tokens of each pool there are."""
    if valid is None:
        valid = torch.ones(1, states.shape[1], dtype=torch.bool, device=states.device)
    return _neighbours(valid, kernel, stride)


def _blank(states: Tensor, valid: Tensor, value: float) -> Tensor:
    return states.masked_fill(~valid[..., None, None], value)


def _neighbours(tensor: Tensor, kernel: int, stride: int, beyond: float = 0) -> Tensor:
    """[batch, tokens, ...] -> [batch, pools, ..., kernel], a view; `beyond` behind the last."""
    tokens = tensor.shape[1]
    more = (-(-tokens // stride) - 1) * stride + kernel - tokens
    wide = pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, more), value=beyond)
    return wide.unfold(1, kernel, stride)


def pooled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: tuple[int, int],
    kernel: int,
    stride: int,
    visible: Tensor | None = None,
    at: int = 0,
    dropout_p: float = 0.0,
) -> Tensor:
    """[batch, tokens, heads, head_dim]; a query that sees no pool gets zeros.

    Args:
        query: [batch, tokens, heads, head_dim].
        key, value: [batch, pools, heads, head_dim].
        window: (left, right), in tokens.
        kernel, stride: of the pools.
        visible: bool [batch, pools], False = stands for no token; None = all do.
        at: where the first query stands, in tokens from the beginning of the first pool on.
    """
    left, right = window
    begun = at % stride
    if begun:  # queries are filled up at the front to the beginning of a pool
        query = pad(query, (0, 0, 0, 0, begun, 0))
    size = stride  # enough where a text is written on
    if query.shape[1] > stride:
        size *= -(-_QUERIES // stride)
    about = (query.shape[1], key.shape[1], size, left, right, kernel, stride, at // stride)
    listed, first, last = _lists(query, *about)
    out = listed_attention(
        *(query, key, value, listed[None, None]),
        size=size,
        first=first,
        last=last,
        valid=visible,
        dropout_p=dropout_p,
    )
    return out[:, begun:]


@made_once
def _lists(
    device: torch.device,
    queries: int,
    pools: int,
    size: int,
    left: int,
    right: int,
    kernel: int,
    stride: int,
    passed: int,
) -> tuple[Tensor, ...]:
    """For blocks of `size` queries, with so many pools `passed` before the first: pools, and the
    first and the last query that sees each."""
    per_block, before = size // stride, -(-left // stride)
    count = before + per_block + right // stride + 1
    block = torch.arange(-(-queries // size), device=device, dtype=torch.int32)[:, None]
    listed = block * per_block + torch.arange(-before, count - before, device=device)
    begin = listed * stride  # counted as queries are
    listed = listed + passed
    listed = torch.where((listed >= 0) & (listed < pools), listed, -1)
    return listed, begin + kernel - 1 - right, begin + left
