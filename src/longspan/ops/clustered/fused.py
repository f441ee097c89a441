"""Attention within clusters on a GPU: sizes, grids and launches of the kernels in `kernels.py`, as
torch operators.

Nothing is copied into sorted order, and nothing is read back from the device.
"""

import math
from typing import Any

import torch
from torch import Tensor

from longspan.ops.operator import differentiable, operator
from longspan.ops.window.api import refuse_triton
from longspan.ops.window.dropout import new_seed, threshold

LOG2E = math.log2(math.e)
_ROUNDS = 16  # at the most; programs grow with them
_LARGEST = 128  # tile
_SETTLED = 1024  # tokens that one program puts in their places
_SUMMED = 1024  # numbers that one program adds up over rounds


def serves(query: Tensor, key: Tensor, value: Tensor, rounds: int = 1) -> bool:
    return (
        query.is_cuda
        and query.dtype == key.dtype == value.dtype
        and query.numel() > 0
        and rounds <= _ROUNDS
        and refuse_triton(query.device, query.dtype, query.shape[3]) is None
    )


def clustered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Tensor,
    *,
    size: int,
    before: int,
    causal: bool,
    self_last: bool,
    valid: Tensor | None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`clustered_attention` of as many queries as keys."""
    # [batch, heads or 1, rounds, tokens]
    clusters = clusters.permute(0, 2, 3, 1).to(torch.int32)
    if valid is not None:
        clusters = clusters.masked_fill(~valid[:, None, None], torch.iinfo(torch.int32).max)
    clusters, order = clusters.sort(dim=-1, stable=True)
    places, marks = _settle(clusters, order, size, causal)
    reach = size if causal else before
    numbers = (size, before, reach, causal, self_last, dropout_p, scale)
    seed = new_seed(query.device) if dropout_p > 0 else None
    return _attend(query, key, value, places, marks, None, None, seed, *numbers)[0]


def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    *,
    self_last: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`routed_attention`."""
    size = places.shape[3]
    places = places.transpose(1, 2).to(torch.int32).flatten(2)
    slots, start = _slots_of(places, query.shape[1])
    numbers = (size, 0, 0, False, self_last, dropout_p, scale)
    seed = new_seed(query.device) if dropout_p > 0 else None
    places = places[:, :, None]
    return _attend(query, key, value, places, places, slots, start, seed, *numbers)[0]


def _slot_shapes(places, tokens):
    return (
        places.new_empty(places.shape, dtype=torch.int64),
        places.new_empty((*places.shape[:2], tokens + 1)),
    )


# An operator, since torch 2.11 fails to compile such a search for a GPU.
@operator("cluster_slots", fake=_slot_shapes)
def _slots_of(places: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Of tokens in slots [batch, heads, slots]: slots sorted by token, and where those of each of
    the tokens begin among them [batch, heads, tokens + 1]."""
    listed, slots = places.sort(dim=-1, stable=True)
    token = torch.arange(tokens + 1, dtype=torch.int32, device=places.device)
    token = token.expand(*places.shape[:2], -1).contiguous()
    return slots, torch.searchsorted(listed, token, out_int32=True)


def _settled_shapes(clusters, order, size, causal):
    batch, heads, rounds, tokens = clusters.shape
    marked = (batch, heads, rounds, rounds, _span(tokens)) if causal or rounds > 1 else (0,)
    return clusters.new_empty(clusters.shape), clusters.new_empty(marked)


def _span(slots: int) -> int:
    """Of a row of marks: wide pieces, and the last tile may be read to its end."""
    return (slots + _LARGEST + 15) // 16 * 16


@operator("cluster_places", fake=_settled_shapes)
def _settle(clusters: Tensor, order: Tensor, size: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Of sorted clusters [batch, heads, rounds, tokens] and their tokens: which token stands in
    each slot, ~token for padding, and, if they matter, the marks that it has in all rounds [batch,
    heads, rounds, rounds, span]."""
    from longspan.ops.clustered import kernels  # on first use: the package can be imported without

    clusters, order = clusters.contiguous(), order.contiguous()
    places, marks = _settled_shapes(clusters, order, size, causal)
    batch, heads, rounds, tokens = clusters.shape
    by_token = torch.empty_like(clusters) if rounds > 1 else marks
    grid, span = (-(-tokens // _SETTLED) * batch * heads * rounds,), _span(tokens)
    kernels.settle[grid](
        clusters, order, places, by_token, marks, tokens, span, size,
        ROUNDS=rounds, CAUSAL=causal, BM=_SETTLED,
    )  # fmt: skip
    if rounds > 1:
        kernels.spread[grid](order, by_token, marks, tokens, span, ROUNDS=rounds, BM=_SETTLED)
    return places, marks


def _shapes(query, key, value, places, marks, slots, start, seed, *numbers):
    batch, tokens, heads, head_dim = query.shape
    rows = tokens if slots is None else slots.shape[2]
    parts = (0,) if slots is None else (batch, rows, heads, head_dim)
    return (
        query.new_empty(query.shape),
        query.new_empty(parts),
        query.new_empty((batch, heads, rows), dtype=torch.float32),
    )


@operator("cluster_attention", fake=_shapes)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    marks: Tensor,
    slots: Tensor | None,
    start: Tensor | None,
    seed: Tensor | None,
    size: int,
    before: int,
    reach: int,
    causal: bool,
    self_last: bool,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [batch, tokens, heads, dim]; what each slot contributed, if tokens are in several;
    and the log-sum-exp [batch, heads, tokens or slots].

    Args:
        places: [batch, heads or 1, rounds, slots].
        marks: [batch, heads or 1, rounds, rounds, span], see `kernels`; anything if none matter.
        slots, start: those of each token are slots[start[token] : start[token + 1]]; None if each
            token has one in every round.
    """
    from longspan.ops.clustered import kernels

    query, key, value = (_dense(t) for t in (query, key, value))
    out, parts, lse = _shapes(query, key, value, places, marks, slots, start, seed)
    batch, tokens, heads, head_dim = query.shape
    rounds, count = places.shape[2:]
    into, sums = (out, lse) if slots is None else (parts, lse)
    if rounds > 1:
        into, sums = (t.new_empty((rounds, *t.shape)) for t in (out, lse))
    tile, launch = _tile(query, rounds, "forward")
    options: Any = _options(query, rounds, causal, slots is not None, self_last, dropout_p)
    kernels.forward[(-(-count // tile["BM"]) * rounds * batch * heads,)](
        query, key, value, into, sums, places, marks, _or(start, lse), _or(seed, lse),
        *_strides(query, key, value),
        tokens, count, _span(count), heads, places.shape[1], size, before, reach, scale * LOG2E,
        *_chance(dropout_p), **options, **tile, **launch,
    )  # fmt: skip
    shape: Any = {"HEAD_DIM": head_dim, "D": options["D"]}
    rows = _rows_at_a_time(options["D"])
    if rounds > 1:
        kernels.merge[(-(-tokens // rows) * batch * heads,)](
            into, sums, out, lse, tokens, heads, ROUNDS=rounds, BM=rows, **shape
        )
    elif slots is not None:
        kernels.gather[(-(-tokens // rows) * batch * heads,)](
            parts, slots, start, out, tokens, count, heads, MEAN=True, BM=rows, **shape
        )
    return out, parts, lse


def _grad_shapes(grad, query, *rest):
    return query.new_empty((3, *query.shape))


@operator("cluster_attention_backward", fake=_grad_shapes)
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    places: Tensor,
    marks: Tensor,
    slots: Tensor | None,
    start: Tensor | None,
    seed: Tensor | None,
    size: int,
    before: int,
    reach: int,
    causal: bool,
    self_last: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Of queries, keys and values, stacked."""
    from longspan.ops.clustered import kernels

    grad, query, key, value = (_dense(t) for t in (grad, query, key, value))
    batch, tokens, heads, head_dim = query.shape
    rounds, count = places.shape[2:]
    sums = lse.new_empty((2, rounds, batch, heads, count))
    # A row has a part in every round, and these are added up in float32.
    grads = query.new_empty((rounds, 3, batch, lse.shape[2], heads, head_dim))
    options: Any = _options(query, rounds, causal, slots is not None, self_last, dropout_p)
    numbers = (
        *_strides(query, key, value, grad),
        *(tokens, count, _span(count), heads, places.shape[1], size, before, reach),
        *(scale * LOG2E, scale),
        *_chance(dropout_p),
    )
    seed = _or(seed, lse)
    # The queries' kernel goes first: it leaves sums for the other.
    tile, launch = _tile(query, rounds, "backward_query")
    kernels.backward_query[(-(-count // tile["BM"]) * rounds * batch * heads,)](
        query, key, value, out, grad, lse, sums, grads, places, marks, seed,
        *numbers, **options, **tile, **launch,
    )  # fmt: skip
    tile, launch = _tile(query, rounds, "backward_key")
    kernels.backward_key[(-(-count // tile["BN"]) * rounds * batch * heads,)](
        query, key, value, grad, sums, grads, places, marks, _or(start, lse), seed,
        *numbers, **options, **tile, **launch,
    )  # fmt: skip
    if slots is None:
        return _added(grads) if rounds > 1 else grads[0]
    whole, rows = _grad_shapes(grad, query), _rows_at_a_time(options["D"])
    kernels.gather[(-(-tokens // rows) * 3 * batch * heads,)](
        grads, slots, start, whole, tokens, count, heads,
        MEAN=False, BM=rows, HEAD_DIM=head_dim, D=options["D"],
    )  # fmt: skip
    return whole


def _added(parts: Tensor) -> Tensor:
    """The sum over the first dimension. Of more than 2^31 bytes in half precision torch makes it in
    float32, which takes twice the memory."""
    from longspan.ops.clustered import kernels

    total = torch.empty_like(parts[0])
    kernels.add_up[(-(-total.numel() // _SUMMED),)](
        parts, total, total.numel(), ROUNDS=parts.shape[0], BLOCK=_SUMMED
    )
    return total


def _save(ctx, inputs, output):
    query, key, value, places, marks, slots, start, seed, *ctx.numbers = inputs
    out, parts, lse = output
    out = out if slots is None else parts
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, out, lse, places, marks, slots, start, seed)


def _gradients(ctx, grad, _parts, _lse):
    if grad is None:
        return (None,) * 15
    return (*_backward(grad, *ctx.saved_tensors, *ctx.numbers).unbind(0), *(None,) * 12)


differentiable(_attend, _gradients, save=_save)


def _dense(tensor: Tensor) -> Tensor:
    """Kernels take any strides but want head_dim contiguous."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(dim) for tensor in tensors for dim in range(3)]


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Kernels take a pointer for everything; those not needed are never followed."""
    return unused if tensor is None else tensor


def _chance(dropout_p: float) -> tuple[int, float]:
    return threshold(dropout_p), 0.0 if dropout_p == 1 else 1.0 / (1.0 - dropout_p)


def _options(
    query: Tensor, rounds: int, causal: bool, routed: bool, self_last: bool, dropout_p: float
) -> dict[str, Any]:
    # torch's own setting decides whether float32 products may be rounded to tf32; if not, three
    # tf32 products give float32 accuracy at tensor-core speed.
    fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "ROUNDS": rounds,
        "CAUSAL": causal,
        "ROUTED": routed,
        "SELF_LAST": self_last,
        "DROPOUT": dropout_p > 0,
        "HEAD_DIM": query.shape[3],
        "D": max(16, 1 << (query.shape[3] - 1).bit_length()),
        "PRECISION": "tf32" if fast else "tf32x3",
    }


def _rows_at_a_time(padded: int) -> int:
    """Of what is only added up."""
    return max(16, 4096 // padded)


def _tile(query: Tensor, rounds: int, kernel: str) -> tuple[Any, Any]:
    """Rows that a program owns and streams, and how it is launched: so that several programs fit on
    a processor, as there is little to overlap in one (LOG.md)."""
    head_dim, warps = query.shape[3], 4
    if query.dtype == torch.float32:
        own, other = (64, 32) if head_dim <= 64 else (32, 32) if head_dim <= 128 else (16, 16)
        warps = 4 if head_dim <= 64 else 8
    elif head_dim > 128:
        own, other, warps = 64, 32, 8
    else:
        # Comparing rounds, and two gradients at a time, take registers.
        own, other = 64, 32 if rounds > 1 or kernel == "backward_key" else 64
    if not query.is_cuda:
        own, other = 16, 16  # interpreted: so that tests have several tiles
    tile = {"BM": other, "BN": own} if kernel == "backward_key" else {"BM": own, "BN": other}
    stages = 1 if query.dtype != torch.float32 and head_dim <= 64 else 2
    return tile, {"num_warps": warps, "num_stages": stages}
