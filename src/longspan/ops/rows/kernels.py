"""The fused kernels behind `triton.py`: late projection of the rows of global tokens.

Reading aids:

- A *slot* is one global token of a batch row, empty where its position is -1; a *row* is one head
  of a slot, row = slot * heads + head. All slots of the batch, numbered through, are `many`.
- *Two kinds of kernels.* `pool` and `pool_backward` pass over the hidden states, once each. The
  others are products with one head's weights, over slots alone; each does at one go what would be
  several small kernels, whose gaps cost more than their work.
- *Who stands on the left of a product.* Hopper's wide instructions want at least 64 numbers there,
  so in the pooling it is the hidden states, and the few rows stand on the right. In the scores it
  is the rows all the same: the other way takes so many addresses that registers spill (LOG.md).
- *Any width.* Tiles have powers of two, so a hidden state is held in two: 768 = 512 + 256 (WIDE
  and NARROW, which is 0 where one is enough).
- *Pieces.* Few rows leave most of a GPU idle, so the sequence is cut into `parts`, each with its
  own softmax. Whoever reads them next joins a few; `merge` joins many. Nothing is atomic.
- Scores are in base 2 as in the window kernels, and the log-sum-exp of a row that sees nothing is
  +inf once it is joined.
"""

import triton
import triton.language as tl

from longspan.ops.launch import remembered
from longspan.ops.window.kernels import (
    FLOOR,
    is_kept,
    load_bounds,
    load_rows,
    load_tile,
    row_key,
    store_rows,
)
from longspan.ops.window.row_kernels import piece

# As in the window kernels: compiled once for all of these.
COUNTS = ["n", "many", "slots", "heads", "rows", "parts", "drop", "at_batch", "at_slot"]


@triton.jit
def load_patch(base, start, live, first, LIMIT: tl.constexpr, SIZE: tl.constexpr):
    """[len(start), SIZE]: columns from `first` of the rows that begin at base + start."""
    column = first + tl.arange(0, SIZE)
    pointer = base + start.to(tl.int64)[:, None] + column[None, :]
    return tl.load(pointer, mask=live[:, None] & (column < LIMIT)[None, :], other=0.0)


@triton.jit
def store_patch(base, start, live, first, tile, LIMIT: tl.constexpr, SIZE: tl.constexpr):
    column = first + tl.arange(0, SIZE)
    pointer = base + start.to(tl.int64)[:, None] + column[None, :]
    ok = live[:, None] & (column < LIMIT)[None, :]
    tl.store(pointer, tile.to(base.dtype.element_ty), mask=ok)


@triton.jit
def position(AT, m, live, slots, at_batch, at_slot):
    """Batch row and position of slots m; -1 where there is none."""
    batch = (m // slots).to(tl.int64)
    at = tl.load(AT + batch * at_batch + (m % slots) * at_slot, mask=live, other=-1)
    return batch, at.to(tl.int32)


@triton.jit
def view(
    AT, START, STOP, batch, row, rows, heads, at_batch, at_slot, n,
    BOUNDED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """For each row of one batch row its position and the tokens lowest..highest it may see."""
    at = tl.load(
        AT + batch * at_batch + (row // heads) * at_slot, mask=row < rows, other=-1
    ).to(tl.int32)  # fmt: skip
    live = at >= 0
    lowest = at * 0
    highest = tl.where(live, n, 0)
    if BOUNDED:
        lowest, highest = load_bounds(START, STOP, batch * n, at, live)
    if CAUSAL:
        highest = tl.minimum(highest, at + 1)
    return at, lowest, highest


@triton.jit
def sees(STOP, batch, j, here, lowest, highest, n, BOUNDED: tl.constexpr):
    """Bool [rows, tokens j]."""
    ok = here[None, :] & (j[None, :] < highest[:, None])
    if BOUNDED:
        visible = tl.load(STOP + batch * n + j, mask=here, other=0) > 0
        ok = ok & visible[None, :] & (j[None, :] >= lowest[:, None])
    return ok


@remembered
@triton.jit(do_not_specialize=COUNTS)
def fold(
    HIDDEN, AT, Q_WEIGHT, Q_BIAS, K_WEIGHT, QUERY, FOLDED,
    at_batch, at_slot, n, many, slots, heads,
    DIM: tl.constexpr, HEAD_DIM: tl.constexpr, HD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
    PROJECT: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """FOLDED = QUERY K_WEIGHT for one head and BM slots; PROJECT: QUERY is made here first, from
    the hidden states of the global tokens."""
    head = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    live = m < many
    d = tl.arange(0, HD)
    weight = (head * HEAD_DIM + d) * DIM
    if PROJECT:
        batch, at = position(AT, m, live, slots, at_batch, at_slot)
        start = (batch * n + tl.maximum(at, 0)) * DIM
        q = tl.zeros((BM, HD), tl.float32)
        for c in range(0, DIM, BK):
            x = load_patch(HIDDEN, start, live, c, DIM, BK)
            w = load_patch(Q_WEIGHT, weight, d < HEAD_DIM, c, DIM, BK)
            q = tl.dot(x, tl.trans(w), q, input_precision=PRECISION)
        if BIASED:
            bias = tl.load(Q_BIAS + head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
            q += bias.to(tl.float32)[None, :]
        query = q.to(QUERY.dtype.element_ty)
        store_rows(QUERY + head * HEAD_DIM, m, heads * HEAD_DIM, live, query, HEAD_DIM, HD)
    else:
        query = load_rows(QUERY + head * HEAD_DIM, m, heads * HEAD_DIM, live, HEAD_DIM, HD)
    row = (m * heads + head).to(tl.int64) * DIM
    for c in range(0, DIM, BK):
        w = load_patch(K_WEIGHT, weight, d < HEAD_DIM, c, DIM, BK)
        folded = tl.dot(query, w, input_precision=PRECISION)
        store_patch(FOLDED, row, live, c, folded, DIM, BK)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def pool(
    FOLDED, HIDDEN, PART, PART_LSE, PART_MASS, START, STOP, AT, SEED,
    at_batch, at_slot, n, rows, heads, parts, scale, drop, boost,
    DIM: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
    BOUNDED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Hidden states averaged by the attention of BR rows, over one piece of the sequence; the
    log-sum-exp of the scores; and the mass, what dropout left of the weights' sum of one."""
    batch = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts) * BR + tl.arange(0, BR)
    at, lowest, highest = view(
        AT, START, STOP, batch, row, rows, heads, at_batch, at_slot, n, BOUNDED, CAUSAL
    )
    live = at >= 0
    key = at
    if DROPOUT:
        key = row_key(SEED, batch * heads + row % heads, at)
    FOLDED += batch * rows * DIM
    HIDDEN += batch * n * DIM
    FIRST: tl.constexpr = min(DIM, WIDE)
    f = load_rows(FOLDED, row, DIM, live, FIRST, WIDE)
    acc = tl.zeros((WIDE, BR), tl.float32)
    if NARROW > 0:
        f_rest = load_rows(FOLDED + WIDE, row, DIM, live, DIM - WIDE, NARROW)
        acc_rest = tl.zeros((NARROW, BR), tl.float32)
    peak = tl.full((BR,), FLOOR, tl.float32)
    total = tl.zeros((BR,), tl.float32)
    kept = tl.zeros((BR,), tl.float32)
    begin, end = piece(tl.min(tl.where(live, lowest, n), 0), tl.max(highest, 0), part, parts, BN)
    for s in range(begin, end, BN):
        j = s + tl.arange(0, BN)
        here = j < end
        x = load_tile(HIDDEN, s, 1, DIM, here, FIRST, WIDE, BN)
        score = tl.dot(f, tl.trans(x), input_precision=PRECISION)
        if NARROW > 0:
            x_rest = load_tile(HIDDEN + WIDE, s, 1, DIM, here, DIM - WIDE, NARROW, BN)
            score = tl.dot(f_rest, tl.trans(x_rest), score, input_precision=PRECISION)
        ok = sees(STOP, batch, j, here, lowest, highest, n, BOUNDED)
        score = tl.where(ok, score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score * scale - (top * scale)[:, None])
        fade = tl.exp2((peak - top) * scale)
        peak = top
        total = total * fade + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(is_kept(key[:, None], j[None, :], drop), p, 0.0)
            kept = kept * fade + tl.sum(p, 1)
        p = tl.trans(p.to(x.dtype))
        acc = tl.dot(tl.trans(x), p, acc * fade[None, :], input_precision=PRECISION)
        if NARROW > 0:
            acc_rest = tl.dot(
                tl.trans(x_rest), p, acc_rest * fade[None, :], input_precision=PRECISION
            )
    seen = total > 0
    share = tl.where(seen, boost / total, 0.0)
    to = (batch * parts + part) * rows
    PART += to * DIM
    store_rows(PART, row, DIM, row < rows, tl.trans(acc * share[None, :]), FIRST, WIDE)
    if NARROW > 0:
        rest = tl.trans(acc_rest * share[None, :])
        store_rows(PART + WIDE, row, DIM, row < rows, rest, DIM - WIDE, NARROW)
    lse = tl.where(seen, peak * scale + tl.log2(total), float("-inf"))
    tl.store(PART_LSE + to + row, lse, mask=row < rows)
    if not DROPOUT:
        kept = total
    tl.store(PART_MASS + to + row, kept * share, mask=row < rows)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def merge(
    PART, PART_LSE, PART_MASS, WHOLE, WHOLE_LSE, WHOLE_MASS, rows, parts,
    DIM: tl.constexpr, BK: tl.constexpr, MOST: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Join the pieces of one row, BK columns of it: by their log-sum-exp, or (not SOFTMAX) add."""
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * BK
    part = tl.arange(0, MOST)
    live = part < parts
    at = (batch * parts + part) * rows + row
    tile = load_patch(PART, at * DIM, live, first, DIM, BK)
    to = batch * rows + row
    if SOFTMAX:
        lse = tl.load(PART_LSE + at, mask=live, other=float("-inf"))
        peak = tl.maximum(tl.max(lse, 0), FLOOR)
        share = tl.exp2(lse - peak)
        total = tl.sum(share, 0)
        seen = total > 0
        share = tl.where(seen, share / total, 0.0)
        tile *= share[:, None]
        mass = tl.sum(share * tl.load(PART_MASS + at, mask=live, other=0.0), 0)
        tl.store(WHOLE_LSE + to, tl.where(seen, peak + tl.log2(total), float("-inf")))
        tl.store(WHOLE_MASS + to, mass)
    column = first + tl.arange(0, BK)
    tl.store(WHOLE + to * DIM + column, tl.sum(tile, 0), mask=column < DIM)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def project(
    PART, PART_LSE, PART_MASS, WEIGHT, BIAS, JOINED, OUT, LSE, MASS, many, slots, heads,
    DIM: tl.constexpr, HEAD_DIM: tl.constexpr, HD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    SOFTMAX: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """JOINED, the pieces as `merge` joins them, and OUT = JOINED WEIGHT^T, with the BIAS times the
    mass: for one head and BM slots."""
    head = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    live = m < many
    d = tl.arange(0, HD)
    rows = slots * heads
    row = (m % slots) * heads + head
    at = (m // slots).to(tl.int64) * PARTS * rows + row
    lse = tl.zeros((BM,), tl.float32)
    mass = lse
    if SOFTMAX:
        peak = tl.full((BM,), FLOOR, tl.float32)
        for part in tl.static_range(PARTS):
            peak = tl.maximum(peak, tl.load(PART_LSE + at + part * rows, mask=live, other=FLOOR))
        total = tl.zeros((BM,), tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.exp2(tl.load(PART_LSE + at + part * rows, mask=live, other=FLOOR) - peak)
        lse = tl.where(total > 0, peak + tl.log2(total), float("inf"))
        for part in tl.static_range(PARTS):
            share = tl.exp2(tl.load(PART_LSE + at + part * rows, mask=live, other=FLOOR) - lse)
            mass += share * tl.load(PART_MASS + at + part * rows, mask=live, other=0.0)
        tl.store(LSE + m * heads + head, lse, mask=live)
        tl.store(MASS + m * heads + head, mass, mask=live)
    out = tl.zeros((BM, HD), tl.float32)
    for c in range(0, DIM, BK):
        x = tl.zeros((BM, BK), tl.float32)
        for part in tl.static_range(PARTS):
            tile = load_patch(PART, (at + part * rows) * DIM, live, c, DIM, BK)
            if SOFTMAX:
                share = tl.exp2(tl.load(PART_LSE + at + part * rows, mask=live, other=FLOOR) - lse)
                tile *= share[:, None]
            x += tile
        x = x.to(JOINED.dtype.element_ty)
        store_patch(JOINED, (m * heads + head).to(tl.int64) * DIM, live, c, x, DIM, BK)
        w = load_patch(WEIGHT, (head * HEAD_DIM + d) * DIM, d < HEAD_DIM, c, DIM, BK)
        out = tl.dot(x, tl.trans(w), out, input_precision=PRECISION)
    if BIASED:
        bias = tl.load(BIAS + head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        out += bias.to(tl.float32)[None, :] * mass[:, None]
    store_rows(OUT + head * HEAD_DIM, m, heads * HEAD_DIM, live, out, HEAD_DIM, HD)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def spread(
    GRAD, V_WEIGHT, V_BIAS, POOLED, MASS, FOLDED, SIDES, DELTA, DMASS, many, slots, heads,
    DIM: tl.constexpr, HEAD_DIM: tl.constexpr, HD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
    BIASED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the pooled states, GRAD V_WEIGHT, for one head and BM slots; of the mass; and
    delta, the mean gradient of a row's weights.

    SIDES [batch, 2 * rows, DIM] gets the former, and behind it FOLDED: what the gradient of the
    hidden states is made of."""
    head = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    live = m < many
    d = tl.arange(0, HD)
    rows = slots * heads
    to = m * heads + head
    own = to.to(tl.int64) * DIM
    side = own + (m // slots).to(tl.int64) * rows * DIM
    grad = load_rows(GRAD + head * HEAD_DIM, m, heads * HEAD_DIM, live, HEAD_DIM, HD)
    delta = tl.zeros((BM,), tl.float32)
    for c in range(0, DIM, BK):
        w = load_patch(V_WEIGHT, (head * HEAD_DIM + d) * DIM, d < HEAD_DIM, c, DIM, BK)
        made = tl.dot(grad, w, input_precision=PRECISION).to(grad.dtype)
        pooled = load_patch(POOLED, own, live, c, DIM, BK)
        delta += tl.sum(made.to(tl.float32) * pooled.to(tl.float32), 1)
        store_patch(SIDES, side, live, c, made, DIM, BK)
        folded = load_patch(FOLDED, own, live, c, DIM, BK)
        store_patch(SIDES, side + rows * DIM, live, c, folded, DIM, BK)
    if DROPOUT:  # without it the mass is a constant
        dmass = delta * 0
        if BIASED:
            bias = tl.load(V_BIAS + head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
            dmass = tl.sum(grad.to(tl.float32) * bias.to(tl.float32)[None, :], 1)
        delta += dmass * tl.load(MASS + to, mask=live, other=0.0)
        tl.store(DMASS + to, dmass, mask=live)
    tl.store(DELTA + to, delta, mask=live)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def pool_backward(
    SIDES, HIDDEN, LSE, DELTA, DMASS, PART, PAIRS, START, STOP, AT, SEED,
    at_batch, at_slot, n, n_row, rows, heads, parts, scale, factor, drop, boost,
    DIM: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
    BOUNDED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of BR folded rows from one piece of the sequence, and PAIRS [batch, 2 * rows,
    n_row], the weights and behind them the gradients of the scores: PAIRS^T SIDES is the gradient
    of the hidden states. BOUNDED: the sequence is what some of the rows see; elsewhere PAIRS are
    zero already."""
    batch = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts) * BR + tl.arange(0, BR)
    at, lowest, highest = view(
        AT, START, STOP, batch, row, rows, heads, at_batch, at_slot, n, BOUNDED, CAUSAL
    )
    live = at >= 0
    key = at
    dmass = tl.zeros((BR,), tl.float32)
    if DROPOUT:
        key = row_key(SEED, batch * heads + row % heads, at)
        dmass = tl.load(DMASS + batch * rows + row, mask=live, other=0.0)
    lse = tl.load(LSE + batch * rows + row, mask=live, other=float("inf"))
    delta = tl.load(DELTA + batch * rows + row, mask=live, other=0.0)
    SIDES += batch * 2 * rows * DIM
    HIDDEN += batch * n * DIM
    PAIRS += batch * 2 * rows * n_row
    FIRST: tl.constexpr = min(DIM, WIDE)
    g = load_rows(SIDES, row, DIM, live, FIRST, WIDE)
    f = load_rows(SIDES, rows + row, DIM, live, FIRST, WIDE)
    acc = tl.zeros((WIDE, BR), tl.float32)
    if NARROW > 0:
        g_rest = load_rows(SIDES + WIDE, row, DIM, live, DIM - WIDE, NARROW)
        f_rest = load_rows(SIDES + WIDE, rows + row, DIM, live, DIM - WIDE, NARROW)
        acc_rest = tl.zeros((NARROW, BR), tl.float32)
    low, high = 0, n
    if BOUNDED:
        low, high = tl.min(tl.where(live, lowest, n), 0), tl.max(highest, 0)
    begin, end = piece(low, high, part, parts, BN)
    for s in range(begin, end, BN):
        j = s + tl.arange(0, BN)
        here = j < end
        x = load_tile(HIDDEN, s, 1, DIM, here, FIRST, WIDE, BN)
        score = tl.dot(f, tl.trans(x), input_precision=PRECISION)
        dp = tl.dot(g, tl.trans(x), input_precision=PRECISION)
        if NARROW > 0:
            x_rest = load_tile(HIDDEN + WIDE, s, 1, DIM, here, DIM - WIDE, NARROW, BN)
            score = tl.dot(f_rest, tl.trans(x_rest), score, input_precision=PRECISION)
            dp = tl.dot(g_rest, tl.trans(x_rest), dp, input_precision=PRECISION)
        ok = sees(STOP, batch, j, here, lowest, highest, n, BOUNDED)
        p = tl.where(ok, tl.exp2(score * scale - lse[:, None]), 0.0)
        kept = p
        if DROPOUT:
            keep = is_kept(key[:, None], j[None, :], drop)
            kept = tl.where(keep, p * boost, 0.0)
            dp = tl.where(keep, (dp + dmass[:, None]) * boost, 0.0)
        ds = (p * (dp - delta[:, None]) * factor).to(x.dtype)
        pointer = PAIRS + row.to(tl.int64)[:, None] * n_row + j[None, :]
        ok = (row < rows)[:, None] & here[None, :]
        tl.store(pointer, kept.to(x.dtype), mask=ok)
        tl.store(pointer + rows.to(tl.int64) * n_row, ds, mask=ok)
        acc = tl.dot(tl.trans(x), tl.trans(ds), acc, input_precision=PRECISION)
        if NARROW > 0:
            acc_rest = tl.dot(tl.trans(x_rest), tl.trans(ds), acc_rest, input_precision=PRECISION)
    PART += (batch * parts + part) * rows * DIM
    store_rows(PART, row, DIM, row < rows, tl.trans(acc), FIRST, WIDE)
    if NARROW > 0:
        store_rows(PART + WIDE, row, DIM, row < rows, tl.trans(acc_rest), DIM - WIDE, NARROW)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def weight_grads(
    HIDDEN, AT, DQUERY, QUERY, DFOLDED, GRAD, POOLED, MASS, DWEIGHT, DBIAS,
    at_batch, at_slot, n, many, slots, heads,
    DIM: tl.constexpr, HEAD_DIM: tl.constexpr, HD: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
    WEIGHTS: tl.constexpr, BIASES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BC columns of one head's weight gradient, and its bias gradient, summed over all slots, for
    one of three projections; WEIGHTS and BIASES: that many of them, from the last, are stacked."""
    head = tl.program_id(0)
    column = tl.program_id(1) * BC
    which = 3 - WEIGHTS + tl.program_id(2)  # 0 = query, 1 = key, 2 = value
    d = tl.arange(0, HD)
    left, right = DQUERY, HIDDEN
    if which == 1:
        left, right = QUERY, DFOLDED
    if which == 2:
        left, right = GRAD, POOLED
    acc = tl.zeros((HD, BC), tl.float32)
    total = tl.zeros((HD,), tl.float32)
    for s in range(0, many, BM):
        m = s + tl.arange(0, BM)
        live = m < many
        a = load_rows(left + head * HEAD_DIM, m, heads * HEAD_DIM, live, HEAD_DIM, HD)
        start = (m * heads + head).to(tl.int64) * DIM
        share = tl.where(live & (which != 1), 1.0, 0.0)  # a key's bias changes nothing
        if which == 0:
            batch, at = position(AT, m, live, slots, at_batch, at_slot)
            start = (batch * n + tl.maximum(at, 0)) * DIM
        if which == 2:
            share = tl.load(MASS + m * heads + head, mask=live, other=0.0)
        b = load_patch(right, start, live, column, DIM, BC)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
        total += tl.sum(a.to(tl.float32) * share[:, None], 0)
    inner = heads * HEAD_DIM
    to = ((which - (3 - WEIGHTS)) * inner + head * HEAD_DIM + d).to(tl.int64)
    store_patch(DWEIGHT, to * DIM, d < HEAD_DIM, column, acc, DIM, BC)
    if BIASES > 0:
        to = (which - (3 - BIASES)) * inner + head * HEAD_DIM + d
        ok = (d < HEAD_DIM) & (which >= 3 - BIASES) & (column == 0)
        tl.store(DBIAS + to, total.to(DBIAS.dtype.element_ty), mask=ok)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def return_rows(
    DQUERY, Q_WEIGHT, AT, DHIDDEN, at_batch, at_slot, n, many, slots,
    DIM: tl.constexpr, INNER: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries say, DQUERY Q_WEIGHT, to the gradient of the global tokens' states."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    live = m < many
    column = tl.program_id(1) * BC
    acc = tl.zeros((BM, BC), tl.float32)
    for c in range(0, INNER, BK):
        k = c + tl.arange(0, BK)
        a = load_patch(DQUERY, m * INNER, live, c, INNER, BK)
        w = load_patch(Q_WEIGHT, k * DIM, k < INNER, column, DIM, BC)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    batch, at = position(AT, m, live, slots, at_batch, at_slot)
    start = (batch * n + at) * DIM
    acc += load_patch(DHIDDEN, start, at >= 0, column, DIM, BC).to(tl.float32)
    store_patch(DHIDDEN, start, at >= 0, column, acc, DIM, BC)
