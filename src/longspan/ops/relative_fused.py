"""Launching the fused kernels of attention with relative positions, and their torch operators.

The part of the scores that goes by distance, (q + v) . r, is a plain product, made for some queries
at a time (a *chunk*); the kernels read it where it stands and never see r. Backward they leave the
gradients of a chunk's scores in memory of the same shape, from which two more products make those
of the queries and of r. So of scores there are never more than a chunk's, one forward and two
backward, whatever the length; beside them stand copies of queries and sums over keys in float32, as
long as the text. Nothing is atomic, and nothing is read back.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.ops.operator import differentiable, operator
from longspan.ops.window import dropout
from longspan.ops.window.api import refuse_triton

LOG2E = math.log2(math.e)
# Scores by distance in a chunk: 128 MiB in half precision. With half as many, the host takes longer
# than the GPU.
_CHUNK = 1 << 26
# Queries in a chunk, unless there are fewer: what keeps a GPU busy however many distances there
# are. Then a chunk has fewer batch rows, and is larger only if one of them is.
_FEWEST = 512


def serves(query: Tensor) -> bool:
    return query.is_cuda and refuse_triton(query.device, query.dtype, query.shape[3]) is None


class Asked(NamedTuple):
    """What a call asks for besides its tensors."""

    seed: Tensor | None  # of dropout
    left: int  # distances up to this are seen; at most the number of keys
    # Batch rows are residue classes of this many for each document; the first key of the first
    # `missing` of them is made up.
    step: int
    missing: int
    scale: float
    dropout_p: float


class _Tile(NamedTuple):
    """Queries and keys in one tile of products, warps, pipeline depth."""

    queries: int
    keys: int
    warps: int
    stages: int

    def launch(self) -> dict[str, Any]:
        options = {"BM": self.queries, "BN": self.keys}
        return options | {"num_warps": self.warps, "num_stages": self.stages}


@lru_cache(maxsize=1024)
def _tile(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> _Tile:
    """What is best, made smaller until it fits the GPU's shared memory."""
    from longspan.ops.window.triton import shared_memory

    tile = _best_tile(kernel, head_dim, dtype)
    limit = shared_memory(device)
    while _shared(tile, head_dim, dtype) > limit:
        if tile.stages > 1:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.queries > 16:
            smaller = {"queries": tile.queries // 2, "keys": max(16, tile.keys // 2)}
            tile = tile._replace(**smaller)
        else:
            break
    return tile


def _best_tile(kernel: str, head_dim: int, dtype: torch.dtype) -> _Tile:
    """By registers, as compiled for Hopper; others were not timed.

    The number of keys is not that of columns: Triton reads tiles of one shape in the same pieces,
    and the eight neighbours that suit keys would spread each read of scores, which begin anywhere
    and are read one by one, over four rows."""
    columns = _padded_dim(head_dim)
    if dtype == torch.float32:
        if columns > 128:
            return _Tile(16, 16, 8, 1)
        return _Tile(64 if columns <= 64 else 32, 32 if columns > 32 else 64, 8, 2)
    if columns > 128:
        return _Tile(64, 32, 8, 2)
    if columns == 64:
        return _Tile(
            64, 32, 8 if kernel == "backward_query" else 4, 3 if kernel == "forward" else 2
        )
    if kernel == "backward_query":
        return _Tile(64, 32 if columns > 32 else 64, 8, 2)
    return _Tile(64, 64, 8 if columns > 64 else 4, 2)


def _shared(tile: _Tile, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes, about and rather too many, after compiled kernels: rows owned and streamed, and scores
    on their way from one layout to another."""
    row = _padded_dim(head_dim) * dtype.itemsize
    rows = 2 * row * (tile.queries + tile.stages * tile.keys)
    if dtype == torch.float32:
        rows *= 2  # exact products keep the parts of what they multiply
    return rows + 2 * tile.stages * tile.queries * tile.keys * dtype.itemsize


def _padded_dim(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


class _Chunk(NamedTuple):
    """Batch rows and queries that are computed together, and the distances they need, made up to
    a multiple of eight so that rows of products are aligned."""

    row0: int
    row1: int
    first: int
    last: int  # exclusive
    width: int

    def of(self, tensor: Tensor) -> Tensor:
        """The chunk's part of [batch, queries, heads, head_dim]."""
        return tensor[self.row0 : self.row1, self.first : self.last]


def _up(distances: int) -> int:
    return (distances + 7) // 8 * 8


class _Call:
    """One call's numbers, as the kernels take them."""

    def __init__(self, query: Tensor, key: Tensor, asked: Asked) -> None:
        self.asked = asked
        self.batch, self.queries, self.heads, self.head_dim = query.shape
        self.keys = key.shape[1]
        self.dtype, self.device = query.dtype, query.device
        self.distances = min(asked.left, self.keys - 1) + 1
        self.width = _up(self.distances)
        p = asked.dropout_p
        self.drop = dropout.threshold(p), 0.0 if p == 1 else 1.0 / (1.0 - p)
        self.seed = query if asked.seed is None else asked.seed
        # torch's own setting decides about float32 products, as in all kernels.
        fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
        self.options: dict[str, Any] = {
            "HEAD_DIM": self.head_dim,
            "D": _padded_dim(self.head_dim),
            "PRECISION": "tf32" if fast else "tf32x3",
        }

    def chunks(self) -> Iterator[_Chunk]:
        each = self.heads * self.width  # scores by distance of one query in one batch row
        size = max(_CHUNK // (self.batch * each), _FEWEST) // _FEWEST * _FEWEST
        size = min(size, self.queries)
        rows = min(max(_CHUNK // (size * each), 1), self.batch)
        before = self.keys - self.queries
        for row in range(0, self.batch, rows):
            for first in range(0, self.queries, size):
                last = min(first + size, self.queries)
                width = _up(min(self.distances, before + last))
                yield _Chunk(row, min(row + rows, self.batch), first, last, width)

    def numbers(self, chunk: _Chunk) -> tuple[int, ...]:
        """row0, rows, first, count, width, queries, keys, heads, left, step, missing"""
        row0, row1, first, last, width = chunk
        sizes = (row0, row1 - row0, first, last - first, width)
        asked = self.asked
        known = (self.queries, self.keys, self.heads, asked.left, asked.step, asked.missing)
        return *sizes, *known

    def tile(self, kernel: str) -> _Tile:
        return _tile(kernel, self.head_dim, self.dtype, self.device)

    def programs(self, chunk: _Chunk, rows: int, block: int) -> tuple[int]:
        """To share out rows of each head and batch row in blocks."""
        return (-(-rows // block) * (chunk.row1 - chunk.row0) * self.heads,)

    def falling(self, table: Tensor) -> Tensor:
        """[width, heads, head_dim]: the table, from the farthest distance to 0."""
        known = table[: self.distances].to(self.dtype).flip(0)
        return pad(known, (0, 0, 0, 0, self.width - self.distances, 0))


def _exact(query: Tensor) -> torch.autocast:
    """Products of what was given, whatever the dtype that autocast would choose for them."""
    return torch.autocast(query.device.type, enabled=False)


def _by_head(part: Tensor) -> Tensor:
    """[rows, queries, heads, head_dim] -> [heads, rows * queries, head_dim]."""
    return part.permute(2, 0, 1, 3).flatten(1, 2)


def _placed(call: _Call, chunk: _Chunk, place: Tensor, falling: Tensor) -> Tensor:
    """[heads, rows * queries, width]: scores by distance, from the farthest to 0."""
    needed = falling[call.width - chunk.width :]
    return _by_head(chunk.of(place)) @ needed.permute(1, 2, 0)


def _dense(tensor: Tensor) -> Tensor:
    """Kernels take any strides but want head_dim contiguous."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride(dim) for tensor in tensors for dim in range(3))


def _shapes(content, place, key, *rest):
    batch, queries, heads, _ = content.shape
    lse = content.new_empty((batch, heads, queries), dtype=torch.float32)
    return content.new_empty(content.shape), lse


@operator("relative_attention", fake=_shapes)
def forward_op(
    content: Tensor,
    place: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    seed: Tensor | None,
    left: int,
    step: int,
    missing: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Output [batch, queries, heads, head_dim], and the log-sum-exp of each row's scores, from
    which the backward pass recomputes, [batch, heads, queries].

    Queries come twice, as they meet keys and as they meet positions."""
    from longspan.ops import relative_kernels  # on first use: the package can be imported without

    content, key, value = _dense(content), _dense(key), _dense(value)
    call = _Call(content, key, Asked(seed, left, step, missing, scale, dropout_p))
    out = content.new_empty(content.shape)
    lse = content.new_empty((call.batch, call.heads, call.queries), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    falling, tile = call.falling(table), call.tile("forward")
    strides = _strides(content, key, value)
    with _exact(content):
        for chunk in call.chunks():
            relative_kernels.forward[call.programs(chunk, chunk.last - chunk.first, tile.queries)](
                content, key, value, _placed(call, chunk, place, falling), out, lse, call.seed,
                *strides, *call.numbers(chunk), scale * LOG2E, *call.drop,
                DROPOUT=dropout_p > 0, **tile.launch(), **call.options,
            )  # fmt: skip
    return out, lse


def _grad_shapes(grad, content, place, key, value, table, *rest):
    both = key.new_empty((2, *key.shape))
    queries = (content.new_empty(content.shape), place.new_empty(place.shape))
    return *queries, both, table.new_empty(table.shape)


@operator("relative_attention_backward", fake=_grad_shapes)
def backward_op(
    grad: Tensor,
    content: Tensor,
    place: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    left: int,
    step: int,
    missing: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of both kinds of queries, of keys and values stacked, and of the table."""
    grad, content, key, value = (_dense(t) for t in (grad, content, key, value))
    call = _Call(content, key, Asked(seed, left, step, missing, scale, dropout_p))
    dcontent, dplace = content.new_empty(content.shape), place.new_empty(place.shape)
    both = torch.zeros((2, *key.shape), dtype=torch.float32, device=key.device)
    dtable = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    if out.numel() > 0:
        falling = call.falling(table)
        shape = (call.heads, call.width, call.head_dim)
        by_falling = torch.zeros(shape, dtype=torch.float32, device=key.device)
        with _exact(content):
            for chunk in call.chunks():
                ds = _backward_chunk(
                    *(call, chunk, grad, content, key, value, out, lse, dcontent, both),
                    _placed(call, chunk, place, falling),
                )
                needed = falling[call.width - chunk.width :].transpose(0, 1)
                found = _scaled(ds, needed, scale).unflatten(1, (chunk.row1 - chunk.row0, -1))
                chunk.of(dplace).copy_(found.permute(1, 2, 0, 3))
                _add_by_distance(by_falling, ds, _by_head(chunk.of(place)), scale)
                del ds  # before the next is made
        known = by_falling[:, call.width - call.distances :].transpose(0, 1)
        dtable[: call.distances] = known.flip(0)
    return dcontent, dplace, both.to(key.dtype), dtable.to(table.dtype)


def _backward_chunk(
    call: _Call,
    chunk: _Chunk,
    grad: Tensor,
    content: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dcontent: Tensor,
    both: Tensor,
    placed: Tensor,
) -> Tensor:
    """Fills the chunk's part of `dcontent`, adds to `both`, the gradients of keys and values, and
    returns those of the scores, shaped like `placed`, which it uses up."""
    from longspan.ops import relative_kernels

    scale = call.asked.scale
    ds = torch.zeros_like(placed)  # what is outside the band remains so
    tile, count = call.tile("backward_query"), chunk.last - chunk.first
    relative_kernels.backward_query[call.programs(chunk, count, tile.queries)](
        content, key, value, placed, ds, out, grad, lse, dcontent, call.seed,
        *_strides(content, key, value, grad), *call.numbers(chunk),
        scale * LOG2E, scale, *call.drop,
        DROPOUT=call.asked.dropout_p > 0, **tile.launch(), **call.options,
    )  # fmt: skip
    tile = call.tile("backward_key")
    before = call.keys - call.queries
    begin = max(before + chunk.first - call.asked.left, 0)
    relative_kernels.backward_key[call.programs(chunk, before + chunk.last - begin, tile.keys)](
        content, placed, ds, grad, *both,
        *_strides(content, grad), *call.numbers(chunk), begin, scale,
        **tile.launch(), **call.options,
    )  # fmt: skip
    return ds


def _scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Their product times the scale, which comes before rounding: float16 has no room to spare."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0.0, alpha=scale)


def _add_by_distance(total: Tensor, ds: Tensor, place: Tensor, scale: float) -> None:
    """Add to the last of `total` [heads, distances, head_dim] what scores `ds` [heads, queries,
    distances] and queries [heads, queries, head_dim] make. A long sum of few results would keep few
    processors busy: it is cut into parts."""
    parts = math.gcd(ds.shape[1], 16)
    ds, place = (t.unflatten(1, (parts, -1)).flatten(0, 1) for t in (ds, place))
    found = _scaled(ds.mT, place, scale).unflatten(0, (-1, parts)).sum(1, dtype=torch.float32)
    total[:, total.shape[1] - found.shape[1] :] += found


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output, inputs[5])
    ctx.numbers = inputs[6:]


def _backward(ctx, grad, _grad_lse):
    if grad is None:
        return (None,) * 11
    dcontent, dplace, both, dtable = backward_op(grad, *ctx.saved_tensors, *ctx.numbers)
    return dcontent, dplace, both[0], both[1], dtable, *(None,) * 6


differentiable(forward_op, _backward, save=_save)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    asked: Asked,
) -> Tensor:
    """[batch, queries, heads, head_dim]. Differentiable once."""
    if asked.dropout_p > 0:
        asked = asked._replace(seed=dropout.new_seed(query.device))
    content, place = (query + bias.to(query.dtype) for bias in (content_bias, position_bias))
    return forward_op(content, place, key, value, table, *asked)[0]
