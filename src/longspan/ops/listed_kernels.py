"""The fused kernels behind `listed_fused.py`. A program owns some queries of one block and head, or
some listed keys of it, and streams the others; rows are read where they lie.

- *Slots* count through a block's list: a slot is one listed key or, where an entry stands for a run
  of neighbouring keys (RUNS), one of these. Runs are filled up to `wide` slots, so that no tile has
  parts of two.
- A slot is seen by `seen` queries from `low` on, by none if it has no key.
- Scores are kept in base 2, and so is the log-sum-exp, which is +inf for rows that see nothing:
  their probabilities recompute to exactly zero.
"""

import triton
import triton.language as tl

from longspan.ops.launch import remembered
from longspan.ops.window.kernels import (
    FLOOR,
    absorb,
    is_kept,
    key_step,
    load_rows,
    load_tile,
    row_key,
    store_rows,
)

# Compiled once for all of these. Strides of rows decide how memory is read and are not among them.
NUMBERS = [
    *("queries", "keys", "heads", "size", "count", "slots", "width", "wide", "ramp", "drop"),
    *("at", "l_batch", "l_head", "e_row"),
]
ALWAYS = tl.constexpr(1 << 30)
CHUNK = tl.constexpr(512)  # slots that `extent` looks at together


@triton.jit
def count_programs(size, queries, BM: tl.constexpr):
    """Of those that own queries, in each batch row and head."""
    return tl.cdiv(queries, size) * tl.cdiv(size, BM)


@triton.jit
def owned(number, size, queries, BM: tl.constexpr):
    """Program number -> its block, its first query and the end of its queries."""
    parts = tl.cdiv(size, BM)
    block = number // parts
    first = block * size + number % parts * BM
    return block, first, tl.minimum(tl.minimum(first + BM, block * size + size), queries)


@triton.jit
def seen_by(
    FIRST, LAST, entry, key, there, ramp, span, at, CAUSAL: tl.constexpr, FADING: tl.constexpr
):
    """From which query on entries are seen, and by how many."""
    if CAUSAL:
        return key - at, tl.where(there, ALWAYS, 0)
    low = tl.load(FIRST + entry, mask=there, other=0).to(tl.int32)
    last = tl.load(LAST + entry, mask=there, other=-1).to(tl.int32)
    if FADING:  # to nothing, at a distance of ramp + span
        last = tl.minimum(last, low + tl.ceil(ramp + span).to(tl.int32) - 1)
    return low, tl.where(there, tl.maximum(last - low + 1, 0), 0)


@triton.jit
def take(
    LISTED, FIRST, LAST, VALID, s, keys, count, width, wide, ramp, span, at,
    BN: tl.constexpr, RUNS: tl.constexpr, BETWEEN: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, FADING: tl.constexpr,
):  # fmt: skip
    """Of slots s, s + 1, ...: the first key, all keys, which of these exist, and who sees them."""
    offset = tl.arange(0, BN)
    if RUNS:
        entry = offset * 0 + s // wide
        run = tl.load(LISTED + s // wide).to(tl.int32)
        begin = run * width + s % wide
        key = begin + offset
        there = (run >= 0) & (s % wide + offset < width) & (key < keys)
    else:
        entry = s + offset
        key = tl.load(LISTED + entry, mask=entry < count, other=-1).to(tl.int32)
        there = key >= 0
        begin = s
    low = offset * 0
    seen = tl.where(there, ALWAYS, 0)
    if BETWEEN:
        low, seen = seen_by(FIRST, LAST, entry, key, there, ramp, span, at, CAUSAL, FADING)
    if MASKED:
        seen = tl.where(tl.load(VALID + key, mask=there, other=0) != 0, seen, 0)
    return begin, key, there, low, seen


@triton.jit
def slot_numbers(s, width, wide, BN: tl.constexpr, RUNS: tl.constexpr):
    """What dropout counts slots s, s + 1, ... by: forward and backward may have other tiles, and
    fill runs up to other widths."""
    if RUNS:
        s = s // wide * width + s % wide
    return s + tl.arange(0, BN)


@triton.jit
def sees(query, low, seen):
    """low <= query < low + seen in one comparison: unsigned, what lies below wraps to the top."""
    return (query - low).to(tl.uint32, bitcast=True) < seen.to(tl.uint32, bitcast=True)


@triton.jit
def load_keys(
    base, begin, key, there, stride,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    if RUNS:
        return load_tile(base, begin, 1, stride, there, HEAD_DIM, D, BN)
    return load_rows(base, key, stride, there, HEAD_DIM, D)


@triton.jit
def add_rows(base, rows, stride, live, tile, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    pointer = base + rows[:, None].to(tl.int64) * stride + column[None, :]
    ok = live[:, None] & (column < HEAD_DIM)[None, :]
    tl.atomic_add(pointer, tile, mask=ok, sem="relaxed")


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def extent(
    LISTED, FIRST, LAST, SPANS, EXTENT, l_batch, l_head, queries, heads, size, count, ramp, at,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, FADING: tl.constexpr,
):  # fmt: skip
    """Between which slots the BM queries of a program see something, from a multiple of BN on."""
    programs = count_programs(size, queries, BM)
    block, first, end = owned(tl.program_id(0) % programs, size, queries, BM)
    stream = (tl.program_id(0) // programs).to(tl.int64)
    batch, head = stream // heads, stream % heads
    LISTED += batch * l_batch + head * l_head + block.to(tl.int64) * count
    FIRST += block.to(tl.int64) * count
    LAST += block.to(tl.int64) * count
    span = 0.0
    if FADING:
        span = tl.load(SPANS + head).to(tl.float32)
    begin = count
    stop = 0
    for s in range(0, count, CHUNK):
        entry = s + tl.arange(0, CHUNK)
        there = entry < count
        key = tl.load(LISTED + entry, mask=there, other=-1).to(tl.int32)
        there = key >= 0
        low, seen = seen_by(FIRST, LAST, entry, key, there, ramp, span, at, CAUSAL, FADING)
        there = (seen > 0) & (low < end) & (low + seen > first)
        begin = tl.minimum(begin, tl.min(tl.where(there, entry, count), 0))
        stop = tl.maximum(stop, tl.max(tl.where(there, entry + 1, 0), 0))
    to = EXTENT + tl.program_id(0).to(tl.int64) * 2
    tl.store(to, begin // BN * BN)
    tl.store(to + 1, stop)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def forward(
    Q, K, V, OUT, LSE, LISTED, FIRST, LAST, VALID, SPANS, EXTENT, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    l_batch, l_head, e_row,
    queries, keys, heads, size, count, slots, width, wide, ramp, at, scale, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RUNS: tl.constexpr, BETWEEN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    FADING: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of BM queries of one block and head."""
    programs = count_programs(size, queries, BM)
    number, stream = tl.program_id(0) % programs, (tl.program_id(0) // programs).to(tl.int64)
    batch, head = stream // heads, stream % heads
    block, first, end = owned(number, size, queries, BM)
    if first >= end:
        return
    i = first + tl.arange(0, BM)
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    LISTED += batch * l_batch + head * l_head + block.to(tl.int64) * count
    FIRST += block.to(tl.int64) * count
    LAST += block.to(tl.int64) * count
    VALID += batch * keys
    q = load_rows(Q, i, q_token, i < end, HEAD_DIM, D)
    begin = 0
    stop = slots
    if BETWEEN and not RUNS:
        EXTENT += (stream * e_row + number) * 2
        begin = tl.load(EXTENT)
        stop = tl.load(EXTENT + 1)
    span = 0.0
    if FADING:
        span = tl.load(SPANS + head).to(tl.float32)
    row = i
    if DROPOUT:
        row = row_key(SEED, stream, i)

    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), FLOOR, tl.float32)
    for s in range(begin, stop, BN):
        start, key, there, low, seen = take(
            LISTED, FIRST, LAST, VALID, s, keys, count, width, wide, ramp, span, at,
            BN, RUNS, BETWEEN, CAUSAL, MASKED, FADING,
        )  # fmt: skip
        k = load_keys(K, start, key, there, k_token, HEAD_DIM, D, BN, RUNS)
        v = load_keys(V, start, key, there, v_token, HEAD_DIM, D, BN, RUNS)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BETWEEN:
            x = tl.where(sees(i[:, None], low[None, :], seen[None, :]), x, float("-inf"))
        else:
            x = tl.where(seen[None, :] > 0, x, float("-inf"))
        if FADING:
            left = (ramp + span - (i[:, None] - low[None, :])) / ramp
            x += tl.log2(tl.minimum(tl.maximum(left, 0.0), 1.0)) / scale
        slot = slot_numbers(s, width, wide, BN, RUNS)
        acc, peak, total = absorb(
            x, v, acc, peak, total, scale, row, slot, drop, DROPOUT, PRECISION
        )

    out = acc * (tl.where(total > 0, boost / total, 0.0))[:, None]
    OUT += batch * queries * heads * HEAD_DIM + head * HEAD_DIM
    store_rows(OUT, i, heads * HEAD_DIM, i < end, out, HEAD_DIM, D)
    lse = tl.where(total > 0, peak * scale + tl.log2(total), float("inf"))
    tl.store(LSE + stream * queries + i, lse, mask=i < end)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def backward_query(
    Q, K, V, OUT, GRAD, LSE, DELTA, DQ, DK, DV, DSPANS,
    LISTED, FIRST, LAST, VALID, SPANS, EXTENT, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, l_batch, l_head, e_row,
    queries, keys, heads, size, count, slots, width, wide, ramp, at, scale, factor, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RUNS: tl.constexpr, BETWEEN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    FADING: tl.constexpr, DROPOUT: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of BM queries, what they add to that of the spans, and delta = sum(out * grad) per
    row, which the keys' kernel needs. KEYS: also what they add to the gradients of keys."""
    programs = count_programs(size, queries, BM)
    number, stream = tl.program_id(0) % programs, (tl.program_id(0) // programs).to(tl.int64)
    batch, head = stream // heads, stream % heads
    block, first, end = owned(number, size, queries, BM)
    if first >= end:
        return
    i = first + tl.arange(0, BM)
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    GRAD += batch * g_batch + head * g_head
    LISTED += batch * l_batch + head * l_head + block.to(tl.int64) * count
    FIRST += block.to(tl.int64) * count
    LAST += block.to(tl.int64) * count
    VALID += batch * keys
    dense = heads * HEAD_DIM
    own = batch * queries * dense + head * HEAD_DIM
    DK += batch * keys * dense + head * HEAD_DIM
    DV += batch * keys * dense + head * HEAD_DIM
    q = load_rows(Q, i, q_token, i < end, HEAD_DIM, D)
    g = load_rows(GRAD, i, g_token, i < end, HEAD_DIM, D)
    o = load_rows(OUT + own, i, dense, i < end, HEAD_DIM, D)
    lse = tl.load(LSE + stream * queries + i, mask=i < end, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(DELTA + stream * queries + i, delta, mask=i < end)
    begin = 0
    stop = slots
    if BETWEEN and not RUNS:
        EXTENT += (stream * e_row + number) * 2
        begin = tl.load(EXTENT)
        stop = tl.load(EXTENT + 1)
    span = 0.0
    if FADING:
        span = tl.load(SPANS + head).to(tl.float32)
    row = i
    if DROPOUT:
        row = row_key(SEED, stream, i)

    dq = tl.zeros((BM, D), tl.float32)
    by_span = tl.zeros((BM,), tl.float32)
    for s in range(begin, stop, BN):
        start, key, there, low, seen = take(
            LISTED, FIRST, LAST, VALID, s, keys, count, width, wide, ramp, span, at,
            BN, RUNS, BETWEEN, CAUSAL, MASKED, FADING,
        )  # fmt: skip
        k = load_keys(K, start, key, there, k_token, HEAD_DIM, D, BN, RUNS)
        v = load_keys(V, start, key, there, v_token, HEAD_DIM, D, BN, RUNS)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(x * scale - lse[:, None])
        if BETWEEN:
            p = tl.where(sees(i[:, None], low[None, :], seen[None, :]), p, 0.0)
        else:
            p = tl.where(seen[None, :] > 0, p, 0.0)
        dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            slot = slot_numbers(s, width, wide, BN, RUNS)
            keep = is_kept(row[:, None], slot[None, :], drop)
            dp = tl.where(keep, dp * boost, 0.0)
        if FADING:
            left = (ramp + span - (i[:, None] - low[None, :])) / ramp
            # A weight that is p * left grows by p / ramp with the span.
            more = p * (dp - delta[:, None]) / ramp
            by_span += tl.sum(tl.where(left <= 1.0, more, 0.0), 1)
            p *= tl.minimum(left, 1.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if KEYS:
            kept = p
            if DROPOUT:
                kept = tl.where(keep, p * boost, 0.0)
            dv = tl.dot(tl.trans(kept.to(g.dtype)), g, input_precision=PRECISION)
            add_rows(DV, key, dense, seen > 0, dv, HEAD_DIM, D)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
            add_rows(DK, key, dense, seen > 0, dk * factor, HEAD_DIM, D)

    store_rows(DQ + own, i, dense, i < end, dq * factor, HEAD_DIM, D)
    if FADING:
        tl.store(DSPANS + stream * programs + number, tl.sum(by_span, 0))


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def backward_key(
    Q, K, V, GRAD, LSE, DELTA, DK, DV, LISTED, FIRST, LAST, VALID, SPANS, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, l_batch, l_head,
    queries, keys, heads, size, count, slots, width, wide, ramp, at, scale, factor, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RUNS: tl.constexpr, BETWEEN: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    FADING: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What all queries of one block and head add to the gradients of BN listed keys and values."""
    tiles = tl.cdiv(slots, BN)
    programs = tl.cdiv(queries, size) * tiles
    number, stream = tl.program_id(0) % programs, (tl.program_id(0) // programs).to(tl.int64)
    batch, head = stream // heads, stream % heads
    block = number // tiles
    s = number % tiles * BN
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    GRAD += batch * g_batch + head * g_head
    LSE += stream * queries
    DELTA += stream * queries
    span = 0.0
    if FADING:
        span = tl.load(SPANS + head).to(tl.float32)
    start, key, there, low, seen = take(
        LISTED + batch * l_batch + head * l_head + block.to(tl.int64) * count,
        FIRST + block.to(tl.int64) * count, LAST + block.to(tl.int64) * count,
        VALID + batch * keys, s, keys, count, width, wide, ramp, span, at,
        BN, RUNS, BETWEEN, CAUSAL, MASKED, FADING,
    )  # fmt: skip
    begin = block * size
    end = tl.minimum(begin + size, queries)
    if BETWEEN:
        begin = tl.maximum(begin, tl.min(tl.where(seen > 0, low, end), 0))
        end = tl.minimum(end, tl.max(tl.where(seen > 0, low + seen, 0), 0))
    else:
        end = tl.where(tl.max(seen, 0) > 0, end, begin)
    if begin >= end:
        return
    k = load_keys(K, start, key, there, k_token, HEAD_DIM, D, BN, RUNS)
    v = load_keys(V, start, key, there, v_token, HEAD_DIM, D, BN, RUNS)
    slot = slot_numbers(s, width, wide, BN, RUNS)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for first in range(begin, end, BM):
        i = first + tl.arange(0, BM)
        q = load_tile(Q, first, 1, q_token, i < end, HEAD_DIM, D, BM)
        g = load_tile(GRAD, first, 1, g_token, i < end, HEAD_DIM, D, BM)
        lse = tl.load(LSE + i, mask=i < end, other=float("inf"))
        delta = tl.load(DELTA + i, mask=i < end, other=0.0)
        x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        # Slots that nobody sees are not added to any key in the end.
        p = tl.exp2(x * scale - lse[None, :])
        if BETWEEN:
            p = tl.where(sees(i[None, :], low[:, None], seen[:, None]), p, 0.0)
        if FADING:
            left = (ramp + span - (i[None, :] - low[:, None])) / ramp
            p *= tl.minimum(left, 1.0)
        dk, dv = key_step(
            p, q, g, v, delta, dk, dv, SEED, stream, i, slot, drop, boost, DROPOUT, PRECISION
        )
    to = batch * keys * heads * HEAD_DIM + head * HEAD_DIM
    add_rows(DK + to, key, heads * HEAD_DIM, seen > 0, dk * factor, HEAD_DIM, D)
    add_rows(DV + to, key, heads * HEAD_DIM, seen > 0, dv, HEAD_DIM, D)
