"""The fused kernels behind `relative_fused.py`: causal attention within a band, whose scores have a
part by distance that stands in memory.

- A call is cut into *chunks*: some batch rows, and `count` queries of each from query `first` on.
  The last query is the last key, so query i stands at key `keys - queries + i`.
- PLACED [heads, rows, count, width] are the parts by distance of a chunk, by falling distance: a
  query's last column is its distance 0. So a query's row, begun at the right column, goes by key.
- Where positions are dilated, batch rows are residue classes, `step` for each document, and the
  first key of the first `missing` classes is made up.
- Nothing asks inside a loop: what a query must not see has the part -inf (or, of probabilities and
  gradients, 0), by the mask of the load.
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
    load_rows,
    load_tile,
    row_key,
    store_rows,
)

# Compiled once for all of these. Strides of rows decide how memory is read and are not among them.
NUMBERS = [
    *("row0", "rows", "first", "count", "width", "queries", "keys", "heads", "left", "step"),
    *("missing", "drop", "begin"),
]


@triton.jit
def begun(row, step, missing):
    """The first key of a batch row that is not made up."""
    return (row % step < missing).to(tl.int32)


@triton.jit
def visible(position, live, key, left, start, BM: tl.constexpr, BN: tl.constexpr):
    """Which keys (across, from `key` on) each of `live` queries (down, from `position` on) sees."""
    query = tl.arange(0, BM)[:, None]
    column = tl.arange(0, BN)[None, :]
    # From 0 to left in one comparison: unsigned, what is negative wraps to the top.
    distance = (position - key + query - column).to(tl.uint32, bitcast=True)
    return (distance <= left.to(tl.uint32)) & (query < live) & (column >= start - key)


@triton.jit
def pairs(base, local, position, key, width, BM: tl.constexpr, BN: tl.constexpr):
    """Where in a head's and batch row's part of PLACED a tile stands, whose first query is number
    `local` of the chunk, at key `position`, and whose first key is `key`. What differs between
    threads is the same for all tiles."""
    offset = tl.arange(0, BM)[:, None] * (width - 1) + tl.arange(0, BN)[None, :]
    return base + ((local * width + width - 1 - position + key) + offset)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def forward(
    Q, K, V, PLACED, OUT, LSE, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    row0, rows, first, count, width, queries, keys, heads, left, step, missing,
    scale, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of BM queries of one head."""
    blocks = tl.cdiv(count, BM)
    stream = (tl.program_id(0) // blocks).to(tl.int64)
    row, head = stream // heads, stream % heads
    batch = row0 + row
    local = tl.program_id(0) % blocks * BM
    here = local + tl.arange(0, BM) < count
    i = first + local + tl.arange(0, BM)
    position = keys - queries + first + local
    begin = tl.maximum(position - left, 0)
    end = keys - queries + first + tl.minimum(local + BM, count)
    start = begun(batch, step, missing)
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    PLACED += (head * rows + row) * count * width
    q = load_rows(Q, i, q_token, here, HEAD_DIM, D)
    seed_row = i
    if DROPOUT:
        seed_row = row_key(SEED, batch * heads + head, i)

    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), FLOOR, tl.float32)
    for s in range(begin, end, BN):
        j = s + tl.arange(0, BN)
        k = load_tile(K, s, 1, k_token, j < keys, HEAD_DIM, D, BN)
        v = load_tile(V, s, 1, v_token, j < keys, HEAD_DIM, D, BN)
        ok = visible(position, count - local, s, left, start, BM, BN)
        at = pairs(PLACED, local, position, s, width, BM, BN)
        placed = tl.load(at, mask=ok, other=float("-inf"))
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) + placed.to(tl.float32)
        acc, peak, total = absorb(
            x, v, acc, peak, total, scale, seed_row, j, drop, DROPOUT, PRECISION
        )

    out = acc * (tl.where(total > 0, boost / total, 0.0))[:, None]
    OUT += batch * queries * heads * HEAD_DIM + head * HEAD_DIM
    store_rows(OUT, i, heads * HEAD_DIM, here, out, HEAD_DIM, D)
    lse = tl.where(total > 0, peak * scale + tl.log2(total), float("inf"))
    tl.store(LSE + (batch * heads + head) * queries + i, lse, mask=here)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def backward_query(
    Q, K, V, PLACED, DPLACED, OUT, GRAD, LSE, DQ, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head,
    row0, rows, first, count, width, queries, keys, heads, left, step, missing,
    scale, factor, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of BM queries. In PLACED it leaves the weights that values were taken by, in
    DPLACED the gradients of the scores but for the scale: all that keys and positions need."""
    blocks = tl.cdiv(count, BM)
    stream = (tl.program_id(0) // blocks).to(tl.int64)
    row, head = stream // heads, stream % heads
    batch = row0 + row
    local = tl.program_id(0) % blocks * BM
    here = local + tl.arange(0, BM) < count
    i = first + local + tl.arange(0, BM)
    position = keys - queries + first + local
    begin = tl.maximum(position - left, 0)
    end = keys - queries + first + tl.minimum(local + BM, count)
    start = begun(batch, step, missing)
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    GRAD += batch * g_batch + head * g_head
    dense = heads * HEAD_DIM
    own = batch * queries * dense + head * HEAD_DIM
    PLACED += (head * rows + row) * count * width
    DPLACED += (head * rows + row) * count * width
    q = load_rows(Q, i, q_token, here, HEAD_DIM, D)
    g = load_rows(GRAD, i, g_token, here, HEAD_DIM, D)
    o = load_rows(OUT + own, i, dense, here, HEAD_DIM, D)
    lse = tl.load(LSE + (batch * heads + head) * queries + i, mask=here, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    seed_row = i
    if DROPOUT:
        seed_row = row_key(SEED, batch * heads + head, i)

    dq = tl.zeros((BM, D), tl.float32)
    for s in range(begin, end, BN):
        j = s + tl.arange(0, BN)
        k = load_tile(K, s, 1, k_token, j < keys, HEAD_DIM, D, BN)
        v = load_tile(V, s, 1, v_token, j < keys, HEAD_DIM, D, BN)
        ok = visible(position, count - local, s, left, start, BM, BN)
        at = pairs(PLACED, local, position, s, width, BM, BN)
        placed = tl.load(at, mask=ok, other=float("-inf"))
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) + placed.to(tl.float32)
        p = tl.exp2(x * scale - lse[:, None])
        dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        kept = p
        if DROPOUT:
            keep = is_kept(seed_row[:, None], j[None, :], drop)
            kept = tl.where(keep, p * boost, 0.0)
            dp = tl.where(keep, dp * boost, 0.0)
        ds = (p * (dp - tl.expand_dims(delta, 1))).to(k.dtype)
        tl.store(at, kept.to(k.dtype), mask=ok)
        tl.store(pairs(DPLACED, local, position, s, width, BM, BN), ds, mask=ok)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)

    store_rows(DQ + own, i, dense, here, dq * factor, HEAD_DIM, D)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def backward_key(
    Q, WEIGHTS, DPLACED, GRAD, DK, DV,
    q_batch, q_token, q_head, g_batch, g_token, g_head,
    row0, rows, first, count, width, queries, keys, heads, left, step, missing, begin, factor,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what a chunk's queries do to the gradients of BN keys and values of one head, of keys
    `begin` to the chunk's last query's. One program has them in each launch: nothing is atomic."""
    offset = keys - queries
    end = offset + first + count
    blocks = tl.cdiv(end - begin, BN)
    stream = (tl.program_id(0) // blocks).to(tl.int64)
    row, head = stream // heads, stream % heads
    batch = row0 + row
    j0 = begin + tl.program_id(0) % blocks * BN
    j = j0 + tl.arange(0, BN)
    start = begun(batch, step, missing)
    Q += batch * q_batch + head * q_head
    GRAD += batch * g_batch + head * g_head
    WEIGHTS += (head * rows + row) * count * width
    DPLACED += (head * rows + row) * count * width
    to = batch * keys * heads * HEAD_DIM + head * HEAD_DIM

    dk = tl.zeros((D, BN), tl.float32)
    dv = tl.zeros((D, BN), tl.float32)
    # The chunk's queries from the first key's own on, as far as the last key is seen.
    low = tl.maximum(j0 - offset - first, 0)
    high = tl.minimum(j0 + BN - offset - first + left, count)
    for s in range(low, high, BM):
        here = s + tl.arange(0, BM) < count
        position = offset + first + s
        q = load_tile(Q, first + s, 1, q_token, here, HEAD_DIM, D, BM)
        g = load_tile(GRAD, first + s, 1, g_token, here, HEAD_DIM, D, BM)
        ok = visible(position, count - s, j0, left, start, BM, BN)
        at = pairs(WEIGHTS, s, position, j0, width, BM, BN)
        weights = tl.load(at, mask=ok, other=0.0)
        at = pairs(DPLACED, s, position, j0, width, BM, BN)
        ds = tl.load(at, mask=ok, other=0.0)
        dv = tl.dot(tl.trans(g), weights, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(q), ds, dk, input_precision=PRECISION)
    live = j < end
    dense = heads * HEAD_DIM
    dk = tl.trans(dk) * factor + load_rows(DK + to, j, dense, live, HEAD_DIM, D)
    dv = tl.trans(dv) + load_rows(DV + to, j, dense, live, HEAD_DIM, D)
    store_rows(DK + to, j, dense, live, dk, HEAD_DIM, D)
    store_rows(DV + to, j, dense, live, dv, HEAD_DIM, D)
