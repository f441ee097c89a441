"""The softmax of one round of several in one pass over its scores, on a GPU.

What `clustered` otherwise writes as some thirty operations, each a pass of its own: which keys a
token sees, the discount of those that rounds have in common, weights and log-sum-exp.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longspan.ops.operator import differentiable, operator

NEVER = -1e30  # the log-sum-exp of a round in which a token saw itself alone
_ELEMENTS = 4096  # of the scores, that one program takes
_MOST = 16_384  # keys


def serves(scores: Tensor) -> bool:
    return (
        scores.is_cuda
        and scores.dtype != torch.float64
        and scores.shape[-1] <= _MOST
        and find_spec("triton") is not None
    )


def _shapes(scores, *rest):
    return (
        scores.new_empty(scores.shape),
        scores.new_empty(scores.shape[:-1], dtype=torch.float32),
    )


@operator("round_softmax", fake=_shapes)
def round_softmax(
    scores: Tensor,
    marks: Tensor,
    marked: Tensor,
    places: Tensor,
    listed: Tensor,
    number: int,
    reach: int,
    self_last: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Weights, shaped and typed like the scores [batch, chunks, heads, size, keys], and their
    log-sum-exp [batch, chunks, heads, size] in float32. The rest is what `clustered` knows of
    tokens [batch, chunks, heads, size] and the keys beside them [batch, chunks, heads, keys]:
    their marks in all rounds [..., rounds], of which `number` is this one, and their places."""
    from longspan.ops import round_kernels  # on first use: the package can be imported without

    size, keys = scores.shape[-2:]
    scores, marks, marked, places, listed = (
        t.contiguous() for t in (scores, marks, marked, places, listed)
    )
    weights = torch.empty_like(scores)
    sums = scores.new_empty(scores.shape[:-1], dtype=torch.float32)
    if sums.numel() == 0:
        return weights, sums
    tile: Any = _tile(size, keys)
    grid = (sums.numel() // size * -(-size // tile["BM"]),)
    round_kernels.softmax[grid](
        *(scores, marks, marked, places, listed, weights, sums),
        *(scale, number, reach, size, keys),
        **(tile | {"ROUNDS": marks.shape[-1], "SELF_LAST": self_last}),
    )
    return weights, sums


@operator("round_softmax_backward", fake=lambda weights, *rest: weights.new_empty(weights.shape))
def _backward(
    weights: Tensor, sums: Tensor, grad: Tensor, grad_sums: Tensor, scale: float
) -> Tensor:
    from longspan.ops import round_kernels

    grad, grad_sums = grad.contiguous(), grad_sums.contiguous()
    found, rows, keys = torch.empty_like(weights), sums.numel(), weights.shape[-1]
    if rows == 0:
        return found
    tile: Any = _tile(rows, keys)
    round_kernels.softmax_backward[(-(-rows // tile["BM"]),)](
        weights, grad, sums, grad_sums, found, scale, rows, keys, **tile
    )
    return found


def _tile(rows: int, keys: int) -> dict[str, int]:
    """Powers of two; all keys of as many rows as fit."""
    wide = 1 << (keys - 1).bit_length()
    high = 1 << (rows - 1).bit_length()
    return {"BM": max(1, min(high, _ELEMENTS // wide)), "BN": wide}


def _save(ctx, inputs, output):
    ctx.scale = inputs[-1]
    ctx.save_for_backward(*output)


def _gradients(ctx, grad, grad_sums):
    found = _backward(*ctx.saved_tensors, grad, grad_sums, ctx.scale)
    return found, *[None] * 8


differentiable(round_softmax, _gradients, save=_save)
