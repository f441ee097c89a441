"""`window_attention`: check what was given, choose a backend, call it."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from longspan.ops.backends import Backend, choose
from longspan.ops.window import autograd, blocked, chunks, dropout, reference
from longspan.ops.window.pattern import (
    Pattern,
    Visibility,
    check_dilation,
    check_masks,
    check_scale,
    check_window,
    describe,
)

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refuse_dtype(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return None if dtype in _FLOATS else f"it computes in floating point, not {dtype}"


def _triton_unavailable(device: torch.device) -> str | None:
    try:
        from longspan.ops.window import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); `pip install triton` on Linux"
    return triton.unavailable(device)


def _native_unavailable() -> str | None:
    from longspan.ops.window import native

    return native.unavailable()


# What the machine can do does not change while a graph is traced, and asking is not traceable.
# This is all that `torch.compiler.assume_constant_result` does, after importing the compiler.
for _ask in (_triton_unavailable, _native_unavailable):
    _ask._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def refuse_triton(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    reason = _triton_unavailable(device)
    if reason is not None:
        return reason
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernels compute in float16, bfloat16 or float32, not {dtype}"
    if head_dim > 256:
        return f"head_dim {head_dim} is above 256, the most that fits on chip"
    return None


def refuse_native(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type != "cpu":
        return f"the tensors are on {device}, not on the CPU"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernels compute in float16, bfloat16 or float32, not {dtype}"
    return _native_unavailable()


# In the order in which `auto` tries them.
BACKENDS = (
    Backend("triton", "fused GPU kernels, forward and backward", refuse_triton, home="cuda"),
    Backend("native", "C++ kernels for the CPU, forward and backward", refuse_native, home="cpu"),
    Backend("blocked", "PyTorch on blocks, linear memory, any device", refuse_dtype),
    Backend("chunks", "PyTorch, rounded as transformers' Longformer rounds", refuse_dtype),
    Backend("reference", "dense attention under a mask, n x n memory: the oracle", refuse_dtype),
)


def window_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    window: int | tuple[int, int],
    dilation: int | Sequence[int] = 1,
    attention_mask: Tensor | None = None,
    global_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    visibility: Visibility | None = None,
    global_rows: bool | tuple[Tensor, Tensor] = True,
) -> Tensor:
    """Softmax attention within a window, [batch, tokens, heads, head_dim] in and out.

    Query i sees key j if both are tokens of the same document and j lies in the window of i, or
    i is global, or j is global. Rows that see nothing are exactly zero. With `right = 0` nothing
    sees the future, global tokens included.

    Args:
        query: [batch, tokens, heads, head_dim].
        key, value: the same, or with fewer heads that divide the query's (grouped heads). Without
            them `query` is all three, [batch, tokens, 3, heads, head_dim], as one projection gives
            them: their gradient is then one tensor too, and a training step copies less.
        window: `(left, right)` steps, or an even int for half on each side. A query always sees
            itself, so 512 means 513 keys. 0 is (0, 0), hence causal.
        dilation: tokens per step, one for all heads or one per head; 1 = none.
        attention_mask: [batch, tokens], nonzero = token, 0 = padding.
        global_mask: [batch, tokens], nonzero = global: sees every token, is seen by every token.
        cu_seqlens: [documents + 1], boundaries of the documents packed in the single row,
            from 0 to tokens. On a GPU and under `torch.compile` the values are not looked at
            (that would stall the one and break the other): tokens outside the boundaries are
            treated as padding.
        dropout_p: probability of dropping an attention weight. The seed comes from torch's
            generator; all backends drop the same entries for the same seed.
        scale: factor on the scores, 1/sqrt(head_dim) by default.
        backend: "auto", "triton", "native", "blocked", "chunks" (rounds as transformers' Longformer
            does; slow, no dilation) or "reference". A named one never falls back.
        visibility: what `longspan.visibility(...)` made of the three masks, to be reused over
            the layers of a model; then the masks themselves are not given.
        global_rows: for layers that compute the rows of global tokens from projections of their
            own: `(rows, positions)`, [batch, g, heads, head_dim] and [batch, g] with -1 for an
            empty slot, takes those instead; False leaves the rows zero.

    Gradients can be taken once; `backend="chunks"` and `"reference"` allow higher derivatives.
    """
    stacked = _check_stacked(query) if key is None and value is None else None
    if stacked is not None:
        query, key, value = stacked.unbind(2)
    query, key, value = _check_tensors(query, key, value)
    pattern = Pattern(
        *check_window(window),
        dilation=check_dilation(dilation, query.shape[2]),
        scale=check_scale(scale, query.shape[3]),
        dropout_p=check_dropout(dropout_p),
        global_rows=global_rows is True,
    )
    rows, at = _check_rows(query, global_rows)
    masks = {
        "attention_mask": attention_mask,
        "global_mask": global_mask,
        "cu_seqlens": cu_seqlens,
    }
    check_masks(query, **masks)
    if visibility is not None:
        if any(mask is not None for mask in masks.values()):
            raise ValueError("give either the masks or the visibility made from them, not both")
        check_visibility(query, visibility)
    chosen = choose(backend, BACKENDS, query.device, query.dtype, query.shape[3]).name
    seed = dropout.new_seed(query.device) if pattern.dropout_p > 0 else None
    if (
        (backend, chosen, query.dtype) == ("auto", "native", torch.float32)
        and not torch.compiler.is_compiling()  # a graph for any length must not ask for it
        and blocked.uncut(query, key, pattern, seed)
    ):
        chosen = "blocked"  # as fast, and with the bits of dense models
    if query.numel() == 0:
        # Nothing to attend to; keep the graph connected.
        return query + (key.sum() + value.sum()).to(query.dtype)
    if chosen == "reference":
        out = _reference(query, key, value, pattern, seed, visibility, masks)
        return out if rows is None or at is None else reference.put_rows(out, rows, at)
    if visibility is None:
        visibility = describe(query, **masks)
    if chosen == "chunks":
        reason = chunks.refusal(pattern, key.shape[2])
        if reason is not None:
            raise ValueError(f"backend='chunks' cannot serve this call: {reason}")
        slots = None if at is None else at.shape[1]
        out = chunks.attend(query, key, value, visibility, pattern, seed, slots)
        return out if rows is None or at is None else reference.put_rows(out, rows, at)
    tensors = (query, key, value) if stacked is None else (stacked, None, None)
    return autograd.attend(*tensors, visibility, pattern, seed, rows, at, chosen)


def _reference(query, key, value, pattern, seed, seen, masks) -> Tensor:
    if seen is None:
        together = reference.together_from_masks(
            query, masks["attention_mask"], masks["cu_seqlens"]
        )
        chosen = None if masks["global_mask"] is None else masks["global_mask"].bool()
    else:
        together = reference.together_from_visibility(seen)
        chosen = seen.is_global()
    mask = reference.visible(query, pattern, together, chosen)
    return reference.attend(query, key, value, mask, pattern, seed)


def _check_stacked(stacked: Tensor) -> Tensor:
    """The tensor, in autocast's dtype where that is on."""
    if not isinstance(stacked, Tensor) or stacked.dim() != 5 or stacked.shape[2] != 3:
        raise ValueError(
            "without key and value, query must be all three, [batch, tokens, 3, heads, head_dim], "
            f"got {tuple(getattr(stacked, 'shape', ()))}"
        )
    kind = stacked.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return stacked
    return stacked.to(torch.get_autocast_dtype(kind))


def _check_tensors(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors, in autocast's dtype where that is on, as torch's own attention does it."""
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must be [batch, tokens, heads, head_dim], got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in _FLOATS:
            raise TypeError(
                f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}"
            )
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "query, key and value must share a dtype, got "
            f"{query.dtype}, {key.dtype}, {value.dtype}"
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            "query, key and value must be on one device, got "
            f"{query.device}, {key.device}, {value.device}"
        )
    if key.shape != value.shape:
        raise ValueError(
            f"key and value must have one shape, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            "query and key must agree in batch, tokens and head_dim, got "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    heads, key_heads = query.shape[2], key.shape[2]
    if heads < 1 or key_heads < 1:
        raise ValueError(f"there must be at least 1 head, got {heads} and {key_heads} for keys")
    if heads % key_heads:
        raise ValueError(f"{key_heads} key heads do not divide {heads} query heads")
    return query, key, value


def _check_rows(
    query: Tensor, given: bool | tuple[Tensor, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """The rows of global tokens and their positions, if they were given."""
    if isinstance(given, bool):
        return None, None
    if not isinstance(given, tuple) or [isinstance(t, Tensor) for t in given] != [True, True]:
        raise TypeError(
            f"global_rows must be True, False or two tensors (rows, positions), got {given!r}"
        )
    rows, at = given
    batch, tokens, heads, head_dim = query.shape
    if not query.device == rows.device == at.device:
        raise ValueError(
            f"global rows and their positions are on {rows.device} and {at.device}, the tensors "
            f"are on {query.device}"
        )
    if at.dim() != 2 or at.shape[0] != batch or at.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"positions of global rows must be integers [batch = {batch}, g], got {at.dtype} "
            f"{tuple(at.shape)}"
        )
    wanted = (batch, at.shape[1], heads, head_dim)
    if tuple(rows.shape) != wanted:
        raise ValueError(f"global rows must be {wanted}, got {tuple(rows.shape)}")
    if at.is_cpu and at.numel() and not torch.compiler.is_compiling() and at.max() >= tokens:
        raise ValueError(
            f"positions of global rows must be below tokens = {tokens}, got {int(at.max())}"
        )
    return rows.to(query.dtype), at


def check_dropout(dropout_p: float) -> float:
    if not isinstance(dropout_p, Real) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}")
    return float(dropout_p)


def check_visibility(like: Tensor, seen: Visibility) -> None:
    """A description of another batch would send a kernel beyond the end of its rows."""
    if not isinstance(seen, Visibility):
        raise TypeError(f"visibility must come from visibility(...), got {type(seen).__name__}")
    batch, tokens = like.shape[:2]
    for name, tensor, length in (("start", seen.start, tokens), ("rank", seen.rank, tokens + 1)):
        if tensor is None:
            continue
        if tensor.shape != (batch, length):
            raise ValueError(
                f"visibility describes a batch of {tensor.shape[0]} x "
                f"{tensor.shape[1] - length + tokens} tokens, the tensors are {batch} x {tokens}"
            )
        if tensor.device != like.device:
            raise ValueError(
                f"visibility.{name} is on {tensor.device}, the tensors are on {like.device}"
            )
