"""The `triton` backend: sizes, grids and launches of the kernels in `kernels.py`.

Nothing here reads device memory back, so calls can be captured in a CUDA graph. A layer of one
global token takes three launches forward and six backward, one of them torch's matrix product.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.rows import kernels
from longspan.ops.rows.call import Call
from longspan.ops.window import dropout
from longspan.ops.window.triton import LOG2E, processors, shared_memory

SLOTS = 16  # that one program of the small products takes
FEW_PARTS = 4  # pieces that their reader joins; more get a kernel of their own
MOST_PARTS = 256


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass."""

    query: Tensor  # [batch, g, heads, head_dim]; empty if it was given
    folded: Tensor  # [batch, g, heads, dim]: the queries behind the keys' projection
    pooled: Tensor  # [batch, g, heads, dim]: hidden states averaged by the weights
    lse: Tensor  # [batch, g, heads] float32, of the scores in base 2; +inf: sees nothing
    mass: Tensor  # [batch, g, heads] float32: the sum of the weights; 0: sees nothing


class Tile(NamedTuple):
    """How a pass over the hidden states is cut: rows and tokens at a time, warps, pipeline."""

    rows: int
    tokens: int
    warps: int
    stages: int


def forward(call: Call) -> tuple[Tensor, Saved]:
    """[batch, g, heads, head_dim], and what to keep for the backward pass."""
    call = _dense(call)
    hidden, at, seen = call.hidden, call.positions, call.seen
    batch, n, dim = hidden.shape
    slots, heads, head_dim = at.shape[1], call.heads, call.head_dim
    rows, many = slots * heads, batch * slots
    made = Saved(
        query=hidden.new_empty((*at.shape, heads, head_dim) if call.query is None else 0),
        folded=hidden.new_empty((*at.shape, heads, dim)),
        pooled=hidden.new_empty((*at.shape, heads, dim)),
        lse=hidden.new_empty((*at.shape, heads), dtype=torch.float32),
        mass=hidden.new_empty((*at.shape, heads), dtype=torch.float32),
    )
    query = made.query if call.query is None else call.query
    query_weight, key_weight, value_weight = call.weights()
    query_bias, value_bias = call.biases()
    sizes, grid = _sizes(call), (heads, _cdiv(many, SLOTS))
    places = (at.stride(0), at.stride(1), n)
    kernels.fold[grid](
        hidden, at, _or(query_weight, hidden), _or(query_bias, hidden), key_weight,
        query, made.folded, *places, many, slots, heads,
        PROJECT=call.query is None, BIASED=query_bias is not None, **sizes,
    )  # fmt: skip

    tile = _tile("forward", rows, dim, hidden.dtype, hidden.device)
    blocks = _cdiv(rows, tile.rows)
    parts = _parts(batch * blocks, n, tile, hidden.device)
    whole = _whole(hidden, parts, rows)
    kernels.pool[(blocks * parts, batch)](
        made.folded, hidden, *whole, _or(seen.start, at), _or(seen.stop, at), at,
        _or(call.seed, at), *places, rows, heads, parts, call.scale * LOG2E, *_drop(call),
        **_pass_options(call, tile),
    )  # fmt: skip
    parts, whole = _few(whole, softmax=True)

    out = torch.empty_like(query)
    kernels.project[grid](
        *whole, value_weight, _or(value_bias, out), made.pooled, out, made.lse, made.mass,
        many, slots, heads, PARTS=parts, SOFTMAX=True, BIASED=value_bias is not None, **sizes,
    )  # fmt: skip
    return out, made


def backward(
    grad: Tensor, call: Call, saved: Saved
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of the query (None if it was made of hidden states), hidden, weight and bias."""
    call, grad = _dense(call), grad.contiguous()
    hidden, at, seen = call.hidden, call.positions, call.seen
    batch, n, dim = hidden.shape
    slots, heads = at.shape[1], call.heads
    rows, many = slots * heads, batch * slots
    query_weight, key_weight, value_weight = call.weights()
    _, value_bias = call.biases()
    sizes, grid = _sizes(call), (heads, _cdiv(many, SLOTS))
    places = (at.stride(0), at.stride(1), n)
    query = saved.query if call.query is None else call.query
    sides = hidden.new_empty((batch, 2 * rows, dim))
    delta, dmass = torch.empty_like(saved.lse), torch.empty_like(saved.lse)
    kernels.spread[grid](
        grad, value_weight, _or(value_bias, grad), saved.pooled, saved.mass, saved.folded,
        sides, delta, dmass, many, slots, heads,
        BIASED=value_bias is not None, DROPOUT=call.dropout_p > 0, **sizes,
    )  # fmt: skip

    tile = _tile("backward", rows, dim, hidden.dtype, hidden.device)
    blocks = _cdiv(rows, tile.rows)
    parts = _parts(batch * blocks, n, tile, hidden.device)
    whole = _whole(hidden, parts, rows)
    # Wide boundaries, so that the matrix product below reads aligned memory.
    fresh = hidden.new_empty if seen.start is None else hidden.new_zeros
    pairs = fresh((batch, 2 * rows, _cdiv(n, 16) * 16))
    kernels.pool_backward[(blocks * parts, batch)](
        sides, hidden, saved.lse, delta, dmass, whole[0], pairs,
        _or(seen.start, at), _or(seen.stop, at), at, _or(call.seed, at),
        *places, pairs.shape[2], rows, heads, parts, call.scale * LOG2E, call.scale,
        *_drop(call), **_pass_options(call, tile),
    )  # fmt: skip
    parts, whole = _few(whole, softmax=False)
    dhidden = torch.bmm(pairs[:, :, :n].transpose(1, 2), sides)

    dfolded, dquery = torch.empty_like(saved.folded), torch.empty_like(query)
    kernels.project[grid](
        *whole, key_weight, dquery, dfolded, dquery, delta, delta,
        many, slots, heads, PARTS=parts, SOFTMAX=False, BIASED=False, **sizes,
    )  # fmt: skip
    dweight = torch.empty_like(call.weight)
    dbias = None if call.bias is None else torch.empty_like(call.bias)
    columns = min(128, _power(dim), 8192 // sizes["HD"])
    stacked = call.weight.shape[0] // (heads * call.head_dim)
    kernels.weight_grads[(heads, _cdiv(dim, columns), stacked)](
        hidden, at, dquery, query, dfolded, grad, saved.pooled, saved.mass,
        dweight, _or(dbias, dweight), *places, many, slots, heads,
        BM=16 if many <= 16 else 64, BC=columns, WEIGHTS=stacked,
        BIASES=0 if dbias is None else dbias.shape[0] // (heads * call.head_dim),
        **{name: sizes[name] for name in ("DIM", "HEAD_DIM", "HD", "PRECISION")},
    )  # fmt: skip
    if call.query is not None:
        return dquery, dhidden, dweight, dbias
    columns = min(64, _power(dim))
    kernels.return_rows[(grid[1], _cdiv(dim, columns))](
        dquery, query_weight, at, dhidden, *places, many, slots,
        DIM=dim, INNER=heads * call.head_dim, BC=columns,
        **{name: sizes[name] for name in ("BM", "BK", "PRECISION")},
    )  # fmt: skip
    return None, dhidden, dweight, dbias


def _dense(call: Call) -> Call:
    """Kernels read contiguous tensors, which is what models have."""
    query, hidden, weight, bias = (None if t is None else t.contiguous() for t in call[:4])
    return Call(query, hidden, weight, bias, *call[4:])


def _whole(hidden: Tensor, parts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for pieces of rows, their log-sum-exps and masses."""
    shape = (hidden.shape[0], parts, rows)
    return (
        hidden.new_empty((*shape, hidden.shape[2]), dtype=torch.float32),
        hidden.new_empty(shape, dtype=torch.float32),
        hidden.new_empty(shape, dtype=torch.float32),
    )


def _few(pieces: tuple[Tensor, Tensor, Tensor], softmax: bool) -> tuple[int, tuple[Tensor, ...]]:
    """The pieces as they are if they are few, else joined to one."""
    batch, parts, rows, dim = pieces[0].shape
    if parts <= FEW_PARTS:
        return parts, pieces
    whole = _whole(pieces[0][:, 0], 1, rows)
    columns = 32
    kernels.merge[(rows, batch, _cdiv(dim, columns))](
        *pieces, *whole, rows, parts, DIM=dim, BK=columns, MOST=_power(parts), SOFTMAX=softmax,
    )  # fmt: skip
    return 1, whole


def _sizes(call: Call) -> dict:
    """What the kernels that work on slots alone share."""
    dim, head = call.hidden.shape[2], _power(call.head_dim)
    return {
        "DIM": dim,
        "HEAD_DIM": call.head_dim,
        "HD": head,
        "BM": SLOTS,
        "BK": min(_power(dim), (256 if head <= 64 else 128) // call.hidden.itemsize),
        "PRECISION": _precision(),
    }


def _pass_options(call: Call, tile: Tile) -> dict:
    """What the kernels that pass over the hidden states share."""
    dim = call.hidden.shape[2]
    wide, narrow = _columns(dim)
    return {
        "DIM": dim,
        "WIDE": wide,
        "NARROW": narrow,
        "BR": tile.rows,
        "BN": tile.tokens,
        "BOUNDED": call.seen.start is not None,
        "CAUSAL": call.causal,
        "DROPOUT": call.dropout_p > 0,
        "PRECISION": _precision(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _precision() -> str:
    # As in the window kernels: torch's setting decides what float32 products may lose.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _drop(call: Call) -> tuple[int, float]:
    return dropout.threshold(call.dropout_p), 1.0 / (1.0 - call.dropout_p)


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Kernels take a pointer for everything; those not needed are never followed."""
    return unused if tensor is None else tensor


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power(size: int) -> int:
    """The next power of two, at least what a matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length())


def _columns(dim: int) -> tuple[int, int]:
    """A width as two powers of two; the second is 0 where one is enough."""
    wide = max(16, 1 << (dim.bit_length() - 1))
    return wide, 0 if dim <= wide else _power(dim - wide)


def _parts(programs: int, n: int, tile: Tile, device: torch.device) -> int:
    """Pieces to cut the sequence into so that these programs occupy the whole GPU."""
    wanted = processors(device) // programs
    return max(1, min(wanted, _cdiv(n, tile.tokens), MOST_PARTS))


@lru_cache(maxsize=1024)
def _tile(kernel: str, rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """As much as fits on chip: the rows (in the backward pass with their gradients) stay there, and
    tokens stream through `stages - 1` buffers, so that with three some arrive while others are
    worked on."""
    row = sum(_columns(dim)) * dtype.itemsize
    held = 16 if rows <= 16 or row > 2048 or kernel == "backward" else 32
    kept = (2 if kernel == "backward" else 1) * held * row
    if dtype == torch.float32:
        tile = Tile(16, 32, 16 if dim > 256 else 8, 2)
    elif kernel == "backward":
        tile = Tile(held, 32, 4, 3)
    else:
        tile = Tile(held, 64, 8 if row >= 1024 else 4, 3)
    limit = shared_memory(device) - 4096  # what the weights pass through
    while kept + (tile.stages - 1) * tile.tokens * row > limit:
        if tile.tokens > 32:
            tile = tile._replace(tokens=tile.tokens // 2)
        elif tile.stages > 2:
            tile = tile._replace(stages=2)
        elif tile.tokens > 16:
            tile = tile._replace(tokens=16)
        else:
            break
    return tile
