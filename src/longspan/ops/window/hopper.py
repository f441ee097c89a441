"""`kernels.forward` once more, for the tensor cores of Hopper, in Gluon.

Triton waits for every product where it stands in the code. Here products are started and waited
for by hand, so that a tile's softmax runs while the values of the tile before it are multiplied:
9% faster at 16,384 tokens (LOG.md). The mathematics, the names and the reading aids are those of
`kernels.py`, which serves all other cases: dropout, other head sizes, float32, rows that a
dilation does not divide, other GPUs.

A *round* fetches the keys of one tile and the values of the tile before, which are needed at the
same time; rounds alternate between two places in shared memory.

Programs begin with the last block of tokens, all its heads side by side: in a layer that is what
the projection wrote last, and it is still in the L2 cache.
"""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longspan.ops.launch import remembered
from longspan.ops.window.kernels import PLAIN_NUMBERS

FLOOR = gl.constexpr(-1.0e30)
NEVER = gl.constexpr(1 << 30)


def tiles(
    tensor: Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    """A tensor descriptor as Gluon wants it: with the order of a tile in shared memory."""
    return TensorDescriptor(tensor, shape, strides, block, _layout(tuple(block), tensor.dtype))


@lru_cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).split(".")[1]))


@gluon.jit
def fetch(
    K_TILES, V_TILES, keys, values, arrived, turn, place, tiles, batch, begin, length,
    k_column, v_column, BN: gl.constexpr,
):  # fmt: skip
    """Start round `turn` = 1 .. tiles; the last one has no keys and reads beyond the row."""
    live = turn <= tiles
    member = gl.where(turn < tiles, begin + turn * BN, length)
    bar = arrived.index(place)
    mbarrier.expect(bar, K_TILES.block_type.nbytes + V_TILES.block_type.nbytes, pred=live)
    tma.async_copy_global_to_shared(
        K_TILES, [batch, member, k_column], bar, keys.index(place), pred=live
    )
    member = begin + (turn - 1) * BN
    tma.async_copy_global_to_shared(
        V_TILES, [batch, member, v_column], bar, values.index(place), pred=live
    )


@gluon.jit
def softmax_step(x, peak, scale):
    """Raw scores (-inf = unseen) -> weights, what earlier sums fade by, new peak."""
    new = gl.maximum(peak, gl.max(x, 1))
    p = gl.exp2(x * scale - (new * scale)[:, None])
    fade = gl.exp2((peak - new) * scale)
    return p, fade, new


@gluon.jit
def add_up(p):
    """[BM, BN] -> [BM, 8]: every eighth column is the same thread's, so that nothing is sent."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def hide(
    x, s, lo, hi, safe_lo, safe_hi, holes, STOP, length, residue, dilation,
    BN: gl.constexpr, BOUNDED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Mask a tile of scores where it crosses the edge of what its queries see."""
    if (s < safe_lo) | (s + BN - 1 > safe_hi) | (holes != 0):
        m = gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
        ok = (m[None, :] - (lo - s)[:, None]).to(gl.uint32) <= (hi - lo)[:, None].to(gl.uint32)
        if BOUNDED:
            token = residue + dilation * (s + m)
            visible = gl.load(STOP + token, mask=s + m < length, other=0) > 0
            ok = ok & visible[None, :]
        x = gl.where(ok, x, float("-inf"))
    return x


@gluon.jit
def take_global(
    q, acc, peak, total, K, V, PLACES, k_there, v_there, k_token, v_token,
    s, end, i, start, stop, left, right, dilation, scale,
    D: gl.constexpr, BM: gl.constexpr, BG: gl.constexpr, DILATED: gl.constexpr,
    BOUNDED: gl.constexpr, CAUSAL: gl.constexpr, SUMS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Take in BG gathered global keys, but for those in a query's window, which it saw there."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [num_warps, 1], [1, 0])
    THERE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BG, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, THERE)
    slot = s + gl.arange(0, BG, layout=gl.SliceLayout(1, LOADED))
    token = gl.load(PLACES + slot, mask=slot < end, other=0).to(gl.int64)[:, None]
    some = (slot < end)[:, None]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LOADED))[None, :]
    k_there.store(gl.load(K + token * k_token + d, mask=some, other=0.0))
    v_there.store(gl.load(V + token * v_token + d, mask=some, other=0.0))
    fence_async_shared()
    x = gl.zeros([BM, BG], gl.float32, layout=THERE)
    x = warpgroup_mma(q, k_there.permute([1, 0]), x, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    slot = s + gl.arange(0, BG, layout=gl.SliceLayout(0, THERE))
    j = gl.load(PLACES + slot, mask=slot < end, other=0)[None, :]
    offset = j - gl.convert_layout(i, ROW)[:, None]
    outside = (offset < -left * dilation) | (offset > right * dilation)
    if DILATED:
        outside = outside | (offset % dilation != 0)
    ok = (slot < end)[None, :] & outside
    if CAUSAL:
        ok = ok & (offset <= 0)
    if BOUNDED:
        ok = ok & (j >= gl.convert_layout(start, ROW)[:, None])
        ok = ok & (j < gl.convert_layout(stop, ROW)[:, None])
    x = gl.where(ok, x, float("-inf"))
    p, fade, new = softmax_step(x, gl.convert_layout(peak, ROW), scale)
    sum = gl.convert_layout(total, ROW) * fade + gl.sum(p, 1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
    p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, SUMS, 2))
    sums = warpgroup_mma(p, v_there, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums])
    return acc, gl.convert_layout(new, peak.type.layout), gl.convert_layout(sum, peak.type.layout)


@remembered
@gluon.jit(do_not_specialize=[*PLAIN_NUMBERS, "rows"])
def forward(
    Q_TILES, K_TILES, V_TILES, OUT_TILES, K, V, LSE, START, STOP, HOLES, RANK, PLACES,
    q_token, k_batch, k_token, v_batch, v_token,
    n, lse_row, heads, head0, run, rows, group, left, right, dilation, scale,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BG: gl.constexpr,
    DILATED: gl.constexpr, BOUNDED: gl.constexpr, GLOBAL: gl.constexpr, ROWS: gl.constexpr,
    CAUSAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = Q_TILES.dtype
    # Registers of scores, of outputs, and of weights as the left factor of a product.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUMS_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)

    order = gl.num_programs(0) - 1 - gl.program_id(0)
    block = order // (rows * run)
    batch = order % (rows * run) // run
    head = head0 + order % run
    stream = batch * heads + head
    residue = 0
    length = n
    if DILATED:
        length = n // dilation
        blocks = (length + BM - 1) // BM
        residue = block // blocks
        block = block % blocks
    else:
        dilation = 1
    first = block * BM
    column = (head // group) * D
    k_column = column + residue * k_token
    v_column = column + residue * v_token
    mq = first + gl.arange(0, BM, layout=ROW)
    i = residue + dilation * mq
    here = mq < length
    lo = gl.maximum(mq - left, 0)
    hi = gl.where(here, gl.minimum(mq + right, length - 1), -1)
    begin = gl.maximum(first - left, 0)
    end = gl.minimum(first + BM + right, length)
    safe_lo = first + BM - 1 - left
    safe_hi = gl.minimum(first + right, length - 1)
    start = mq * 0
    stop = start
    holes = 0
    if BOUNDED:
        START += batch.to(gl.int64) * n
        STOP += batch.to(gl.int64) * n
        start = gl.load(START + i, mask=here, other=0)
        stop = gl.load(STOP + i, mask=here, other=0)
        lo = gl.maximum(lo, (start - residue + dilation - 1) // dilation)
        hi = gl.minimum(hi, (stop - residue + dilation - 1) // dilation - 1)
        some = lo <= hi
        lo = gl.where(some, lo, NEVER)
        hi = gl.where(some, hi, -1)
        safe_lo = gl.max(lo, 0)
        safe_hi = gl.min(hi, 0)
        # If nobody sees anything there is still one tile, hidden throughout.
        begin = gl.minimum(gl.min(lo, 0), first)
        end = gl.maximum(gl.max(hi, 0) + 1, begin + 1)
        holes = gl.load(HOLES + batch)
    tiles = (end - begin + BN - 1) // BN

    queries = gl.allocate_shared_memory(dtype, [1, BM, D], Q_TILES.layout)
    keys = gl.allocate_shared_memory(dtype, [2, 1, BN, D], K_TILES.layout)
    values = gl.allocate_shared_memory(dtype, [2, 1, BN, D], V_TILES.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(3):
        mbarrier.init(arrived.index(place), count=1)
    fence_async_shared()
    bar = arrived.index(2)
    mbarrier.expect(bar, Q_TILES.block_type.nbytes + K_TILES.block_type.nbytes)
    tma.async_copy_global_to_shared(
        Q_TILES, [batch, first, head * D + residue * q_token], bar, queries
    )
    tma.async_copy_global_to_shared(K_TILES, [batch, begin, k_column], bar, keys.index(0))
    fetch(
        K_TILES, V_TILES, keys, values, arrived, 1, 1,
        tiles, batch, begin, length, k_column, v_column, BN,
    )  # fmt: skip

    peak = gl.full([BM], FLOOR, gl.float32, layout=ROW)
    acc = gl.zeros([BM, D], gl.float32, layout=SUMS)
    blank = gl.zeros([BM, BN], gl.float32, layout=SCORES)
    q = queries.reshape([BM, D])

    mbarrier.wait(bar, 0)
    k = keys.index(0).reshape([BN, D])
    x = warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    fetch(
        K_TILES, V_TILES, keys, values, arrived, 2, 0,
        tiles, batch, begin, length, k_column, v_column, BN,
    )  # fmt: skip
    x = hide(
        x, begin, lo, hi, safe_lo, safe_hi, holes, STOP, length, residue, dilation,
        BN, BOUNDED, SCORES,
    )  # fmt: skip
    p, fade, peak = softmax_step(x, peak, scale)
    parts = add_up(p)
    PARTS_ROW: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    p = gl.convert_layout(p.to(dtype), WEIGHTS)

    place = 1
    phase = 0
    mbarrier.wait(arrived.index(place), phase)
    for turn in range(1, tiles):
        k = keys.index(place).reshape([BN, D])
        v = values.index(place).reshape([BN, D])
        x = warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)
        sums = warpgroup_mma(p, v, acc, is_async=True)
        x = warpgroup_mma_wait(1, deps=[x])
        s = begin + turn * BN
        x = hide(
            x, s, lo, hi, safe_lo, safe_hi, holes, STOP, length, residue, dilation,
            BN, BOUNDED, SCORES,
        )  # fmt: skip
        p, fade, peak = softmax_step(x, peak, scale)
        parts = parts * gl.convert_layout(fade, PARTS_ROW)[:, None] + add_up(p)
        p = gl.convert_layout(p.to(dtype), WEIGHTS)
        phase ^= 1 - place
        place ^= 1
        # Asked for before the product is: the assembler pulls a bare wait for the product up in
        # front of the softmax, but not across this loop.
        mbarrier.wait(arrived.index(place), phase)
        acc, p = warpgroup_mma_wait(0, deps=[sums, p])
        fetch(
            K_TILES, V_TILES, keys, values, arrived, turn + 2, place ^ 1,
            tiles, batch, begin, length, k_column, v_column, BN,
        )  # fmt: skip
        acc = acc * gl.convert_layout(fade, SUMS_ROW)[:, None]
    sums = warpgroup_mma(p, values.index(place).reshape([BN, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums])
    total = gl.convert_layout(gl.sum(parts, 1), ROW)

    if GLOBAL:
        RANK += batch.to(gl.int64) * (n + 1)
        PLACES += batch.to(gl.int64) * n
        K += batch.to(gl.int64) * k_batch + column
        V += batch.to(gl.int64) * v_batch + column
        slot0 = 0
        slot1 = gl.load(RANK + n)
        if CAUSAL:
            slot1 = gl.load(RANK + gl.minimum(residue + dilation * (first + BM - 1) + 1, n))
        if BOUNDED:
            slot0 = gl.load(RANK + gl.min(gl.where(stop > 0, start, n), 0))
            slot1 = gl.minimum(slot1, gl.load(RANK + gl.max(stop, 0)))
        GATHERED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BG, D], dtype)
        k_there = gl.allocate_shared_memory(dtype, [BG, D], GATHERED)
        v_there = gl.allocate_shared_memory(dtype, [BG, D], GATHERED)
        for s in range(slot0, slot1, BG):
            acc, peak, total = take_global(
                q, acc, peak, total, K, V, PLACES, k_there, v_there, k_token, v_token,
                s, slot1, i, start, stop, left, right, dilation, scale,
                D, BM, BG, DILATED, BOUNDED, CAUSAL, SUMS, num_warps,
            )  # fmt: skip

    seen = total > 0
    if GLOBAL and not ROWS:
        ranks = gl.load(RANK + i + 1, mask=here, other=0) - gl.load(RANK + i, mask=here, other=0)
        seen = seen & (ranks == 0)
    share = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), SUMS_ROW)
    q.store((acc * share[:, None]).to(dtype))
    lse = gl.where(seen, peak * scale + gl.log2(total), float("inf"))
    LSE += stream.to(gl.int64) * lse_row
    gl.store(LSE + i, lse, mask=here)
    # Behind the last token too, up to the row's end: see `kernels.pad_row`.
    gl.store(LSE + i, lse * 0 + float("inf"), mask=(i >= n) & (i < lse_row))
    fence_async_shared()
    place = head * D + residue * heads * D
    tma.async_copy_shared_to_global(OUT_TILES, [batch, first, place], queries)
    tma.store_wait(pendings=0)
