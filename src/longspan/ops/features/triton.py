"""Sizes, grids and launches of the kernels in `kernels.py`. Nothing is read back."""

import math
from typing import Any

import torch
from torch import Tensor

from longspan.ops.features import kernels
from longspan.ops.features.autograd import PLACES
from longspan.ops.window.triton import LOG2E, Tile, processors

MOST_SPLITS = 32  # pieces that the tokens are cut into where something is summed over them
JOINED = 16  # columns of the head, or places, that one program joins

TILES = {
    "sum_keys": Tile(128, 64, 8, 3),
    "read": Tile(128, 64, 8, 3),
    "backward_query": Tile(128, 64, 8, 2),
    "sum_queries": Tile(128, 64, 8, 3),
    "backward_key": Tile(64, 64, 4, 2),
}
WIDE_TILES = dict.fromkeys(TILES, Tile(64, 32, 4, 2))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    valid: Tensor | None,
    eps: float,
    out: Tensor,
    rows: Tensor,
    values: Tensor,
    wide: Tensor,
    logs: Tensor,
) -> None:
    """Fills the last five: see `autograd.forward_op`."""
    query, key, value = _dense(query), _dense(key), _dense(value)
    _, n, heads, head_dim = query.shape
    pairs, features = values.shape[:2]
    places = logs.shape[1] - 16
    scale, half, _, least = _numbers(head_dim, eps)
    common = _common(query)
    projection = projection.contiguous()
    tile = _tile("sum_keys", query)
    splits, size = _splits(query, features, tile)
    sums = logs.new_empty((pairs, splits, features + 1, head_dim))
    totals = logs.new_empty((pairs, splits, 2, features + 1))
    kernels.sum_keys[(pairs * splits * -(-features // tile.own),)](
        key, value, projection, _mask(valid, key), sums, totals,
        *_strides(key), *_strides(value), n, heads, splits, size, features, scale, half,
        BF=tile.own, BN=tile.stream, PADDED=valid is not None, **common, **tile.launch(),
    )  # fmt: skip
    kernels.join_keys[(pairs * -(-head_dim // JOINED),)](
        sums, totals, values, wide, logs, splits, features, places, least,
        HEAD_DIM=head_dim, BF=PLACES, BD=JOINED,
    )  # fmt: skip
    tile = _tile("read", query)
    kernels.read[(pairs * -(-n // tile.own),)](
        query, projection, values, wide, logs, out, rows[0], rows[1],
        *_strides(query), n, rows.shape[2], heads, features, places, scale, least,
        BM=tile.own, BF=tile.stream, WHOLE=features % tile.stream == 0,
        **common, **tile.launch(),
    )  # fmt: skip


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    valid: Tensor | None,
    eps: float,
    rows: Tensor,
    values: Tensor,
    wide: Tensor,
    logs: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fills the last three, from what `forward` left."""
    grad, query, key, value = (_dense(t) for t in (grad, query, key, value))
    _, n, heads, head_dim = query.shape
    pairs, features = values.shape[:2]
    places, row = logs.shape[1] - 16, rows.shape[2]
    scale, half, back, least = _numbers(head_dim, eps)
    common = _common(query)
    projection = projection.contiguous()
    delta = torch.empty_like(rows[0])
    tile = _tile("backward_query", query)
    kernels.backward_query[(pairs * -(-n // tile.own),)](
        query, grad, projection, values, logs, rows[0], rows[1], delta, dq,
        *_strides(query), *_strides(grad), n, row, heads, features, places, scale, back,
        BM=tile.own, BF=tile.stream, **common, **tile.launch(),
    )  # fmt: skip
    tile = _tile("sum_queries", query)
    splits, size = _splits(query, features, tile)
    sums = logs.new_empty((pairs, splits, features, head_dim))
    totals = logs.new_empty((pairs, splits, features))
    kernels.sum_queries[(pairs * splits * -(-features // tile.own),)](
        query, grad, projection, logs, rows[0], rows[1], delta, sums, totals,
        *_strides(query), *_strides(grad), n, row, heads, splits, size, features, places, scale,
        BF=tile.own, BN=tile.stream, **common, **tile.launch(),
    )  # fmt: skip
    # a is about 1 / n, its gradients are sums over n: half of the way goes to either factor, so
    # that float16 holds both.
    lift = float(n.bit_length() // 2)
    grads, offsets = torch.empty_like(values), logs.new_empty((pairs, places))
    kernels.join_queries[(pairs * places // JOINED,)](
        sums, totals, values, wide, grads, offsets, splits, features, places, 2.0**-lift,
        HEAD_DIM=head_dim, D=common["D"], BF=JOINED,
    )  # fmt: skip
    tile = _tile("backward_key", query)
    kernels.backward_key[(pairs * -(-n // tile.own),)](
        key, value, projection, _mask(valid, key), grads, offsets, logs, dk, dv,
        *_strides(key), *_strides(value), n, heads, features, places,
        scale, half, back, least, lift,
        BM=tile.own, BF=tile.stream, PADDED=valid is not None, **common, **tile.launch(),
    )  # fmt: skip


def _tile(kernel: str, query: Tensor) -> Tile:
    """Wide heads leave fewer registers: they take half of the rows."""
    tile = (TILES if query.itemsize == 2 else WIDE_TILES)[kernel]
    return tile._replace(stream=max(16, tile.stream // 2)) if query.shape[3] > 64 else tile


def _numbers(head_dim: int, eps: float) -> tuple[float, float, float, float]:
    """What makes exponents of products and of squared lengths, in base 2; what scales inputs; the
    logarithm of eps."""
    back = head_dim**-0.25
    least = math.log2(eps) if eps > 0 else -math.inf
    return back * LOG2E, back * back / 2 * LOG2E, back, least


def _common(query: Tensor) -> dict[str, Any]:
    head_dim = query.shape[3]
    padded = max(16, 1 << (head_dim - 1).bit_length())
    # Three products in tf32 are as good as one in float32; half precision knows no such thing.
    return {"HEAD_DIM": head_dim, "D": padded, "PRECISION": "tf32x3"}


def _splits(query: Tensor, features: int, tile: Tile) -> tuple[int, int]:
    """Pieces for programs enough to occupy the GPU four times over, and their size."""
    batch, n, heads, _ = query.shape
    tiles = -(-n // tile.stream)
    wanted = -(-4 * processors(query.device) // (batch * heads * -(-features // tile.own)))
    each = -(-tiles // max(1, min(wanted, -(-tiles // 4), MOST_SPLITS)))
    return -(-tiles // each), each * tile.stream


def _mask(valid: Tensor | None, unused: Tensor) -> Tensor:
    return unused if valid is None else valid.contiguous().view(torch.uint8)


def _dense(tensor: Tensor) -> Tensor:
    """Kernels take any strides but want head_dim contiguous."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)
