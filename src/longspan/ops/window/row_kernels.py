"""The fused kernels for the rows of global tokens, which see everything: computed over pieces of
the sequence and merged, or put in place as they were given. See `kernels` for reading aids."""

import triton
import triton.language as tl

from longspan.ops.launch import remembered
from longspan.ops.window.kernels import (
    FLOOR,
    SOME_NUMBERS,
    absorb,
    key_step,
    load_bounds,
    load_rows,
    load_tile,
    query_step,
    row_key,
    store_rows,
)


@remembered
@triton.jit
def put_rows(
    OUT, GIVEN, AT, given_batch, given_slot, given_head, at_batch, at_slot, n, heads,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Row `slot` of GIVEN to token AT[slot] of OUT; a negative AT goes nowhere."""
    slot = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    at = tl.load(AT + batch * at_batch + slot * at_slot)
    if at >= 0:
        head = tl.arange(0, HEADS)
        GIVEN += batch * given_batch + slot * given_slot
        tile = load_rows(GIVEN, head, given_head, head < heads, HEAD_DIM, D)
        OUT += (batch * n + at) * heads * HEAD_DIM
        store_rows(OUT, head, HEAD_DIM, head < heads, tile, HEAD_DIM, D)


@triton.jit
def share(RANK, row, n, splits, BM: tl.constexpr):
    """(global tokens of this row, tiles of BM of them, pieces each tile's sequence is cut into).

    tiles * pieces never exceeds splits unless pieces is 1, so workspace of splits * BM rows is
    enough for any number of global tokens, and nobody has to tell the host how many there are.
    """
    count = tl.load(RANK + row * (n + 1) + n)
    tiles = tl.cdiv(count, BM)
    return count, tiles, tl.maximum(splits // tl.maximum(tiles, 1), 1)


@triton.jit
def piece(lowest, highest, part, parts, BN: tl.constexpr):
    """The part-th of `parts` pieces of the range, whole tiles of BN but for the last."""
    span = tl.cdiv(tl.cdiv(highest - lowest, parts), BN) * BN
    begin = lowest + part * span
    return begin, tl.minimum(begin + span, highest)


@remembered
@triton.jit(do_not_specialize=SOME_NUMBERS)
def global_forward(
    Q, K, V, OUT, LSE, PART, PART_LSE, START, STOP, RANK, PLACES, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    n, lse_row, heads, splits, group, scale, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BOUNDED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of the global tokens over every key they may see."""
    stream = tl.program_id(1).to(tl.int64)
    batch = stream // heads
    head = stream % heads
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + (head // group) * k_head
    V += batch * v_batch + (head // group) * v_head
    OUT += batch * n * heads * HEAD_DIM + head * HEAD_DIM
    PART += stream * splits * BM * D
    PART_LSE += stream * splits * BM
    count, tiles, parts = share(RANK, batch, n, splits, BM)
    for item in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        part = item % parts
        slot = (item // parts) * BM + tl.arange(0, BM)
        live = slot < count
        i = tl.load(PLACES + batch * n + slot, mask=live, other=0)
        q = load_rows(Q, i, q_token, live, HEAD_DIM, D)
        lowest = i * 0
        highest = tl.where(live, n, 0)
        if BOUNDED:
            lowest, highest = load_bounds(START, STOP, batch * n, i, live)
        if CAUSAL:
            highest = tl.minimum(highest, i + 1)
        begin, end = piece(
            tl.min(tl.where(live, lowest, n), 0), tl.max(highest, 0), part, parts, BN
        )
        acc = tl.zeros((BM, D), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        peak = tl.full((BM,), FLOOR, tl.float32)
        row = i
        if DROPOUT:
            row = row_key(SEED, stream, i)
        for s in range(begin, end, BN):
            j = s + tl.arange(0, BN)
            k = load_tile(K, s, 1, k_token, j < end, HEAD_DIM, D, BN)
            v = load_tile(V, s, 1, v_token, j < end, HEAD_DIM, D, BN)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            ok = (j < end)[None, :] & (j[None, :] < highest[:, None])
            if BOUNDED:
                visible = tl.load(STOP + batch * n + j, mask=j < end, other=0) > 0
                ok = ok & visible[None, :] & (j[None, :] >= lowest[:, None])
            x = tl.where(ok, x, float("-inf"))
            acc, peak, total = absorb(
                x, v, acc, peak, total, scale, row, j, drop, DROPOUT, PRECISION
            )
        seen = total > 0
        out = acc * tl.where(seen, boost / total, 0.0)[:, None]
        lse = peak * scale + tl.log2(total)
        if parts == 1:
            store_rows(OUT, i, heads * HEAD_DIM, live, out, HEAD_DIM, D)
            lse = tl.where(seen, lse, float("inf"))
            tl.store(LSE + stream * lse_row + i, lse, mask=live)
        else:
            store_rows(PART, slot * parts + part, D, live, out, D, D)
            lse = tl.where(seen, lse, float("-inf"))
            tl.store(PART_LSE + slot * parts + part, lse, mask=live)


@remembered
@triton.jit(do_not_specialize=["n", "heads", "splits"])
def global_forward_merge(
    OUT, LSE, PART, PART_LSE, RANK, PLACES, n, lse_row, heads, splits,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Join the pieces of each global row by their log-sum-exp."""
    stream = tl.program_id(1).to(tl.int64)
    batch = stream // heads
    OUT += batch * n * heads * HEAD_DIM + (stream % heads) * HEAD_DIM
    PART += stream * splits * BM * D
    PART_LSE += stream * splits * BM
    count, _, parts = share(RANK, batch, n, splits, BM)
    if parts > 1:
        part = tl.arange(0, MOST)
        column = tl.arange(0, D)
        for slot in range(tl.program_id(0), count, tl.num_programs(0)):
            lse = tl.load(PART_LSE + slot * parts + part, mask=part < parts, other=float("-inf"))
            peak = tl.maximum(tl.max(lse, 0), FLOOR)
            weight = tl.exp2(lse - peak)
            total = tl.sum(weight, 0)
            tile = load_rows(PART, slot * parts + part, D, part < parts, D, D)
            out = tl.sum(weight[:, None] * tile, 0) / total
            i = tl.load(PLACES + batch * n + slot)
            pointer = OUT + i.to(tl.int64) * heads * HEAD_DIM + column
            tl.store(pointer, out.to(OUT.dtype.element_ty), mask=column < HEAD_DIM)
            tl.store(LSE + stream * lse_row + i, peak + tl.log2(total))


@remembered
@triton.jit(do_not_specialize=SOME_NUMBERS)
def global_backward(
    Q, K, V, GRAD, LSE, DELTA, DQ, DK, DV, PART, START, STOP, RANK, PLACES, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, d_token,
    n, lse_row, heads, splits, group, scale, factor, drop, boost,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BOUNDED: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the global tokens: as keys from all queries, and (ROWS) as queries from all
    keys. Complete sums: they overwrite what the window kernels left in these rows."""
    stream = tl.program_id(1).to(tl.int64)
    batch = stream // heads
    head = stream % heads
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + (head // group) * k_head
    V += batch * v_batch + (head // group) * v_head
    GRAD += batch * g_batch + head * g_head
    LSE += stream * lse_row
    DELTA += stream * lse_row
    to = batch * n * d_token + head * HEAD_DIM
    PART += stream * 3 * splits * BM * D
    count, tiles, parts = share(RANK, batch, n, splits, BM)
    for item in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        part = item % parts
        slot = (item // parts) * BM + tl.arange(0, BM)
        live = slot < count
        t = tl.load(PLACES + batch * n + slot, mask=live, other=0)
        lowest = t * 0
        highest = tl.where(live, n, 0)
        if BOUNDED:
            lowest, highest = load_bounds(START, STOP, batch * n, t, live)
        own_k = load_rows(K, t, k_token, live, HEAD_DIM, D)
        own_v = load_rows(V, t, v_token, live, HEAD_DIM, D)

        # As keys: queries i across.
        low = lowest
        if CAUSAL:
            low = tl.maximum(lowest, t)
        begin, end = piece(tl.min(tl.where(live, low, n), 0), tl.max(highest, 0), part, parts, BN)
        dk = tl.zeros((BM, D), tl.float32)
        dv = tl.zeros((BM, D), tl.float32)
        for s in range(begin, end, BN):
            i = s + tl.arange(0, BN)
            q = load_tile(Q, s, 1, q_token, i < end, HEAD_DIM, D, BN)
            g = load_tile(GRAD, s, 1, g_token, i < end, HEAD_DIM, D, BN)
            lse_i = tl.load(LSE + i, mask=i < lse_row, other=float("inf"))
            delta_i = tl.load(DELTA + i, mask=i < lse_row, other=0.0)
            x = tl.dot(own_k, tl.trans(q), input_precision=PRECISION)
            p = tl.exp2(x * scale - lse_i[None, :])
            ok = (i[None, :] >= low[:, None]) & (i[None, :] < highest[:, None])
            p = tl.where(ok, p, 0.0)
            dk, dv = key_step(
                p, q, g, own_v, delta_i, dk, dv, SEED, stream, i, t, drop, boost, DROPOUT, PRECISION
            )
        if parts == 1:
            store_rows(DK + to, t, d_token, live, dk * factor, HEAD_DIM, D)
            store_rows(DV + to, t, d_token, live, dv, HEAD_DIM, D)
        else:
            where = slot * parts + part
            store_rows(PART, where, D, live, dk * factor, D, D)
            store_rows(PART + splits * BM * D, where, D, live, dv, D, D)

        # As queries: keys j across.
        if ROWS:
            high = highest
            if CAUSAL:
                high = tl.minimum(highest, t + 1)
            begin, end = piece(
                tl.min(tl.where(live, lowest, n), 0), tl.max(high, 0), part, parts, BN
            )
            own_q = load_rows(Q, t, q_token, live, HEAD_DIM, D)
            own_g = load_rows(GRAD, t, g_token, live, HEAD_DIM, D)
            lse = tl.load(LSE + t, mask=live, other=float("inf"))
            delta = tl.load(DELTA + t, mask=live, other=0.0)
            dq = tl.zeros((BM, D), tl.float32)
            row = t
            if DROPOUT:
                row = row_key(SEED, stream, t)
            for s in range(begin, end, BN):
                j = s + tl.arange(0, BN)
                k = load_tile(K, s, 1, k_token, j < end, HEAD_DIM, D, BN)
                v = load_tile(V, s, 1, v_token, j < end, HEAD_DIM, D, BN)
                x = tl.dot(own_q, tl.trans(k), input_precision=PRECISION)
                ok = (j < end)[None, :] & (j[None, :] < high[:, None])
                if BOUNDED:
                    visible = tl.load(STOP + batch * n + j, mask=j < end, other=0) > 0
                    ok = ok & visible[None, :] & (j[None, :] >= lowest[:, None])
                p = tl.where(ok, tl.exp2(x * scale - lse[:, None]), 0.0)
                dq = query_step(p, own_g, k, v, delta, dq, row, j, drop, boost, DROPOUT, PRECISION)
            if parts == 1:
                store_rows(DQ + to, t, d_token, live, dq * factor, HEAD_DIM, D)
            else:
                where = slot * parts + part
                store_rows(PART + 2 * splits * BM * D, where, D, live, dq * factor, D, D)


@remembered
@triton.jit(do_not_specialize=["n", "heads", "splits"])
def global_backward_merge(
    DQ, DK, DV, PART, RANK, PLACES, d_token, n, heads, splits,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of each global token's gradients."""
    stream = tl.program_id(1).to(tl.int64)
    batch = stream // heads
    to = batch * n * d_token + (stream % heads) * HEAD_DIM
    PART += stream * 3 * splits * BM * D
    count, _, parts = share(RANK, batch, n, splits, BM)
    if parts > 1:
        part = tl.arange(0, MOST)
        column = tl.arange(0, D)
        ok = column < HEAD_DIM
        for slot in range(tl.program_id(0), count, tl.num_programs(0)):
            i = tl.load(PLACES + batch * n + slot).to(tl.int64)
            pointer = to + i * d_token + column
            where = slot * parts + part
            live = part < parts
            dk = tl.sum(load_rows(PART, where, D, live, D, D), 0)
            tl.store(DK + pointer, dk.to(DK.dtype.element_ty), mask=ok)
            dv = tl.sum(load_rows(PART + splits * BM * D, where, D, live, D, D), 0)
            tl.store(DV + pointer, dv.to(DV.dtype.element_ty), mask=ok)
            if ROWS:
                dq = tl.sum(load_rows(PART + 2 * splits * BM * D, where, D, live, D, D), 0)
                tl.store(DQ + pointer, dq.to(DQ.dtype.element_ty), mask=ok)
