"""The `native` backend: C++ kernels for the CPU, loaded with ctypes.

`build.py` compiles them when the package is built or on request; where that was not possible,
`unavailable` says why. The kernels themselves are in `attention.cpp`.
"""

import ctypes
import os
from ctypes import c_double, c_int64, c_void_p
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from longspan.ops.window import dropout
from longspan.ops.window.blocked import put_rows
from longspan.ops.window.native import build
from longspan.ops.window.pattern import Pattern, Visibility

__all__ = [
    "DTYPES",
    "backward",
    "forward",
    "lse_row",
    "put_rows",
    "target",
    "targets",
    "unavailable",
]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_AGAIN = "run `python -m longspan.ops.window.native.build`"
_SLICE = 1 << 13  # tokens x heads that the backward pass takes at a time in half precision
_LONGEST = 1 << 31  # positions are 32-bit numbers in the kernels


class _Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("token", c_int64), ("head", c_int64)]


class _Call(ctypes.Structure):
    """`Call` of call.h, field by field."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "tokens", "heads", "group", "head_dim")),
        *((name, c_int64) for name in ("left", "right", "causal", "global_rows")),
        *((name, c_int64) for name in ("dtype", "threads", "drop", "seed")),
        *((name, c_double) for name in ("boost", "scale")),
        ("dilation", ctypes.POINTER(c_int64)),
        *((name, c_void_p) for name in Visibility._fields),
        *((name, _Tensor) for name in ("query", "key", "value", "out", "grad", "grad_query")),
        *((name, _Tensor) for name in ("grad_key", "grad_value")),
        *((name, c_void_p) for name in ("lse", "delta")),
    ]


@lru_cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none."""
    if not build.LIBRARY.exists():
        if build.FAILURE.exists():
            reason = build.FAILURE.read_text().strip()
            return None, f"it could not be built: {reason}; when that is mended, {_AGAIN}"
        return None, f"it was not built; {_AGAIN}"
    try:
        library = ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        return None, f"its library cannot be loaded ({error}); {_AGAIN}"
    library.longspan_source.restype = ctypes.c_char_p
    library.longspan_target.restype = ctypes.c_char_p
    library.longspan_target.argtypes = [c_int64]
    library.longspan_attention.argtypes = [ctypes.POINTER(_Call), c_int64, c_int64]
    if library.longspan_source().decode() != build.source_hash():
        return None, f"its library was built from other sources; {_AGAIN}"
    return library, None


def unavailable() -> str | None:
    """Why the kernels cannot run here, or None if they can."""
    return _load()[1]


@lru_cache
def targets() -> tuple[str, ...]:
    """The instruction sets it was compiled for that this CPU has, best first."""
    library, _ = _load()
    names: list[str] = []
    while library is not None and (name := library.longspan_target(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def target() -> str:
    """Which of them to use: the best, or the one that LONGSPAN_NATIVE_TARGET names."""
    wanted = os.environ.get("LONGSPAN_NATIVE_TARGET") or targets()[0]
    if wanted not in targets():
        raise ValueError(
            f"LONGSPAN_NATIVE_TARGET={wanted!r} cannot run here; choose from {', '.join(targets())}"
        )
    return wanted


def lse_row(n: int) -> int:
    """Length of a row of log-sum-exps."""
    return n


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exps to base 2, [batch, heads, tokens]; +inf for blank rows."""
    query, key, value = (_rows_dense(t) for t in (query, key, value))
    batch, tokens, heads, _ = query.shape
    out = query.new_empty(query.shape)
    lse = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    tensors = {"query": query, "key": key, "value": value, "out": out}
    _run(tensors, {"lse": lse}, seen, pattern, seed, backward=False)
    return out, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
    stacked: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, or of the one tensor [batch, tokens, 3, heads, head_dim]
    that they are taken from."""
    grad, query, key, value, out = (_rows_dense(t) for t in (grad, query, key, value, out))
    batch, tokens, heads, head_dim = query.shape
    if stacked:
        whole = query.new_empty((batch, tokens, 3, heads, head_dim))
        grads = whole.unbind(2)
    else:
        whole, grads = None, tuple(t.new_empty(t.shape) for t in (query, key, value))
    given = {"query": query, "key": key, "value": value, "out": out, "grad": grad}
    given |= {"grad_query": grads[0], "grad_key": grads[1], "grad_value": grads[2]}
    group = heads // key.shape[2]
    if query.dtype == torch.float32 and group == 1:
        grads[1].zero_()
        grads[2].zero_()
        numbers = {"lse": lse, "delta": torch.empty_like(lse)}
        _run(given, numbers, seen, pattern, seed, backward=True)
    else:
        # Keys collect their gradients in float32, for each query head; so a few heads at a time, in
        # the same memory: what is freed and taken again between others does not stay in one piece.
        slices = _slices(key.shape[2], tokens * group)
        size = tokens * group * max(last - first for first, last in slices) * head_dim
        sums = query.new_empty((2, size), dtype=torch.float32)
        for row in range(batch):
            for first, last in slices:
                _backward_slice(row, first, last, given, sums, lse, seen, pattern, seed)
    return grads if whole is None else (whole,)


def _slices(key_heads: int, numbers: int) -> list[tuple[int, int]]:
    """Runs of key heads: few, to save memory, but enough to occupy a machine. Not by the number
    of threads, on which no bit of a result may depend."""
    count = min(key_heads, -(-key_heads * numbers // _SLICE))
    cuts = [key_heads * i // count for i in range(count + 1)]
    return list(pairwise(cuts))


def _backward_slice(
    row: int,
    first: int,
    last: int,
    given: dict[str, Tensor],
    sums: Tensor,
    lse: Tensor,
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
) -> None:
    heads, key_heads = given["query"].shape[2], given["key"].shape[2]
    group = heads // key_heads
    begin, end = first * group, last * group

    def part(name: str) -> Tensor:
        few = slice(first, last) if name in ("key", "value") else slice(begin, end)
        return given[name][row : row + 1, :, few]

    names = ("query", "key", "value", "out", "grad", "grad_query")
    tensors = {name: part(name) for name in names}
    shape = tensors["query"].shape
    grad_key, grad_value = sums[:, : shape.numel()].zero_().unflatten(1, shape)
    share = {"grad_key": grad_key, "grad_value": grad_value}
    numbers = {"lse": lse[row : row + 1, begin:end]}
    numbers["delta"] = torch.empty_like(numbers["lse"])
    # Dropout numbers its streams through all heads of the batch.
    seed = None if seed is None else seed + row * heads + begin
    alone = Visibility(*(None if field is None else field[row : row + 1] for field in seen))
    few = pattern._replace(dilation=pattern.dilation[begin:end])
    _run({**tensors, **share}, numbers, alone, few, seed, backward=True)
    for name, numbers_of in share.items():
        if group > 1:
            numbers_of = numbers_of.unflatten(2, (-1, group)).sum(3)
        given[name][row, :, first:last] = numbers_of[0]


def _run(
    tensors: dict[str, Tensor],
    numbers: dict[str, Tensor],
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
    *,
    backward: bool,
) -> None:
    query, key = tensors["query"], tensors["key"]
    batch, tokens, heads, head_dim = query.shape
    if tokens >= _LONGEST:
        raise ValueError(f"native serves fewer than {_LONGEST} tokens, got {tokens}; use blocked")
    library, reason = _load()
    if library is None:
        raise ValueError(f"native is not available: {reason}")
    call = _Call(
        batch=batch,
        tokens=tokens,
        heads=heads,
        group=heads // key.shape[2],
        head_dim=head_dim,
        # A window beyond the ends of the row is no wider than the row.
        left=min(pattern.left, tokens),
        right=min(pattern.right, tokens),
        causal=pattern.causal,
        global_rows=pattern.global_rows,
        dtype=DTYPES[query.dtype],
        threads=torch.get_num_threads(),
        drop=dropout.threshold(pattern.dropout_p) if seed is not None else 0,
        seed=int(seed) if seed is not None else 0,
        boost=1.0 / (1.0 - pattern.dropout_p),
        scale=pattern.scale,
        dilation=(c_int64 * heads)(*(min(step, tokens) for step in pattern.dilation)),
    )
    fields = {name: None if t is None else t.contiguous() for name, t in seen._asdict().items()}
    for name, tensor in {**fields, **numbers}.items():
        setattr(call, name, None if tensor is None else tensor.data_ptr())
    for name, tensor in tensors.items():
        setattr(call, name, _Tensor(tensor.data_ptr(), *tensor.stride()[:3]))
    if library.longspan_attention(ctypes.byref(call), targets().index(target()), backward):
        raise MemoryError("native attention found no memory for its tiles")


def _rows_dense(tensor: Tensor) -> Tensor:
    """Kernels take any strides but want head_dim contiguous."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
