"""Launching the fused kernels of listed attention, and their torch operators.

Many blocks may list one key: what they add to its gradient is added up in float32 and in any order,
so the last bits of the gradients of keys and values differ from run to run. Nothing is read back.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.operator import differentiable, operator
from longspan.ops.window import dropout
from longspan.ops.window.api import refuse_triton

LOG2E = math.log2(math.e)


def serves(query: Tensor) -> bool:
    return query.is_cuda and refuse_triton(query.device, query.dtype, query.shape[3]) is None


class Asked(NamedTuple):
    """What a call asks for besides queries, keys and values; see `listed_attention`."""

    listed: Tensor
    first: Tensor | None
    last: Tensor | None
    valid: Tensor | None
    spans: Tensor | None
    seed: Tensor | None
    size: int
    width: int
    ramp: int
    at: int | None
    scale: float
    dropout_p: float


class _Tile(NamedTuple):
    """Queries and slots in one tile of products, warps, pipeline depth, and a limit on registers
    where the compiler's own choice leaves too few programs on a processor."""

    queries: int
    slots: int
    warps: int
    stages: int
    registers: int | None = None

    def launch(self) -> dict[str, Any]:
        options = {"BM": self.queries, "BN": self.slots}
        options |= {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


@lru_cache(maxsize=1024)
def _tile(
    kernel: str, size: int, runs: bool, head_dim: int, dtype: torch.dtype, device: torch.device
) -> _Tile:
    """What is best, made smaller until it fits the GPU's shared memory."""
    from longspan.ops.window.triton import shared_memory

    tile = _best_tile(kernel, size, runs, head_dim, dtype)
    row = max(16, 1 << (head_dim - 1).bit_length()) * dtype.itemsize
    limit = shared_memory(device)
    while _shared(kernel, tile, row, dtype) > limit:
        if tile.stages > 1:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.slots > 16:
            tile = tile._replace(slots=tile.slots // 2)
        elif tile.queries > 16:
            tile = tile._replace(queries=tile.queries // 2)
        else:
            break
    return tile


def _best_tile(kernel: str, size: int, runs: bool, head_dim: int, dtype: torch.dtype) -> _Tile:
    """As measured in half precision with heads of 64, elsewhere by reasoning (LOG.md)."""
    queries = min(64, max(16, 1 << (size - 1).bit_length()))
    if dtype == torch.float32:
        if head_dim <= 64:
            return _Tile(queries, 32, 4, 2)
        most = 32 if head_dim <= 128 else 16
        return _Tile(min(queries, most), most, 8, 1)
    if head_dim > 128:
        return _Tile(queries, 32, 8, 2 if kernel == "forward" else 1)
    if head_dim <= 64 and kernel == "forward":
        # Keys one by one are found faster in larger tiles.
        return _Tile(queries, 64, 4, 3, 128) if runs else _Tile(queries, 128, 4, 2)
    warps = 4 if kernel == "forward" or head_dim <= 64 else 8
    return _Tile(queries, 64, warps, 3 if kernel == "forward" else 2)


def _shared(kernel: str, tile: _Tile, row: int, dtype: torch.dtype) -> int:
    """Bytes, about and rather too many, after compiled kernels: rows owned and streamed; backward
    also weights, their gradients and those of keys."""
    if kernel == "forward":
        return row * (tile.queries + 2 * tile.stages * tile.slots)
    rows = row * 2 * (tile.queries + tile.stages * tile.slots)
    if dtype == torch.float32:
        rows *= 2  # exact products keep the parts of what they multiply
    pairs = 4 * tile.queries * tile.slots * dtype.itemsize
    return rows + pairs + 8 * tile.slots * row // dtype.itemsize


class _Launch:
    """One call's numbers, as the kernels take them."""

    def __init__(self, query: Tensor, key: Tensor, asked: Asked) -> None:
        self.asked = asked
        self.batch, self.queries, self.heads, self.head_dim = query.shape
        self.keys = key.shape[1]
        self.blocks, self.count = asked.listed.shape[2:]
        self.causal, self.runs = asked.at is not None, asked.width > 1
        self.between = self.causal or asked.first is not None
        self.dtype, self.device = query.dtype, query.device
        self.unused = query
        fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
        self.options: dict[str, Any] = {
            "HEAD_DIM": self.head_dim,
            "D": max(16, 1 << (self.head_dim - 1).bit_length()),
            "RUNS": self.runs,
            "BETWEEN": self.between,
            "CAUSAL": self.causal,
            "MASKED": asked.valid is not None,
            "FADING": asked.spans is not None,
            "DROPOUT": asked.dropout_p > 0,
            "PRECISION": "tf32" if fast else "tf32x3",
        }

    @property
    def drop(self) -> tuple[int, float]:
        p = self.asked.dropout_p
        return dropout.threshold(p), 0.0 if p == 1 else 1.0 / (1.0 - p)

    def tile(self, kernel: str) -> _Tile:
        asked = self.asked
        return _tile(kernel, asked.size, self.runs, self.head_dim, self.dtype, self.device)

    def programs(self, tile: _Tile) -> int:
        """Of those that own queries, in each batch row and head."""
        return self.blocks * -(-self.asked.size // tile.queries)

    def numbers(self, tile: _Tile) -> tuple[int, ...]:
        """queries, keys, heads, size, count, slots, width, wide, ramp, at"""
        asked = self.asked
        wide = -(-asked.width // tile.slots) * tile.slots if self.runs else 1
        sizes = (self.queries, self.keys, self.heads, asked.size, self.count)
        return *sizes, self.count * wide, asked.width, wide, asked.ramp, asked.at or 0

    def list_strides(self) -> tuple[int, int]:
        """Of batch rows and heads."""
        listed = self.asked.listed
        return tuple(0 if listed.shape[d] == 1 else listed.stride(d) for d in (0, 1))  # pyright: ignore[reportReturnType]

    def pointers(self) -> tuple[Tensor, ...]:
        """LISTED, FIRST, LAST, VALID, SPANS; those not needed are never followed."""
        asked = (self.asked.first, self.asked.last, self.asked.valid, self.asked.spans)
        return self.asked.listed, *(self.unused if t is None else t for t in asked)

    def extent(self, tile: _Tile) -> tuple[Tensor, int]:
        """Where in its list each program finds something to see, and how far it is from one batch
        row and head to the next; 0 if it is the same for all."""
        from longspan.ops import listed_kernels

        if not self.between or self.runs:
            return self.unused, 0
        programs = self.programs(tile)
        alike = self.asked.listed.shape[:2] == (1, 1) and self.asked.spans is None
        rows = 1 if alike else self.batch * self.heads
        found = torch.empty(rows, programs, 2, dtype=torch.int32, device=self.device)
        listed, first, last, _, spans = self.pointers()
        listed_kernels.extent[(programs * rows,)](
            listed, first, last, spans, found, *self.list_strides(),
            self.queries, self.heads, self.asked.size, self.count, self.asked.ramp,
            self.asked.at or 0,
            BM=tile.queries, BN=tile.slots, CAUSAL=self.causal, FADING=self.options["FADING"],
        )  # fmt: skip
        return found, 0 if alike else programs


def _at_once(size: int, tile: _Tile) -> bool:
    """Whether the queries' kernel also adds to the gradients of keys: then each of its programs
    does; else, to add less often, one program for all queries of a block."""
    return size <= tile.queries


def _dense(tensor: Tensor) -> Tensor:
    """Kernels take any strides but want head_dim contiguous."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride(dim) for tensor in tensors for dim in range(3))


def _tidy(asked: Asked) -> Asked:
    """Lists lie one behind the other."""
    return Asked._make(t.contiguous() if isinstance(t, Tensor) else t for t in asked)


def _shapes(query, key, value, listed, *rest):
    batch, queries, heads, _ = query.shape
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32)
    return query.new_empty(query.shape), lse


@operator("listed_attention", fake=_shapes)
def forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    listed: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    valid: Tensor | None,
    spans: Tensor | None,
    seed: Tensor | None,
    size: int,
    width: int,
    ramp: int,
    at: int | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Output [batch, queries, heads, head_dim], and the log-sum-exp of each row's scores, from
    which the backward pass recomputes, [batch, heads, queries]."""
    from longspan.ops import listed_kernels  # on first use: the package can be imported without

    query, key, value = _dense(query), _dense(key), _dense(value)
    asked = _tidy(
        Asked(listed, first, last, valid, spans, seed, size, width, ramp, at, scale, dropout_p)
    )
    call = _Launch(query, key, asked)
    out = query.new_empty(query.shape)
    lse = query.new_empty((call.batch, call.heads, call.queries), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    tile = call.tile("forward")
    extent, row = call.extent(tile)
    listed_kernels.forward[(call.programs(tile) * call.batch * call.heads,)](
        query, key, value, out, lse, *call.pointers(), extent, query if seed is None else seed,
        *_strides(query, key, value), *call.list_strides(), row,
        *call.numbers(tile), scale * LOG2E, *call.drop,
        **tile.launch(), **call.options,
    )  # fmt: skip
    return out, lse


def _grad_shapes(grad, query, key, value, out, lse, listed, first, last, valid, spans, *rest):
    both = key.new_empty((2, *key.shape))
    heads = spans.shape[0] if spans is not None else 0
    return query.new_empty(query.shape), both, query.new_empty(heads, dtype=torch.float32)


@operator("listed_attention_backward", fake=_grad_shapes)
def backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    listed: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    valid: Tensor | None,
    spans: Tensor | None,
    seed: Tensor | None,
    size: int,
    width: int,
    ramp: int,
    at: int | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, of keys and values stacked, and of spans (empty if there are none)."""
    from longspan.ops import listed_kernels

    grad, query, key, value = (_dense(t) for t in (grad, query, key, value))
    asked = _tidy(
        Asked(listed, first, last, valid, spans, seed, size, width, ramp, at, scale, dropout_p)
    )
    call = _Launch(query, key, asked)
    dq = query.new_empty(query.shape)
    both = torch.zeros((2, *key.shape), dtype=torch.float32, device=key.device)
    tile = call.tile("backward_query")
    programs, streams = call.programs(tile), call.batch * call.heads
    by_span = lse.new_zeros((call.batch, call.heads, programs if spans is not None else 0))
    if out.numel() > 0:
        delta = torch.empty_like(lse)
        extent, row = call.extent(tile)
        seed = query if seed is None else seed
        at_once = _at_once(size, tile)
        strides = _strides(query, key, value, grad)
        numbers = (scale * LOG2E, scale, *call.drop)
        listed_kernels.backward_query[(programs * streams,)](
            query, key, value, out, grad, lse, delta, dq, *both, by_span,
            *call.pointers(), extent, seed, *strides, *call.list_strides(), row,
            *call.numbers(tile), *numbers,
            KEYS=at_once, **tile.launch(), **call.options,
        )  # fmt: skip
        if not at_once:
            tile = call.tile("backward_key")
            sizes = call.numbers(tile)
            tiles = -(-sizes[5] // tile.slots)
            listed_kernels.backward_key[(call.blocks * tiles * streams,)](
                query, key, value, grad, lse, delta, *both, *call.pointers(), seed,
                *strides, *call.list_strides(), *sizes, *numbers,
                **tile.launch(), **call.options,
            )  # fmt: skip
    return dq, both.to(key.dtype), by_span.sum((0, 2))


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:9])
    ctx.numbers = inputs[9:]


def _backward(ctx, grad, _grad_lse):
    if grad is None:
        return (None,) * 15
    dq, both, dspans = backward_op(grad, *ctx.saved_tensors, *ctx.numbers)
    spans = ctx.saved_tensors[-2]
    dspans = None if spans is None else dspans.to(spans.dtype)
    return dq, both[0], both[1], *(None,) * 4, dspans, *(None,) * 7


differentiable(forward_op, _backward, save=_save)


def attend(query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
    """[batch, queries, heads, head_dim]. Differentiable once."""
    if asked.dropout_p > 0:
        asked = asked._replace(seed=dropout.new_seed(query.device))
    return forward_op(query, key, value, *asked)[0]
