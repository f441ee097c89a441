"""The `triton` backend: sizes, grids and launches of the kernels in `kernels.py`.

Nothing here reads device memory back, so calls can be captured in a CUDA graph.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspan.ops.window import dropout, kernels, row_kernels
from longspan.ops.window.pattern import Pattern, Visibility

LOG2E = math.log2(math.e)
GATHERED = 16  # global tokens gathered into one tile of the window kernels
MOST_SPLITS = 64  # pieces a sequence is cut into for its global rows, at the most
MOST_STREAMS = 65_535  # batch rows times heads in one launch: a GPU's grids end there


class Tile(NamedTuple):
    """How one kernel is cut: rows it owns, rows it streams, warps, pipeline depth, and a limit
    on registers where the compiler's own choice leaves too few programs on a processor."""

    own: int
    stream: int
    warps: int
    stages: int
    registers: int | None = None

    def launch(self) -> dict:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


def lse_row(n: int) -> int:
    """Length of a row of log-sum-exps: rounded up so that every row begins on a wide boundary."""
    return (n + 15) // 16 * 16


@lru_cache
def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device, or None if they can."""
    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"the tensors are on {device}, not on a GPU (TRITON_INTERPRET=1 emulates one)"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 8:
        return f"the GPU has compute capability {major}.{minor}; the kernels need 8.0 or newer"
    return None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    turns = _turns(query)
    if len(turns) > 1:
        # Here, where no graph sees it: traced, each number of rows would be a graph of its own.
        parts = [
            forward(*_cut((query, key, value), turn), *_about(query, seen, pattern, seed, turn))
            for turn in turns
        ]
        out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return out, lse
    query, key, value = _rows_dense(query), _rows_dense(key), _rows_dense(value)
    batch, n, heads, head_dim = query.shape
    out = query.new_empty(query.shape)
    lse = query.new_empty((batch, heads, lse_row(n)), dtype=torch.float32)
    inputs = (*_strides(query), *_strides(key), *_strides(value))
    masks = _pointers(seen, out)
    seed = out if seed is None else seed
    options = _options(query, seen, pattern)
    drop, boost = dropout.threshold(pattern.dropout_p), 1.0 / (1.0 - pattern.dropout_p)
    group, scale = heads // key.shape[2], pattern.scale * LOG2E
    heavy = _heavy(query, pattern)

    for head0, head1, step in pattern.head_groups():
        left, right, step = _reach(pattern, step, n)
        bulk = heavy and _bulk(step, key, value)
        tile = _tile("forward", query, bulk)
        if bulk and _on_hopper(step, query, pattern):
            tensors = (query, key, value, out)
            _hopper().forward[(_blocks(n, step, tile.own) * batch * (head1 - head0),)](
                *(_hopper().tiles(t, *_block(t, tile.own, step)) for t in tensors),
                key, value, lse, *masks, query.stride(1), *_strides(key)[:2], *_strides(value)[:2],
                n, lse.shape[2], heads, head0, head1 - head0, batch, group, left, right, step,
                scale,
                D=head_dim, BM=tile.own, BN=tile.own, BG=GATHERED, DILATED=step > 1,
                BOUNDED=options["BOUNDED"], GLOBAL=seen.places is not None,
                ROWS=pattern.global_rows, CAUSAL=pattern.causal,
                num_warps=tile.warps, maxnreg=tile.registers,
            )  # fmt: skip
            continue
        kernels.forward[(_blocks(n, step, tile.own), batch * (head1 - head0))](
            query, key, value, out, lse, *masks, seed,
            *(_tiles(t, tile.stream, step, bulk) for t in (key, value)), *inputs,
            n, lse.shape[2], heads, head0, head1 - head0, group, left, right, step,
            scale, drop, boost,
            BM=tile.own, BN=tile.stream, BG=GATHERED, DILATED=step > 1, BULK=bulk,
            GLOBAL=seen.places is not None, ROWS=pattern.global_rows,
            **tile.launch(), **options,
        )  # fmt: skip
    if seen.places is not None and pattern.global_rows:
        tile = _tile("global", query)
        splits = _splits(query, tile)
        work = query.new_empty(
            (batch * heads, splits * tile.own, options["D"]), dtype=torch.float32
        )
        work_lse = query.new_empty((batch * heads, splits * tile.own), dtype=torch.float32)
        start, stop, _, rank, places = masks
        row_kernels.global_forward[(splits, batch * heads)](
            query, key, value, out, lse, work, work_lse, start, stop, rank, places, seed, *inputs,
            n, lse.shape[2], heads, splits, group, scale, drop, boost,
            BM=tile.own, BN=tile.stream,
            **tile.launch(), **options,
        )  # fmt: skip
        if splits > 1:
            row_kernels.global_forward_merge[(_mergers(query), batch * heads)](
                out, lse, work, work_lse, rank, places, n, lse.shape[2], heads, splits,
                HEAD_DIM=head_dim, D=options["D"], BM=tile.own, MOST=MOST_SPLITS,
            )  # fmt: skip
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
    turns = _turns(query)
    if len(turns) > 1:
        tensors = (grad, query, key, value, out, lse)
        parts = [
            backward(*_cut(tensors, turn), *_about(query, seen, pattern, seed, turn), stacked)
            for turn in turns
        ]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))
    grad, query, key, value = (_rows_dense(t) for t in (grad, query, key, value))
    batch, n, heads, head_dim = query.shape
    group = heads // key.shape[2]
    delta = torch.empty_like(lse)
    if stacked:
        whole = query.new_empty((batch, n, 3, heads, head_dim))
        dq, dk, dv = whole.unbind(2)
    else:
        dq = query.new_empty(query.shape)
        # With grouped heads each query head writes its own share, added up at the end.
        share = torch.float32 if group > 1 else key.dtype
        dk = key.new_empty(query.shape, dtype=share)
        dv = key.new_empty(query.shape, dtype=share)
    inputs = (*_strides(query), *_strides(key), *_strides(value), *_strides(grad), dq.stride(1))
    masks = _pointers(seen, out)
    seed = out if seed is None else seed
    options = _options(query, seen, pattern)
    drop, boost = dropout.threshold(pattern.dropout_p), 1.0 / (1.0 - pattern.dropout_p)
    scale = pattern.scale * LOG2E
    heavy = _heavy(query, pattern)

    for head0, head1, step in pattern.head_groups():
        left, right, step = _reach(pattern, step, n)
        line_row, lines = lse.shape[2], lse
        if step > 1:
            line_row = lse_row(_cdiv(n, step))
            lines = lse.new_empty((batch, head1 - head0, step, 2, line_row))
        numbers = (n, lse.shape[2], line_row, heads, head0, head1 - head0, group)
        numbers = (*numbers, left, right, step, scale, pattern.scale, drop, boost)
        # The queries' kernel goes first: it also leaves delta for all others.
        bulk = heavy and _bulk(step, key, value)
        tile = _tile("backward_query", query, bulk)
        kernels.backward_query[(_blocks(n, step, tile.own), batch * (head1 - head0))](
            query, key, value, out, grad, lse, delta, lines, dq, *masks, seed,
            *(_tiles(t, tile.stream, step, bulk) for t in (key, value)), *inputs, *numbers,
            BM=tile.own, BN=tile.stream, BG=GATHERED, DILATED=step > 1, BULK=bulk,
            GLOBAL=seen.places is not None, **tile.launch(), **options,
        )  # fmt: skip
        bulk = heavy and head_dim > 32 and _bulk(step, query, grad)
        tile = _tile("backward_key", query, bulk)
        kernels.backward_key[(_blocks(n, step, tile.own), batch * (head1 - head0))](
            query, key, value, grad, lse, delta, lines, dk, dv, *masks, seed,
            *(_tiles(t, tile.stream, step, bulk) for t in (query, grad)), *inputs, *numbers,
            BM=tile.stream, BN=tile.own, BG=GATHERED, DILATED=step > 1, BULK=bulk,
            GLOBAL=seen.places is not None and pattern.global_rows,
            **tile.launch(), **options,
        )  # fmt: skip
    if seen.places is not None:
        tile = _tile("global", query)
        splits = _splits(query, tile)
        work = query.new_empty(
            (batch * heads, 3, splits * tile.own, options["D"]), dtype=torch.float32
        )
        start, stop, _, rank, places = masks
        row_kernels.global_backward[(splits, batch * heads)](
            query, key, value, grad, lse, delta, dq, dk, dv, work,
            start, stop, rank, places, seed, *inputs,
            n, lse.shape[2], heads, splits, group, scale, pattern.scale, drop, boost,
            BM=tile.own, BN=tile.stream, ROWS=pattern.global_rows,
            **tile.launch(), **options,
        )  # fmt: skip
        if splits > 1:
            row_kernels.global_backward_merge[(_mergers(query), batch * heads)](
                dq, dk, dv, work, rank, places, dq.stride(1), n, heads, splits,
                HEAD_DIM=head_dim, D=options["D"], BM=tile.own, MOST=MOST_SPLITS,
                ROWS=pattern.global_rows,
            )  # fmt: skip
    if stacked:
        return (whole,)
    if group > 1:
        dk, dv = (t.unflatten(2, (-1, group)).sum(3).to(key.dtype) for t in (dk, dv))
    return dq, dk, dv


def put_rows(out: Tensor, rows: Tensor, at: Tensor) -> None:
    """Write rows [batch, g, heads, dim] into `out` at tokens [batch, g], none where it is < 0."""
    turns = _turns(out)
    if len(turns) > 1:
        for turn in turns:
            put_rows(*_cut((out, rows, at), turn))
        return
    batch, slots = at.shape
    heads, head_dim = out.shape[2:]
    rows = _rows_dense(rows)
    row_kernels.put_rows[(slots, batch)](
        out, rows, at, *_strides(rows), at.stride(0), at.stride(1), out.shape[1], heads,
        HEADS=triton.next_power_of_2(heads), HEAD_DIM=head_dim, D=_padded_dim(head_dim),
    )  # fmt: skip


def _turns(query: Tensor) -> list[slice]:
    """The batch rows of each launch: as many as the grid has room for."""
    batch, _, heads, _ = query.shape
    most = max(1, MOST_STREAMS // heads)
    return [slice(first, first + most) for first in range(0, batch, most)]


def _cut(tensors: Sequence[Tensor | None], turn: slice) -> list:
    return [None if tensor is None else tensor[turn] for tensor in tensors]


def _about(
    query: Tensor, seen: Visibility, pattern: Pattern, seed: Tensor | None, turn: slice
) -> tuple[Visibility, Pattern, Tensor | None]:
    """The same for the rows of one turn. Dropout counts heads of all rows from the seed on."""
    seed = None if seed is None else seed + turn.start * query.shape[2]
    return Visibility(*_cut(seen, turn)), pattern, seed


def _rows_dense(tensor: Tensor) -> Tensor:
    """Kernels take any strides but want head_dim contiguous."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _padded_dim(head_dim: int) -> int:
    """Columns of a tile: the next power of two, at least what a matrix unit takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _pointers(seen: Visibility, unused: Tensor) -> tuple[Tensor, ...]:
    """Kernels take a pointer for every field; those not needed are never followed."""
    return tuple(unused if field is None else field for field in seen)


def _heavy(query: Tensor, pattern: Pattern) -> bool:
    """Whether a call keeps the GPU busy for long enough to hide the host's work on descriptors, or
    is captured, so that the host works only once."""
    if not query.is_cuda or query.numel() * (pattern.left + 1 + pattern.right) >= 1 << 34:
        return True
    return torch.cuda.is_current_stream_capturing()


def _bulk(step: int, *tensors: Tensor) -> bool:
    """Whether the copy engine of Hopper and later GPUs can fetch tiles of these tensors. It knows
    blocks of one length, so that all residue classes of a dilation need as many members."""
    if tensors[0].shape[1] % step or step * max(t.stride(1) for t in tensors) >= 1 << 31:
        return False
    return all(_bulk_layout(t) for t in tensors) and _has_copy_engine(tensors[0].device)


def _bulk_layout(tensor: Tensor) -> bool:
    head_dim, wide = tensor.shape[3], 16 // tensor.itemsize
    return (
        tensor.itemsize == 2
        and head_dim in (32, 64, 128)
        and tensor.stride(2) == head_dim
        and tensor.stride(1) % wide == 0
        and (tensor.shape[0] == 1 or tensor.stride(0) % wide == 0)
        and tensor.data_ptr() % 16 == 0
    )


@lru_cache
def _has_copy_engine(device: torch.device) -> bool:
    if device.type != "cuda":
        return True  # interpreted: so that tests reach that code
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def _block(tensor: Tensor, rows: int, step: int) -> tuple[list[int], list[int], list[int]]:
    """[batch, members, columns] for the copy engine: shape, strides, shape of a tile. Dilated,
    the `step` tokens of a row follow each other, so that a residue class is a range of columns."""
    batch, n, heads, head_dim = tensor.shape
    token = tensor.stride(1)
    shape = [batch, n // step, (step - 1) * token + heads * head_dim]
    strides = [tensor.stride(0) if batch > 1 else n * token, step * token, 1]
    return shape, strides, [1, rows, head_dim]


def _tiles(tensor: Tensor, rows: int, step: int, bulk: bool) -> Tensor | TensorDescriptor:
    """What the kernels stream tiles from: a tensor descriptor, or (not bulk) nothing of use."""
    return TensorDescriptor(tensor, *_block(tensor, rows, step)) if bulk else tensor


@lru_cache
def _hopper() -> ModuleType | None:
    """The kernels in Gluon, which this version of Triton may not have: it is experimental."""
    try:
        from longspan.ops.window import hopper
    except ImportError:
        return None
    return hopper


def _on_hopper(step: int, query: Tensor, pattern: Pattern) -> bool:
    """Whether `hopper.forward` can compute this call (whose keys and values come in bulk)."""
    return (
        pattern.dropout_p == 0.0
        and query.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device) == (9, 0)
        and _bulk(step, query)
        and _hopper() is not None
    )


def _options(query: Tensor, seen: Visibility, pattern: Pattern) -> dict:
    """The compile-time switches all kernels share."""
    # torch's own setting decides whether float32 products may be rounded to tf32; if not, three
    # tf32 products give float32 accuracy at tensor-core speed.
    fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "HEAD_DIM": query.shape[3],
        "D": _padded_dim(query.shape[3]),
        "BOUNDED": seen.start is not None,
        "CAUSAL": pattern.causal,
        "DROPOUT": pattern.dropout_p > 0,
        "PRECISION": "tf32" if fast else "tf32x3",
    }


def _reach(pattern: Pattern, step: int, n: int) -> tuple[int, int, int]:
    """Window and dilation cut down to what the row holds, so that no product can overflow."""
    step = min(step, n)
    most = _cdiv(n, step)
    return min(pattern.left, most), min(pattern.right, most), step


def _blocks(n: int, step: int, block: int) -> int:
    return step * _cdiv(_cdiv(n, step), block)


def _splits(query: Tensor, tile: Tile) -> int:
    """Pieces to cut the sequence into so that a few global rows occupy the whole GPU."""
    batch, n, heads, _ = query.shape
    wanted = _cdiv(4 * processors(query.device), batch * heads)
    longest = _cdiv(n, 4 * tile.stream)
    return max(1, min(wanted, longest, MOST_SPLITS))


def _mergers(query: Tensor) -> int:
    """Programs per head that join the pieces of global rows."""
    return 32 if query.is_cuda else 2


def _tile(kernel: str, query: Tensor, bulk: bool = False) -> Tile:
    return _fitted_tile(kernel, query.shape[3], query.dtype, query.device, bulk)


@lru_cache(maxsize=1024)
def _fitted_tile(
    kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device, bulk: bool
) -> Tile:
    """The measured best cut, shrunk until it fits the GPU's shared memory."""
    tile = _best_tile(kernel, head_dim, dtype, bulk)
    row = _padded_dim(head_dim) * dtype.itemsize
    limit = shared_memory(device)
    while 2 * row * (tile.own + tile.stages * tile.stream) > limit:
        if tile.stages > 1:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.own > 16:
            tile = tile._replace(own=tile.own // 2, stream=max(16, tile.stream // 2))
        else:
            break
    return tile


def _best_tile(kernel: str, head_dim: int, dtype: torch.dtype, bulk: bool) -> Tile:
    """From brute-force searches on an H200 (LOG.md), half precision up to head size 128; beyond
    that, and in float32, what keeps the accumulators in registers."""
    own = 16 if kernel == "global" else 64  # a handful of global tokens is the usual case
    if dtype == torch.float32:
        if head_dim <= 64:
            return Tile(own, 32, 4, 2)
        return Tile(min(own, 32), 32, 8, 2) if head_dim <= 128 else Tile(16, 16, 8, 1)
    if head_dim > 128:
        return Tile(own, 32, 8, 2)
    if kernel == "global":
        return Tile(own, 64, 4, 3)
    few = 128 if head_dim <= 64 else None
    if kernel == "forward":
        return Tile(own, 64, 4, 2 if bulk and head_dim == 64 else 3, few)
    if kernel == "backward_query":
        return Tile(own, 64, 4, 3 if bulk and head_dim <= 32 else 2, few)
    if bulk:
        return Tile(own, 64, 4, 2) if head_dim > 64 else Tile(own, 32, 4, 3, few)
    return Tile(own, 32, 4, 3, 168 if head_dim <= 64 else None)


@lru_cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes one program may use, less what Triton keeps for itself."""
    if device.type != "cuda":
        return 200_000
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 4096
