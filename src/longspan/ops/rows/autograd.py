"""The fused backend as torch operators, one forward and one backward; as in `window.autograd`."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.ops.operator import differentiable, operator
from longspan.ops.rows.call import Call
from longspan.ops.window.pattern import Visibility


def _forward(call: Call) -> tuple[Tensor, ...]:
    from longspan.ops.rows import triton  # on first use: the package can be imported without

    out, saved = triton.forward(call)
    return out, *saved


def _backward(grad: Tensor, saved: tuple[Tensor, ...], call: Call) -> tuple[Tensor | None, ...]:
    from longspan.ops.rows import triton

    return triton.backward(grad, call, triton.Saved(*saved))


def _shapes(query, hidden, weight, bias, positions, start, stop, seed, heads, *rest):
    batch, slots = positions.shape
    head_dim = weight.shape[0] // (heads * (3 if query is None else 2))
    shape = (batch, slots, heads)
    wide = (*shape, hidden.shape[2])
    return (
        hidden.new_empty((*shape, head_dim)),
        hidden.new_empty((*shape, head_dim) if query is None else (0,)),
        hidden.new_empty(wide),
        hidden.new_empty(wide),
        hidden.new_empty(shape, dtype=torch.float32),
        hidden.new_empty(shape, dtype=torch.float32),
    )


@operator("global_rows", fake=_shapes)
def forward_op(
    query: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    seed: Tensor | None,
    heads: int,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The rows [batch, g, heads, head_dim], then the fields of `triton.Saved`."""
    seen = Visibility(start, stop)
    numbers = (heads, causal, scale, dropout_p)
    return _forward(Call(query, hidden, weight, bias, positions, seen, seed, *numbers))  # pyright: ignore[reportReturnType]


def _grad_shapes(grad, made, folded, pooled, lse, mass, query, hidden, weight, bias, *rest):
    return (
        hidden.new_empty(0) if query is None else query.new_empty(query.shape),
        hidden.new_empty(hidden.shape),
        weight.new_empty(weight.shape),
        hidden.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    )


@operator("global_rows_backward", fake=_grad_shapes)
def backward_op(
    grad: Tensor,
    made: Tensor,
    folded: Tensor,
    pooled: Tensor,
    lse: Tensor,
    mass: Tensor,
    query: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    seed: Tensor | None,
    heads: int,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, hidden, weight and bias; empty for what was not given."""
    seen = Visibility(start, stop)
    numbers = (heads, causal, scale, dropout_p)
    call = Call(query, hidden, weight, bias, positions, seen, seed, *numbers)
    dquery, dhidden, dweight, dbias = _backward(grad, (made, folded, pooled, lse, mass), call)
    assert dhidden is not None
    assert dweight is not None
    return (
        hidden.new_empty(0) if dquery is None else dquery,
        dhidden,
        dweight,
        hidden.new_empty(0) if dbias is None else dbias,
    )


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[8:]
    ctx.save_for_backward(*output[1:], *inputs[:8])


def _gradients(ctx, grad, *_unused):
    if grad is None:
        return (None,) * 12
    saved = ctx.saved_tensors  # once only: gradient checkpointing allows no more
    dquery, dhidden, dweight, dbias = backward_op(grad, *saved, *ctx.numbers)
    query, _, _, bias = saved[5:9]
    dquery = None if query is None else dquery
    dbias = None if bias is None else dbias
    return dquery, dhidden, dweight, dbias, *(None,) * 8


differentiable(forward_op, _gradients, save=_save)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher's checks, which cost more than the kernels."""

    @staticmethod
    def forward(ctx, query, hidden, weight, bias, positions, seen, seed, *numbers):
        call = Call(query, hidden, weight, bias, positions, seen, seed, *numbers)
        out, *saved = _forward(call)
        ctx.save_for_backward(*saved, query, hidden, weight, bias, positions, seed, *seen)
        ctx.numbers = numbers
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        made, folded, pooled, lse, mass, *given = ctx.saved_tensors
        saved = (made, folded, pooled, lse, mass)
        query, hidden, weight, bias, positions, seed, *seen = given
        about = (positions, Visibility(*seen), seed, *ctx.numbers)
        grads = _backward(grad, saved, Call(query, hidden, weight, bias, *about))
        return *grads, *(None,) * 7


def attend(call: Call) -> Tensor:
    """Rows of global tokens by the fused backend. Differentiable once."""
    hidden = call.hidden
    if (
        type(hidden) is Tensor
        and hidden.device.type != "meta"
        and not torch.compiler.is_compiling()
    ):
        return _Eager.apply(*call)  # pyright: ignore[reportReturnType]
    query, hidden, weight, bias, positions, seen, seed, *numbers = call
    tensors = (query, hidden, weight, bias, positions, seen.start, seen.stop, seed)
    return forward_op(*tensors, *numbers)[0]
