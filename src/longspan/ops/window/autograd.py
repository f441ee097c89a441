"""The fused backends as torch operators: one forward and one backward op, backend by name.

Registered with `torch.library`, they are opaque to `torch.compile` (no graph break, nothing
data-dependent is traced), carry shapes for fake tensors and know their own gradient.

Where keys and values are None, the queries are all three, stacked, and so is their gradient: what
comes from one projection goes back to it without being copied together.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.ops.operator import differentiable, operator
from longspan.ops.window.pattern import Pattern, Visibility


def _implementation(backend: str) -> Any:
    # Imported on first use: Triton must not be needed to import the package.
    if backend == "triton":
        from longspan.ops.window import triton as module
    elif backend == "native":
        from longspan.ops.window import native as module
    else:
        from longspan.ops.window import blocked as module
    return module


def _apart(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Any, ...]:
    return query.unbind(2) if key is None else (query, key, value)


def _forward(query, key, value, seen, pattern, seed, rows, at, backend) -> tuple[Tensor, Tensor]:
    module = _implementation(backend)
    out, lse = module.forward(*_apart(query, key, value), seen, pattern, seed)
    if rows is not None:
        module.put_rows(out, rows, at)
    return out, lse


def _grad_rows(grad: Tensor, at: Tensor | None) -> Tensor | None:
    """The gradient of rows that were put into the output. That of the output needs no change:
    the backends take no notice of it there."""
    if at is None:
        return None
    where = at.clamp(min=0).long()[..., None, None].expand(-1, -1, *grad.shape[2:])
    return grad.gather(1, where).masked_fill((at < 0)[..., None, None], 0.0)


def _shapes(query, key, value, *rest):
    shape = query.shape if key is not None else (*query.shape[:2], *query.shape[3:])
    batch, tokens, heads, _ = shape
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    row = _implementation(rest[-1]).lse_row(tokens)
    return query.new_empty(shape), query.new_empty((batch, heads, row), dtype=kind)


@operator("window_attention", fake=_shapes)
def forward_op(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    holes: Tensor | None,
    rank: Tensor | None,
    places: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    at: Tensor | None,
    left: int,
    right: int,
    dilation: list[int],
    scale: float,
    dropout_p: float,
    global_rows: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output [batch, tokens, heads, dim], and the log-sum-exp of each row's scores, from which
    the backward pass recomputes: [batch, heads, tokens or more], the backend's own business."""
    pattern = Pattern(left, right, tuple(dilation), scale, dropout_p, global_rows)
    seen = Visibility(start, stop, holes, rank, places)
    return _forward(query, key, value, seen, pattern, seed, rows, at, backend)


def _grad_shapes(grad, query, key, value, *rest):
    first = query.new_empty(query.shape)
    if key is None:
        return first, query.new_empty(0), query.new_empty(0)
    return first, key.new_empty(key.shape), value.new_empty(value.shape)


@operator("window_attention_backward", fake=_grad_shapes)
def backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    out: Tensor,
    lse: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    holes: Tensor | None,
    rank: Tensor | None,
    places: Tensor | None,
    seed: Tensor | None,
    left: int,
    right: int,
    dilation: list[int],
    scale: float,
    dropout_p: float,
    global_rows: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values; the latter two are empty if the first are all three."""
    pattern = Pattern(left, right, tuple(dilation), scale, dropout_p, global_rows)
    seen = Visibility(start, stop, holes, rank, places)
    tensors = _apart(query, key, value)
    backward = _implementation(backend).backward
    grads = backward(grad, *tensors, out, lse, seen, pattern, seed, stacked=key is None)
    return grads if key is not None else (grads[0], query.new_empty(0), query.new_empty(0))


def _save(ctx, inputs, output):
    query, key, value, *masks_and_seed = inputs[:9]
    _, at, *ctx.numbers = inputs[9:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(at, query, key, value, *output, *masks_and_seed)


def _backward(ctx, grad, _grad_lse):
    if grad is None:
        return (None,) * 18
    at, *saved = ctx.saved_tensors
    grads = backward_op(grad, *saved, *ctx.numbers)
    if saved[1] is None:
        grads = (grads[0], None, None)
    return (*grads, *(None,) * 6, _grad_rows(grad, at), *(None,) * 8)


differentiable(forward_op, _backward, save=_save)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher's checks, which cost more than a short sequence."""

    @staticmethod
    def forward(ctx, query, key, value, seen, pattern, seed, rows, at, backend):
        out, lse = _forward(query, key, value, seen, pattern, seed, rows, at, backend)
        ctx.save_for_backward(query, key, value, out, lse, seed, at, *seen)
        ctx.rest = pattern, backend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse, seed, at, *seen = ctx.saved_tensors
        pattern, backend = ctx.rest
        about = (Visibility(*seen), pattern, seed)
        tensors, stacked = _apart(query, key, value), key is None
        backward = _implementation(backend).backward
        grads = backward(grad, *tensors, out, lse, *about, stacked=stacked)
        grads = (*grads, None, None) if stacked else grads
        return (*grads, None, None, None, _grad_rows(grad, at), None, None)


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
    rows: Tensor | None,
    at: Tensor | None,
    backend: str,
) -> Tensor:
    """Window attention by a fused backend, with `rows` put in `at` their places. Differentiable
    once."""
    if type(query) is Tensor and query.device.type != "meta" and not torch.compiler.is_compiling():
        return _Eager.apply(query, key, value, seen, pattern, seed, rows, at, backend)
    out, _ = forward_op(
        query,
        key,
        value,
        *seen,
        seed,
        rows,
        at,
        pattern.left,
        pattern.right,
        list(pattern.dilation),
        pattern.scale,
        pattern.dropout_p,
        pattern.global_rows,
        backend,
    )
    return out
