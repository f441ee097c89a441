"""The causal form: sizes, grids and launches of the kernels in `causal_kernels.py`, as torch
operators. Nothing is read back from the device."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.features.autograd import PLACES
from longspan.ops.operator import differentiable, operator

LOG2E = math.log2(math.e)
MOST_PIECES = 64  # of a text, walked side by side
_PROGRAMS = 512  # that walk: some for each processor of a large GPU
# What places hold at every chunk takes several times as much as the tokens. It is made for some
# pairs of batch row and head at a time.
AT_A_TIME = 2**29  # bytes


class Tiles(NamedTuple):
    chunk: int  # tokens that see one another by their scores
    walked: int  # places of a program that walks: whole blocks of those below
    block: int  # places at a time
    warps: int
    stages: int


_TILES = Tiles(64, 64, 32, 4, 3)
_WIDE_TILES = _TILES._replace(stages=1)


def causal_feature_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    sums: Tensor | None,
    reference: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and sums and their reference after it: see `linear.Sums`."""
    mean, log = None, None
    if sums is not None and reference is not None:
        below = sums[..., -1:]
        mean = torch.where(below > 0, sums[..., :-1] / below, 0.0)
        log = below[..., 0].log2() + LOG2E * reference[..., None]
    out, _, start, started = _forward(query, key, value, projection.to(query.dtype), mean, log)
    log = started[:, -1, : projection.shape[0]].detach()
    # Finite, also where nothing has been read yet.
    top = log.amax(-1, keepdim=True).clamp_min(torch.finfo(log.dtype).min)
    below = (log - top).exp2()[..., None]
    after = torch.cat((start[:, -1, :-1].detach() * below, below), -1)
    pairs = query.shape[0], query.shape[2]
    return out, after.unflatten(0, pairs), (top / LOG2E).view(pairs)


def _shapes(query, key, value, projection, mean, log):
    batch, n, heads, head_dim = query.shape
    pairs, features = batch * heads, projection.shape[0]
    pieces = _cut(query, projection).pieces
    wide = {"dtype": torch.float32}
    return (
        query.new_empty(query.shape),
        query.new_empty((4, pairs, -(-n // 16) * 16), **wide),
        query.new_empty((pairs, pieces + 1, features + 1, head_dim), **wide),
        query.new_empty((pairs, pieces + 1, -(-features // PLACES) * PLACES), **wide),
    )


@operator("causal_feature_attention", fake=_shapes)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    mean: Tensor | None,
    log: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output. For the backward pass of each token the largest exponents, the shift and the
    log-sum-exp [4, pairs, row]; and what places hold before each piece and, last, after all: means
    of values [pairs, pieces + 1, features + 1, head_dim], behind them the plain sum, and logs of
    their weights. The first of these are given [batch, heads, features ...] or none."""
    from longspan.ops.features import causal_kernels as kernels  # on first use: Triton is optional

    made = out, rows, start, started = _shapes(query, key, value, projection, mean, log)
    start[:, 0] = 0.0
    if mean is not None:
        start[:, 0, :-1] = mean.flatten(0, 1)
    started.fill_(-math.inf)
    if log is not None:
        started[:, 0, : log.shape[-1]] = log.flatten(0, 1)
    if query.numel() == 0:
        return made
    query, key, value = (_dense(t) for t in (query, key, value))
    projection = projection.contiguous()
    call = _Call(query, projection, rows)
    kernels.peaks[(call.pairs * call.chunks,)](
        query, key, projection, rows, *_strides(query, key), call.n, call.row, call.heads,
        call.pairs, call.features, call.scale, call.half, **call.tile,
    )  # fmt: skip
    keys = _Walk(key, value, rows[2], rows[2], start, started, started)
    call.prepare(kernels, projection, keys, reverse=False)
    for pair0, pairs, held, logs in call.groups(query, call.features + 1):
        call.walk(kernels, projection, keys, held, logs, logs, pair0, reverse=False)
        kernels.read[(pairs * call.chunks,)](
            query, key, value, projection, rows, held, logs, out, rows[3],
            *_strides(query, key, value), *call.numbers(pair0), **call.tile,
        )  # fmt: skip
    return made


def _grad_shapes(grad, query, key, value, *rest):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@operator("causal_feature_attention_backward", fake=_grad_shapes)
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    rows: Tensor,
    start: Tensor,
    started: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from longspan.ops.features import causal_kernels as kernels

    made = dq, dk, dv = _grad_shapes(grad, query, key, value)
    if query.numel() == 0:
        return made
    grad, query, key, value = (_dense(t) for t in (grad, query, key, value))
    projection = projection.contiguous()
    call = _Call(query, projection, rows)
    strides = _strides(query, key, value, grad)
    lse, delta = torch.empty_like(rows[2:])
    keys = _Walk(key, value, rows[2], rows[2], start, started, started)
    for pair0, pairs, held, logs in call.groups(query, call.features + 1):
        call.walk(kernels, projection, keys, held, logs, logs, pair0, reverse=False)
        kernels.backward_query[(pairs * call.chunks,)](
            query, key, value, grad, projection, rows, held, logs, rows[3], lse, delta, dq,
            *strides, *call.numbers(pair0), call.back, **call.tile,
        )  # fmt: skip
    start, started, extra = (torch.empty_like(t) for t in (start, started, started))
    for tensor, nothing in ((start, 0.0), (started, -math.inf), (extra, 0.0)):
        tensor[:, -1] = nothing
    queries = _Walk(query, grad, lse, delta, start, started, extra)
    call.prepare(kernels, projection, queries, reverse=True)
    down = float(max(0, call.n.bit_length() - 15))
    for pair0, pairs, held, logs in call.groups(query, 2 * call.features):
        extras = torch.empty_like(logs)
        call.walk(kernels, projection, queries, held, logs, extras, pair0, reverse=True)
        kernels.backward_key[(pairs * call.chunks,)](
            query, key, value, grad, projection, rows, held, logs, extras, lse, delta, dk, dv,
            *strides, *call.numbers(pair0), call.back, down, **call.tile,
        )  # fmt: skip
    return made


def _save(ctx, inputs, output):
    *tensors, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx, grad, *rest):
    if grad is None:
        return (None,) * 6
    return *_backward(grad, *ctx.saved_tensors), None, None, None


differentiable(_forward, _gradients, save=_save)


class _Walk(NamedTuple):
    """What is walked along: tokens, what they bring, what their exponents are shifted by and, if
    backward, the number to be taken off; and what there is before each piece."""

    state: Tensor
    value: Tensor
    shift: Tensor
    extra: Tensor
    start: Tensor
    started: Tensor
    started_extra: Tensor


class _Call:
    """Sizes of one call, and the launches that both passes have in common."""

    def __init__(self, query: Tensor, projection: Tensor, rows: Tensor) -> None:
        batch, self.n, self.heads, self.head_dim = query.shape
        self.pairs, self.row = batch * self.heads, rows.shape[2]
        self.features = projection.shape[0]
        self.places = -(-self.features // PLACES) * PLACES
        self.tiles = _tiles(query)
        self.chunks, self.at_a_time, self.pieces, self.size = _cut(query, projection)
        self.back = self.head_dim**-0.25
        self.scale, self.half = self.back * LOG2E, self.back * self.back / 2 * LOG2E
        self.shape: Any = {
            "HEAD_DIM": self.head_dim,
            "D": max(16, 1 << (self.head_dim - 1).bit_length()),
            # Three products in tf32 are as good as one in float32, and one as one in float16.
            "PRECISION": "tf32" if query.dtype == torch.float16 else "tf32x3",
        }
        self.launch = {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages}
        self.tile: Any = {
            **self.shape,
            "CHUNK": self.tiles.chunk,
            "BF": self.tiles.block,
            "WHOLE": self.features % self.tiles.block == 0,
            **self.launch,
        }

    def groups(self, query: Tensor, lines: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Pairs, by the first of some and how many, and room for what their places hold."""
        most = self.at_a_time
        held = query.new_empty((most, self.chunks, lines, self.head_dim))
        logs = query.new_empty((most, self.chunks, self.places), dtype=torch.float32)
        for first in range(0, self.pairs, most):
            yield first, min(most, self.pairs - first), held, logs

    def numbers(self, pair0: int) -> tuple[Any, ...]:
        sizes = self.n, self.row, self.heads, self.pairs, pair0
        return *sizes, self.chunks, self.features, self.places, self.scale

    def prepare(self, kernels: Any, projection: Tensor, walk: _Walk, *, reverse: bool) -> None:
        """Fill what there is before each piece."""
        unused = walk.started
        self._walk(kernels, projection, walk, unused, unused, unused, 0, self.pairs, False, reverse)
        block = 16
        kernels.join[(self.pairs * -(-self.features // block),)](
            walk.start, walk.started, walk.started_extra, self.pieces, self.features, self.places,
            BF=block, REVERSE=reverse, HEAD_DIM=self.head_dim, D=self.shape["D"],
        )  # fmt: skip

    def walk(
        self,
        kernels: Any,
        projection: Tensor,
        walk: _Walk,
        held: Tensor,
        logs: Tensor,
        extras: Tensor,
        pair0: int,
        *,
        reverse: bool,
    ) -> None:
        """Write down what places hold before each chunk, or behind it, of pairs from pair0 on."""
        pairs = min(held.shape[0], self.pairs - pair0)
        self._walk(kernels, projection, walk, held, logs, extras, pair0, pairs, True, reverse)

    def _walk(self, kernels, projection, walk, held, logs, extras, pair0, pairs, keep, reverse):
        blocks = -(-self.features // self.tiles.walked)
        kernels.walk[(pairs * self.pieces * blocks,)](
            walk.state, walk.value, projection, *walk[2:], held, logs, extras,
            *_strides(walk.state, walk.value), self.n, self.row, self.heads, pair0, self.pieces,
            self.size, self.chunks, self.features, self.places, self.scale,
            CHUNK=self.tiles.chunk, BF=self.tiles.walked, KEEP=keep, REVERSE=reverse,
            **self.shape, **self.launch,
        )  # fmt: skip


def _tiles(query: Tensor) -> Tiles:
    return _TILES if query.itemsize == 2 else _WIDE_TILES


class _Cut(NamedTuple):
    chunks: int  # of a text
    at_a_time: int  # pairs of batch row and head
    pieces: int  # of a text
    size: int  # chunks of a piece


def _cut(query: Tensor, projection: Tensor) -> _Cut:
    """Enough programs for a large GPU, told from shapes alone."""
    batch, n, heads, head_dim = query.shape
    tiles, features = _tiles(query), projection.shape[0]
    chunks, pairs = -(-n // tiles.chunk), batch * heads
    held = max(1, chunks * 2 * features * head_dim * query.itemsize)  # of a pair, backward
    turns = -(-pairs // max(1, AT_A_TIME // held))
    at_a_time = -(-pairs // max(1, turns))
    programs = max(1, at_a_time * -(-features // tiles.walked))
    size = -(-chunks // max(1, min(chunks, MOST_PIECES, -(-_PROGRAMS // programs))))
    return _Cut(chunks, at_a_time, -(-chunks // max(1, size)), size)


def _dense(tensor: Tensor) -> Tensor:
    """Kernels take any strides but want head_dim contiguous."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(dim) for tensor in tensors for dim in range(3)]
