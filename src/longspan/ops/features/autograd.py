"""The kernels as torch operators: one forward and one backward op."""

import torch
from torch import Tensor

from longspan.ops.operator import differentiable, operator
from longspan.ops.window.api import refuse_triton

PLACES = 128  # the number of features is rounded up to this: no kernel takes more at a time


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """In float32 the products would be Triton's slow ones: there PyTorch's are faster."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and 16 <= query.shape[3] <= 128
        and refuse_triton(query.device, query.dtype, query.shape[3]) is None
    )


def feature_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    valid: Tensor | None,
    eps: float,
) -> Tensor:
    """`linear_attention` with kernel="softmax"."""
    return forward_op(query, key, value, projection.to(query.dtype), valid, eps)[0]


def shapes(query, key, value, projection, valid, eps):
    batch, n, heads, head_dim = query.shape
    pairs, features = batch * heads, projection.shape[0]
    places = -(-features // PLACES) * PLACES
    wide = {"dtype": torch.float32}
    return (
        query.new_empty(query.shape),
        query.new_empty((2, pairs, -(-n // 16) * 16), **wide),
        query.new_empty((pairs, features, head_dim)),
        query.new_empty((pairs, features + 2, head_dim), **wide),
        query.new_empty((pairs, places + 16), **wide),
    )


@operator("feature_attention", fake=shapes)
def forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    valid: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and for the backward pass log-sum-exp and trace of each query, the values of
    places, the same in float32 and their logarithms: see the kernels."""
    from longspan.ops.features import triton  # on first use: the package is imported without

    made = shapes(query, key, value, projection, valid, eps)
    if query.numel() > 0:
        triton.forward(query, key, value, projection, valid, eps, *made)
    return made


def _grad_shapes(grad, query, key, value, *rest):
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


@operator("feature_attention_backward", fake=_grad_shapes)
def backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    valid: Tensor | None,
    rows: Tensor,
    values: Tensor,
    wide: Tensor,
    logs: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from longspan.ops.features import triton

    made = dq, dk, dv = _grad_shapes(grad, query, key, value)
    if query.numel() > 0:
        saved = (rows, values, wide, logs)
        triton.backward(grad, query, key, value, projection, valid, eps, *saved, *made)
    return dq, dk, dv


def _save(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx, grad, *rest):
    if grad is None:
        return (None,) * 6
    found = backward_op(grad, *ctx.saved_tensors, ctx.eps)
    return *found, None, None, None


differentiable(forward_op, _gradients, save=_save)
