"""The fused kernels behind `triton.py`. One program computes one tile; nothing is ever atomic, so
results do not depend on the order in which programs run.

Reading aids:

- *Dilation by residue classes.* Tokens r, r + d, r + 2d, ... form class r. Inside a class a dilated
  window is a plain one, so a program works on consecutive *members* of one class: member t of
  class r is token r + d * t.
- *Edges.* Most tiles of a band are visible throughout. A tile pays for masking only if it crosses
  the band's edge, the end of the row or of a document.
- *Global tokens without double counting.* A global key inside a query's window is seen there, like
  any other; the extra tile of gathered global keys skips the pairs that are in the window. The
  same holds for global queries in the backward pass, so the main loops never ask who is global.
- *Global rows* are recomputed over all keys by `global_forward`, split over the sequence, and
  overwrite what `forward` left there. How many there are is read on the device.
- Scores are kept in base 2: `scale` includes log2(e), and so does the stored log-sum-exp, which is
  +inf for rows that see nothing: their probabilities recompute to exactly zero.
"""

import triton
import triton.language as tl

from longspan.ops.launch import remembered

# Finite, so that (-inf) - FLOOR stays -inf where inf - inf would be NaN.
FLOOR = tl.constexpr(-1.0e30)
# Beyond any member: where the window of a row that sees nothing begins.
NEVER = tl.constexpr(1 << 30)

# Lengths and windows vary from call to call: compiling anew for "divisible by 16" or "equal to 1"
# would cost seconds and gain nothing. Strides keep that, it decides how wide memory is read.
PLAIN_NUMBERS = ["n", "heads", "head0", "run", "group", "left", "right", "dilation", "drop"]
SOME_NUMBERS = ["n", "heads", "splits", "group", "drop"]


@triton.jit
def mix(x):
    """`dropout.mix`, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_key(SEED, stream, query):
    """The part of `dropout.kept` that depends on the query alone."""
    seed = tl.load(SEED).to(tl.uint32)
    return mix(mix(seed + stream.to(tl.uint32)) + query.to(tl.uint32))


@triton.jit
def is_kept(row, key, drop):
    """`dropout.kept` for row keys and key positions that broadcast together."""
    return (mix(row ^ (key.to(tl.uint32) * 0x9E3779B9)) >> 8).to(tl.int32) >= drop


@triton.jit
def locate(block, n, dilation, BLOCK: tl.constexpr, DILATED: tl.constexpr):
    """Program number -> (residue class, its first member here, members in the class)."""
    if DILATED:
        blocks = tl.cdiv(tl.cdiv(n, dilation), BLOCK)
        residue = block // blocks
        return residue, (block % blocks) * BLOCK, (n - residue + dilation - 1) // dilation
    return block * 0, block * BLOCK, n


@triton.jit
def load_tile(
    base, first, step, stride, live, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Tokens first, first + step, ... of one head, [BLOCK, D]; zeros as in `load_rows`.

    The 64-bit part of the address is one scalar; what differs between threads is loop-invariant.
    """
    column = tl.arange(0, D)
    offset = tl.arange(0, BLOCK)[:, None] * (step * stride) + column[None, :]
    pointer = base + tl.cast(first, tl.int64) * stride + offset
    if HEAD_DIM == D:
        return tl.load(pointer, mask=live[:, None], other=0.0)
    return tl.load(pointer, mask=live[:, None] & (column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def stream_tile(
    TILES, base, batch, column, first, residue, step, stride, live,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Members first, first + 1, ... of one head, [BLOCK, D]; zeros beyond the row.

    BULK: TILES is a tensor descriptor over [batch, members, columns of a member of every class] and
    the GPU's copy engine fetches the tile, which spares the threads all the addresses."""
    if BULK:
        column += residue * tl.cast(stride, tl.int32)
        return TILES.load([batch.to(tl.int32), first, column]).reshape(BLOCK, D)
    return load_tile(base, residue + step * first, step, stride, live, HEAD_DIM, D, BLOCK)


@triton.jit
def load_rows(base, rows, stride, live, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Rows [len(rows), D] of one head; dead rows and the columns beyond HEAD_DIM are zero."""
    column = tl.arange(0, D)
    pointer = base + rows[:, None].to(tl.int64) * stride + column[None, :]
    if HEAD_DIM == D:
        return tl.load(pointer, mask=live[:, None], other=0.0)
    return tl.load(pointer, mask=live[:, None] & (column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(base, rows, stride, live, tile, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    pointer = base + rows[:, None].to(tl.int64) * stride + column[None, :]
    ok = live[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(pointer, tile.to(base.dtype.element_ty), mask=ok)


@triton.jit
def pad_row(row, n, length, value):
    """Fill a row of log-sum-exps or deltas behind its n numbers. Rows have a multiple of 16, so
    that the keys' kernel can read them in wide pieces: a mask that changes within a piece would
    force single loads, and cost a third of that kernel."""
    pad = n + tl.arange(0, 16)
    tl.store(row + pad, tl.full((16,), value, tl.float32), mask=pad < length)


@triton.jit
def load_bounds(START, STOP, row, tokens, live):
    start = tl.load(START + row + tokens, mask=live, other=0)
    stop = tl.load(STOP + row + tokens, mask=live, other=0)
    return start, stop


@triton.jit
def reach(
    m, here, before, after, length, residue, dilation, START, STOP, row, BOUNDED: tl.constexpr
):
    """For each member m the members lo..hi its window holds (none: NEVER..-1), and the tokens
    start..stop of its document."""
    lo = tl.maximum(m - before, 0)
    hi = tl.where(here, tl.minimum(m + after, length - 1), -1)
    start = m * 0
    stop = start
    if BOUNDED:
        start, stop = load_bounds(START, STOP, row, residue + dilation * m, here)
        lo = tl.maximum(lo, (start - residue + dilation - 1) // dilation)
        hi = tl.minimum(hi, (stop - residue + dilation - 1) // dilation - 1)
        lo, hi = tl.where(lo <= hi, lo, NEVER), tl.where(lo <= hi, hi, -1)
    return lo, hi, start, stop


@triton.jit
def within(m, lo, hi):
    """lo <= m <= hi in one comparison: unsigned, what lies below lo wraps to the top."""
    return (m - lo).to(tl.uint32) <= (hi - lo).to(tl.uint32)


@triton.jit
def beyond(
    query, key, other, live, start, stop, left, right, dilation,
    DILATED: tl.constexpr, BOUNDED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Pairs of a tile with gathered global tokens that count: visible, and not in the window.

    `other` is the side that start..stop, the document of each row, is compared with."""
    offset = key - query
    inside = (offset >= -left * dilation) & (offset <= right * dilation)
    if DILATED:
        inside = inside & (offset % dilation == 0)
    ok = live[None, :] & ~inside
    if CAUSAL:
        ok = ok & (offset <= 0)
    if BOUNDED:
        ok = ok & (other >= start[:, None]) & (other < stop[:, None])
    return ok


@triton.jit
def query_step(
    p, g, k, v, delta, dq, row, key, drop, boost,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of queries (down) what the keys of one tile (across) contribute."""
    dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        dp = tl.where(is_kept(row[:, None], key[None, :], drop), dp * boost, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def key_step(
    p, q, g, v, delta, dk, dv, SEED, stream, query, key, drop, boost,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of keys and values (down) what the queries of one tile (across) do."""
    dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
    kept = p
    if DROPOUT:
        keep = is_kept(row_key(SEED, stream, query)[None, :], key[:, None], drop)
        kept = tl.where(keep, p * boost, 0.0)
        dp = tl.where(keep, dp * boost, 0.0)
    dv = tl.dot(kept.to(g.dtype), g, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit
def absorb(
    x, v, acc, peak, total, scale, row, key, drop, DROPOUT: tl.constexpr, PRECISION: tl.constexpr
):
    """One step of the online softmax: take in raw scores `x` (-inf = unseen) and values `v`."""
    new = tl.maximum(peak, tl.max(x, 1))
    p = tl.exp2(x * scale - (new * scale)[:, None])
    fade = tl.exp2((peak - new) * scale)
    total = total * fade + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(is_kept(row[:, None], key[None, :], drop), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new, total


@remembered
@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def forward(
    Q, K, V, OUT, LSE, START, STOP, HOLES, RANK, PLACES, SEED, K_TILES, V_TILES,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    n, lse_row, heads, head0, run, group, left, right, dilation, scale, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    DILATED: tl.constexpr, BOUNDED: tl.constexpr, GLOBAL: tl.constexpr, ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of BM queries of one head: their window, then the global keys. Not
    ROWS: those of global queries come from elsewhere and are left as if they saw nothing."""
    batch = (tl.program_id(1) // run).to(tl.int64)
    head = head0 + tl.program_id(1) % run
    stream = batch * heads + head
    if not DILATED:
        dilation = 1
    residue, first, length = locate(tl.program_id(0), n, dilation, BM, DILATED)
    if first >= length:
        return
    mq = first + tl.arange(0, BM)
    i = residue + dilation * mq
    here = mq < length
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + (head // group) * k_head
    V += batch * v_batch + (head // group) * v_head
    q = load_rows(Q, i, q_token, here, HEAD_DIM, D)

    lo, hi, start, stop = reach(
        mq, here, left, right, length, residue, dilation, START, STOP, batch * n, BOUNDED
    )
    begin = tl.maximum(first - left, 0)
    end = tl.minimum(first + BM + right, length)
    safe_lo = first + BM - 1 - left
    safe_hi = tl.minimum(first + right, length - 1)
    if BOUNDED:
        begin = tl.min(lo, 0)
        end = tl.max(hi, 0) + 1
        safe_lo = tl.max(lo, 0)
        safe_hi = tl.min(hi, 0)
        holes = tl.load(HOLES + batch)

    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), FLOOR, tl.float32)
    row = i
    if DROPOUT:
        row = row_key(SEED, stream, i)
    column = (head // group) * HEAD_DIM
    for s in range(begin, end, BN):
        mk = s + tl.arange(0, BN)
        j = residue + dilation * mk
        k = stream_tile(
            K_TILES, K, batch, column, s, residue, dilation, k_token, mk < length,
            HEAD_DIM, D, BN, BULK,
        )  # fmt: skip
        v = stream_tile(
            V_TILES, V, batch, column, s, residue, dilation, v_token, mk < length,
            HEAD_DIM, D, BN, BULK,
        )  # fmt: skip
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        edge = (s < safe_lo) | (s + BN - 1 > safe_hi)
        if BOUNDED:
            edge = edge | (holes != 0)
        if edge:
            ok = within(tl.arange(0, BN)[None, :], (lo - s)[:, None], (hi - s)[:, None])
            if BOUNDED:
                visible = tl.load(STOP + batch * n + j, mask=mk < length, other=0) > 0
                ok = ok & visible[None, :]
            x = tl.where(ok, x, float("-inf"))
        acc, peak, total = absorb(x, v, acc, peak, total, scale, row, j, drop, DROPOUT, PRECISION)

    if GLOBAL:
        RANK += batch * (n + 1)
        slot0 = 0
        slot1 = tl.load(RANK + n)
        if CAUSAL:
            slot1 = tl.load(RANK + tl.minimum(residue + dilation * (first + BM - 1) + 1, n))
        if BOUNDED:
            slot0 = tl.load(RANK + tl.min(tl.where(stop > 0, start, n), 0))
            slot1 = tl.minimum(slot1, tl.load(RANK + tl.max(stop, 0)))
        for s in range(slot0, slot1, BG):
            slot = s + tl.arange(0, BG)
            j = tl.load(PLACES + batch * n + slot, mask=slot < slot1, other=0)
            k = load_rows(K, j, k_token, slot < slot1, HEAD_DIM, D)
            v = load_rows(V, j, v_token, slot < slot1, HEAD_DIM, D)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            ok = beyond(
                i[:, None], j[None, :], j[None, :], slot < slot1, start, stop,
                left, right, dilation, DILATED, BOUNDED, CAUSAL,
            )  # fmt: skip
            x = tl.where(ok, x, float("-inf"))
            acc, peak, total = absorb(
                x, v, acc, peak, total, scale, row, j, drop, DROPOUT, PRECISION
            )

    seen = total > 0
    if GLOBAL and not ROWS:
        # Somebody else fills the rows of global queries: hide these from the backward pass too.
        ranks = tl.load(RANK + i + 1, mask=here, other=0) - tl.load(RANK + i, mask=here, other=0)
        seen = seen & (ranks == 0)
    out = acc * (tl.where(seen, boost / total, 0.0))[:, None]
    OUT += batch * n * heads * HEAD_DIM + head * HEAD_DIM
    store_rows(OUT, i, heads * HEAD_DIM, here, out, HEAD_DIM, D)
    lse = tl.where(seen, peak * scale + tl.log2(total), float("inf"))
    tl.store(LSE + stream * lse_row + i, lse, mask=here)
    if tl.program_id(0) == 0:
        pad_row(LSE + stream * lse_row, n, lse_row, float("inf"))


@remembered
@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def backward_query(
    Q, K, V, OUT, GRAD, LSE, DELTA, LINES, DQ, START, STOP, HOLES, RANK, PLACES, SEED,
    K_TILES, V_TILES,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, d_token,
    n, lse_row, line_row, heads, head0, run, group, left, right, dilation,
    scale, factor, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    DILATED: tl.constexpr, BOUNDED: tl.constexpr, GLOBAL: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of BM queries, and delta = sum(out * grad) per row, which the keys' kernel needs.
    Dilated, that kernel wants a class's log-sum-exps and deltas side by side: LINES."""
    batch = (tl.program_id(1) // run).to(tl.int64)
    head = head0 + tl.program_id(1) % run
    stream = batch * heads + head
    if not DILATED:
        dilation = 1
    residue, first, length = locate(tl.program_id(0), n, dilation, BM, DILATED)
    if first >= length:
        return
    mq = first + tl.arange(0, BM)
    i = residue + dilation * mq
    here = mq < length
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + (head // group) * k_head
    V += batch * v_batch + (head // group) * v_head
    GRAD += batch * g_batch + head * g_head
    dense = batch * n * heads * HEAD_DIM + head * HEAD_DIM
    q = load_rows(Q, i, q_token, here, HEAD_DIM, D)
    g = load_rows(GRAD, i, g_token, here, HEAD_DIM, D)
    o = load_rows(OUT + dense, i, heads * HEAD_DIM, here, HEAD_DIM, D)
    lse = tl.load(LSE + stream * lse_row + i, mask=here, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(DELTA + stream * lse_row + i, delta, mask=here)
    if tl.program_id(0) == 0:
        pad_row(DELTA + stream * lse_row, n, lse_row, 0.0)
    if DILATED:
        line = LINES + (tl.program_id(1).to(tl.int64) * dilation + residue) * 2 * line_row
        tl.store(line + mq, lse, mask=here)
        tl.store(line + line_row + mq, delta, mask=here)
        if first == 0:
            pad_row(line, length, line_row, float("inf"))
            pad_row(line + line_row, length, line_row, 0.0)

    lo, hi, start, stop = reach(
        mq, here, left, right, length, residue, dilation, START, STOP, batch * n, BOUNDED
    )
    begin = tl.maximum(first - left, 0)
    end = tl.minimum(first + BM + right, length)
    safe_lo = first + BM - 1 - left
    safe_hi = tl.minimum(first + right, length - 1)
    if BOUNDED:
        begin = tl.min(lo, 0)
        end = tl.max(hi, 0) + 1
        safe_lo = tl.max(lo, 0)
        safe_hi = tl.min(hi, 0)
        holes = tl.load(HOLES + batch)

    dq = tl.zeros((BM, D), tl.float32)
    row = i
    if DROPOUT:
        row = row_key(SEED, stream, i)
    column = (head // group) * HEAD_DIM
    for s in range(begin, end, BN):
        mk = s + tl.arange(0, BN)
        j = residue + dilation * mk
        k = stream_tile(
            K_TILES, K, batch, column, s, residue, dilation, k_token, mk < length,
            HEAD_DIM, D, BN, BULK,
        )  # fmt: skip
        v = stream_tile(
            V_TILES, V, batch, column, s, residue, dilation, v_token, mk < length,
            HEAD_DIM, D, BN, BULK,
        )  # fmt: skip
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(x * scale - lse[:, None])
        edge = (s < safe_lo) | (s + BN - 1 > safe_hi)
        if BOUNDED:
            edge = edge | (holes != 0)
        if edge:
            ok = within(mk[None, :], lo[:, None], hi[:, None])
            if BOUNDED:
                visible = tl.load(STOP + batch * n + j, mask=mk < length, other=0) > 0
                ok = ok & visible[None, :]
            p = tl.where(ok, p, 0.0)
        dq = query_step(p, g, k, v, delta, dq, row, j, drop, boost, DROPOUT, PRECISION)

    if GLOBAL:
        RANK += batch * (n + 1)
        slot0 = 0
        slot1 = tl.load(RANK + n)
        if CAUSAL:
            slot1 = tl.load(RANK + tl.minimum(residue + dilation * (first + BM - 1) + 1, n))
        if BOUNDED:
            slot0 = tl.load(RANK + tl.min(tl.where(stop > 0, start, n), 0))
            slot1 = tl.minimum(slot1, tl.load(RANK + tl.max(stop, 0)))
        for s in range(slot0, slot1, BG):
            slot = s + tl.arange(0, BG)
            j = tl.load(PLACES + batch * n + slot, mask=slot < slot1, other=0)
            k = load_rows(K, j, k_token, slot < slot1, HEAD_DIM, D)
            v = load_rows(V, j, v_token, slot < slot1, HEAD_DIM, D)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            ok = beyond(
                i[:, None], j[None, :], j[None, :], slot < slot1, start, stop,
                left, right, dilation, DILATED, BOUNDED, CAUSAL,
            )  # fmt: skip
            p = tl.where(ok, tl.exp2(x * scale - lse[:, None]), 0.0)
            dq = query_step(p, g, k, v, delta, dq, row, j, drop, boost, DROPOUT, PRECISION)

    DQ += batch * n * d_token + head * HEAD_DIM
    store_rows(DQ, i, d_token, here, dq * factor, HEAD_DIM, D)


@remembered
@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def backward_key(
    Q, K, V, GRAD, LSE, DELTA, LINES, DK, DV, START, STOP, HOLES, RANK, PLACES, SEED,
    Q_TILES, GRAD_TILES,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, d_token,
    n, lse_row, line_row, heads, head0, run, group, left, right, dilation,
    scale, factor, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    DILATED: tl.constexpr, BOUNDED: tl.constexpr, GLOBAL: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of BN keys and values: from the queries whose window holds them, and (GLOBAL)
    from the global queries. All tiles are transposed, keys down and queries across."""
    batch = (tl.program_id(1) // run).to(tl.int64)
    head = head0 + tl.program_id(1) % run
    stream = batch * heads + head
    if not DILATED:
        dilation = 1
    residue, first, length = locate(tl.program_id(0), n, dilation, BN, DILATED)
    if first >= length:
        return
    mk = first + tl.arange(0, BN)
    j = residue + dilation * mk
    here = mk < length
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + (head // group) * k_head
    V += batch * v_batch + (head // group) * v_head
    GRAD += batch * g_batch + head * g_head
    LSE += stream * lse_row
    DELTA += stream * lse_row
    k = load_rows(K, j, k_token, here, HEAD_DIM, D)
    v = load_rows(V, j, v_token, here, HEAD_DIM, D)

    lo, hi, start, stop = reach(
        mk, here, right, left, length, residue, dilation, START, STOP, batch * n, BOUNDED
    )
    begin = tl.maximum(first - right, 0)
    end = tl.minimum(first + BN + left, length)
    safe_lo = first + BN - 1 - right
    safe_hi = first + left
    if BOUNDED:
        begin = tl.min(lo, 0)
        end = tl.max(hi, 0) + 1
        safe_lo = tl.max(lo, 0)
        safe_hi = tl.min(hi, 0)
    # A known multiple of 16 lets the loads of lse and delta be wide and asynchronous.
    begin = begin // 16 * 16

    line = LSE
    deltas = DELTA
    if DILATED:
        line = LINES + (tl.program_id(1).to(tl.int64) * dilation + residue) * 2 * line_row
        deltas = line + line_row
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    column = head * HEAD_DIM
    for s in range(begin, end, BM):
        mq = s + tl.arange(0, BM)
        i = residue + dilation * mq
        q = stream_tile(
            Q_TILES, Q, batch, column, s, residue, dilation, q_token, mq < length,
            HEAD_DIM, D, BM, BULK,
        )  # fmt: skip
        g = stream_tile(
            GRAD_TILES, GRAD, batch, column, s, residue, dilation, g_token, mq < length,
            HEAD_DIM, D, BM, BULK,
        )  # fmt: skip
        lse = tl.load(line + mq, mask=mq < line_row, other=float("inf"))
        delta = tl.load(deltas + mq, mask=mq < line_row, other=0.0)
        x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.exp2(x * scale - lse[None, :])
        # Padded queries and those past the end have lse = +inf: they vanish without a mask.
        if (s < safe_lo) | (s + BM - 1 > safe_hi):
            p = tl.where(within(mq[None, :], lo[:, None], hi[:, None]), p, 0.0)
        dk, dv = key_step(
            p, q, g, v, delta, dk, dv, SEED, stream, i, j, drop, boost, DROPOUT, PRECISION
        )

    if GLOBAL:
        RANK += batch * (n + 1)
        slot0 = 0
        slot1 = tl.load(RANK + n)
        if CAUSAL:
            slot0 = tl.load(RANK + residue + dilation * first)
        if BOUNDED:
            slot0 = tl.maximum(slot0, tl.load(RANK + tl.min(tl.where(stop > 0, start, n), 0)))
            slot1 = tl.load(RANK + tl.max(stop, 0))
        for s in range(slot0, slot1, BG):
            slot = s + tl.arange(0, BG)
            i = tl.load(PLACES + batch * n + slot, mask=slot < slot1, other=0)
            q = load_rows(Q, i, q_token, slot < slot1, HEAD_DIM, D)
            g = load_rows(GRAD, i, g_token, slot < slot1, HEAD_DIM, D)
            lse = tl.load(LSE + i, mask=slot < slot1, other=float("inf"))
            delta = tl.load(DELTA + i, mask=slot < slot1, other=0.0)
            x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            ok = beyond(
                i[None, :], j[:, None], i[None, :], slot < slot1, start, stop,
                left, right, dilation, DILATED, BOUNDED, CAUSAL,
            )  # fmt: skip
            p = tl.where(ok, tl.exp2(x * scale - lse[None, :]), 0.0)
            dk, dv = key_step(
                p, q, g, v, delta, dk, dv, SEED, stream, i, j, drop, boost, DROPOUT, PRECISION
            )

    to = batch * n * d_token + head * HEAD_DIM
    store_rows(DK + to, j, d_token, here, dk * factor, HEAD_DIM, D)
    store_rows(DV + to, j, d_token, here, dv, HEAD_DIM, D)
