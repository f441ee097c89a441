"""`global_attention` and `global_rows`: check what was given, choose a backend, call it."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from longspan.ops.backends import Backend, choose
from longspan.ops.rows import autograd, early, plain
from longspan.ops.rows.call import Call
from longspan.ops.rows.positions import take_rows
from longspan.ops.window import api as window
from longspan.ops.window import chunks, dropout
from longspan.ops.window.pattern import Visibility, check_scale

# The widest hidden states of which the fused kernels can hold enough on chip: in general, and
# where float32 products must be exact, which takes three of them.
MOST_BYTES = 4096
MOST_EXACT = 256
# So many rows that all see the same tokens fill PyTorch's own matrix products; the fused kernels
# then win by their backward pass alone. Rows of packed documents they spare what is not their own.
MANY_ROWS = 64


def _refuse_triton(
    device: torch.device, dtype: torch.dtype, head_dim: int, dim: int, late: bool
) -> str | None:
    reason = window.refuse_triton(device, dtype, head_dim)
    if reason is not None:
        return reason
    if dim * dtype.itemsize > MOST_BYTES:
        return f"a hidden state of {dim} numbers in {dtype} is above {MOST_BYTES} bytes"
    if dtype == torch.float32 and dim > MOST_EXACT and device.type == "cuda" and _exact():
        return (
            f"exact float32 products of hidden states above {MOST_EXACT} numbers do not fit on "
            'chip; torch.backends.cuda.matmul.fp32_precision = "tf32" permits rounded ones'
        )
    return None if late else "it projects late, and for this call late=False"


def _exact() -> bool:
    return torch.backends.cuda.matmul.fp32_precision != "tf32"


_exact._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _refuse_early(
    device: torch.device, dtype: torch.dtype, head_dim: int, dim: int, late: bool
) -> str | None:
    if late:
        return "it projects early, and for this call late=True"
    return window.refuse_dtype(device, dtype, head_dim)


def _refuse_plain(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    return window.refuse_dtype(device, dtype, sizes[0])


# In the order in which `auto` tries them.
BACKENDS = (
    Backend("triton", "fused GPU kernels, forward and backward", _refuse_triton, home="cuda"),
    Backend("early", "the window's kernels, for many global tokens", _refuse_early, home="cuda"),
    Backend("plain", "PyTorch's own operations, any device", _refuse_plain),
    Backend("chunks", "PyTorch, rounded as transformers' Longformer rounds", _refuse_early),
)


def global_attention(
    query: Tensor,
    hidden: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    value_bias: Tensor | None = None,
    *,
    positions: Tensor,
    seen: Visibility | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    late: bool | None = None,
    backend: str = "auto",
    key_bias: Tensor | None = None,
) -> Tensor:
    """Attention of g global tokens to all tokens of their document, [batch, g, heads, head_dim].

    Args:
        query: [batch, g, heads, head_dim], projected and with its bias.
        hidden: [batch, tokens, dim], what keys and values are projected from.
        key_weight, value_weight: [heads * head_dim, dim], as in `nn.Linear`.
        value_bias: [heads * head_dim] or None.
        positions: [batch, g] position of each query in `hidden`, -1 = no query: a zero row.
        seen: padding and documents, from `visibility(...)`.
        causal: see no token behind the query's own position.
        dropout_p, scale: as in `window_attention`.
        late: apply the projections to the rows (True) or to the tokens (False); by default
            whichever is cheaper.
        backend: "auto", "triton" (projects late), "early" (projects early), "plain" or "chunks"
            (early, and rounds as transformers' Longformer does). A named one never falls back.
        key_bias: [heads * head_dim] or None. It shifts all scores of a row alike, which changes
            nothing but the last digits: only "chunks" adds it.

    Gradients can be taken once; `backend="plain"` allows higher derivatives.
    """
    biases = {"value_bias": value_bias, "key_bias": key_bias}
    _check(query, hidden, key_weight, value_weight, biases, positions)
    _, rows, heads, head_dim = query.shape
    scale, dropout_p = check_scale(scale, head_dim), window.check_dropout(dropout_p)
    seen = _described(hidden, seen)
    chosen, late = _choose(backend, late, hidden, positions, seen, rows * heads, head_dim)
    if chosen == "early":
        return early.attend(
            query, hidden, key_weight, value_weight, value_bias, positions=positions, seen=seen,
            causal=causal, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
    seed = dropout.new_seed(hidden.device) if dropout_p > 0 else None
    if chosen == "chunks":
        keys = chunks.project(hidden, key_weight, key_bias).unflatten(-1, (heads, head_dim))
        values = chunks.project(hidden, value_weight, value_bias).unflatten(-1, (heads, head_dim))
        return chunks.attend_rows(
            query, keys, values, positions, seen, causal=causal, scale=scale, dropout_p=dropout_p,
            seed=seed,
        )  # fmt: skip
    if chosen == "plain":
        return plain.attend(
            query, hidden, key_weight, value_weight, value_bias, positions=positions, seen=seen,
            causal=causal, dropout_p=dropout_p, seed=seed, scale=scale, late=late,
        )  # fmt: skip
    tensors = (query, hidden, torch.cat((key_weight, value_weight)), value_bias)
    return _fused(tensors, positions, seen, seed, heads, causal, scale, dropout_p)


def global_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    heads: int,
    positions: Tensor,
    seen: Visibility | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """`global_attention` with queries made of the hidden states, [batch, g, heads, head_dim]: what
    `window_attention` takes as `global_rows`.

    Args:
        hidden: [batch, tokens, dim].
        weight: [3 * heads * head_dim, dim], the projections of queries, keys and values.
        bias: [3 * heads * head_dim] or None.
        heads: how many there are.
        positions: [batch, g] of the global tokens, each at most once, -1 = none.
        seen, causal, dropout_p, backend: as in `global_attention`.
    """
    _check_positions(positions, hidden)
    _check_places(hidden, weight=weight, bias=bias)
    dim = hidden.shape[2]
    if heads < 1:
        raise ValueError(f"there must be at least 1 head, got heads={heads}")
    if weight.dim() != 2 or weight.shape[0] % (3 * heads) or weight.shape[1] != dim:
        raise ValueError(
            f"weight must be [3 * {heads} heads * head_dim, dim = {dim}], got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.shape[0]},), got {tuple(bias.shape)}")
    inner = weight.shape[0] // 3
    dropout_p = window.check_dropout(dropout_p)
    seen = _described(hidden, seen)
    rows, head_dim = positions.shape[1] * heads, inner // heads
    chosen, late = _choose(backend, None, hidden, positions, seen, rows, head_dim)
    if chosen != "triton":
        query_weight, key_weight, value_weight = weight.split(inner)
        query_bias, key_bias, value_bias = (None,) * 3 if bias is None else bias.split(inner)
        queried = take_rows(hidden, positions), query_weight, query_bias
        query = chunks.project(*queried, copied=True) if chosen == "chunks" else linear(*queried)
        return global_attention(
            query.unflatten(-1, (heads, -1)), hidden, key_weight, value_weight, value_bias,
            positions=positions, seen=seen, causal=causal, dropout_p=dropout_p, late=late,
            backend=chosen, key_bias=key_bias,
        )  # fmt: skip
    seed = dropout.new_seed(hidden.device) if dropout_p > 0 else None
    scale = 1.0 / math.sqrt(head_dim)
    tensors = (None, hidden, weight, bias)
    return _fused(tensors, positions, seen, seed, heads, causal, scale, dropout_p)


def _choose(
    backend: str,
    late: bool | None,
    hidden: Tensor,
    positions: Tensor,
    seen: Visibility,
    rows: int,
    head_dim: int,
) -> tuple[str, bool]:
    """The backend's name, and whether it projects late."""
    dim = hidden.shape[2]
    if late is None:
        late = backend == "triton" or (backend not in ("early", "chunks") and rows < dim)
    dtype = _autocast(hidden) or hidden.dtype
    bounded = seen.start is not None
    training = hidden.requires_grad and torch.is_grad_enabled()
    if backend == "auto" and rows > MANY_ROWS and not bounded and not training:
        backend = "plain"
    if backend == "auto" and not late and bounded:
        backend = "early"  # all rows over all tokens would cost documents times as much
    chosen = choose(backend, BACKENDS, hidden.device, dtype, head_dim, dim, late).name
    if hidden.numel() == 0 or positions.numel() == 0:
        chosen = "plain"  # there is nothing to launch a kernel for
    return chosen, late


def _described(hidden: Tensor, seen: Visibility | None) -> Visibility:
    """What is seen; documents and padding are all that matters here."""
    if seen is None:
        return Visibility()
    window.check_visibility(hidden, seen)
    return Visibility(seen.start, seen.stop, seen.holes)


def _autocast(tensor: Tensor) -> torch.dtype | None:
    """The dtype autocast asks for, or None where it is off."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _fused(tensors: tuple[Tensor | None, Tensor, Tensor, Tensor | None], *rest: Any) -> Tensor:
    """Query, hidden, weight and bias in one dtype, as torch's own linear takes them."""
    hidden = tensors[1]
    dtype = _autocast(hidden) or hidden.dtype
    query, hidden, weight, bias = (None if t is None else t.to(dtype) for t in tensors)
    assert hidden is not None
    assert weight is not None
    return autograd.attend(Call(query, hidden, weight, bias, *rest))


def _check(
    query: Tensor,
    hidden: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    biases: dict[str, Tensor | None],
    positions: Tensor,
) -> None:
    weights = {"key_weight": key_weight, "value_weight": value_weight}
    _check_places(hidden, query=query, **weights, **biases)
    if query.dim() != 4 or hidden.dim() != 3 or query.shape[0] != hidden.shape[0]:
        raise ValueError(
            "query must be [batch, g, heads, head_dim] and hidden [batch, tokens, dim], got "
            f"{tuple(query.shape)} and {tuple(hidden.shape)}"
        )
    if query.dtype != hidden.dtype and not _autocast(hidden):
        raise TypeError(
            f"query and hidden must share a dtype, got {query.dtype} and {hidden.dtype}"
        )
    wanted = (query.shape[2] * query.shape[3], hidden.shape[2])
    for name, weight in weights.items():
        if tuple(weight.shape) != wanted:
            raise ValueError(
                f"{name} must be [heads * head_dim, dim] = {wanted}, got {tuple(weight.shape)}"
            )
    for name, bias in biases.items():
        if bias is not None and tuple(bias.shape) != wanted[:1]:
            raise ValueError(
                f"{name} must be [heads * head_dim] = {wanted[:1]}, got {tuple(bias.shape)}"
            )
    _check_positions(positions, hidden, query.shape[1])


def _check_places(hidden: Tensor, **others: Tensor | None) -> None:
    """Raise unless all are tensors on one device."""
    for name, tensor in {"hidden": hidden, **others}.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}")


def _check_positions(positions: Tensor, hidden: Tensor, slots: int | None = None) -> None:
    _check_places(hidden, positions=positions)
    if hidden.dim() != 3:
        raise ValueError(f"hidden must be [batch, tokens, dim], got {tuple(hidden.shape)}")
    fits = positions.dim() == 2 and positions.shape[0] == hidden.shape[0]
    fits = fits and slots in (None, positions.shape[1])
    if not fits or positions.dtype not in (torch.int32, torch.int64):
        wanted = f"({hidden.shape[0]}, {'any' if slots is None else slots})"
        raise ValueError(
            f"positions must be integers [batch, g] = {wanted}, got {positions.dtype} "
            f"{tuple(positions.shape)}"
        )
