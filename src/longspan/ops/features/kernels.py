"""The fused kernels behind `triton.py`. Nothing of the size tokens x features leaves a program, and
nothing is atomic, so results do not depend on the order in which programs run.

Reading aids:

- Each feature m is a *place* between keys and queries. With E the exponents of keys and e those of
  queries, attention by features is a softmax over keys for every place, then one over places for
  every query:

      values_m = sum_t a_tm v_t,        a_tm = exp(E_tm - log_m)
      out_t    = sum_m p_tm values_m,   p_tm = exp(e_tm + log_m - lse_t)

  where log_m is the logarithm of z_m. So every product is one of attention, with numbers of
  moderate size, whatever the exponents are.
- *eps* adds a trace of all to every feature: a_tm gains exp(least + top - log_m), where top is the
  largest exponent of the keys, and p_tm gains trace_t z_m, with z_m = exp(log_m - top).
- *The mean of values* is taken off the values of places and added to the output: what is rounded
  to half precision is what differs between places, and so are the gradients' differences.
- Logarithms and exponents are in base 2. Weights that are rounded to half precision before they
  are summed up are 2^LIFT at most, so that float16 has room below.
"""

import triton
import triton.language as tl

from longspan.ops.launch import remembered

FLOOR = tl.constexpr(-1.0e30)  # finite: (-inf) - FLOOR stays -inf where inf - inf would be NaN
LIFT = tl.constexpr(8.0)

# Compiled once for all of these. What is a multiple of 16 is known as such: `row` and `places`, `n`
# and `features` rounded up so that what belongs to them can be read in wide pieces, and `size`.
COUNTS = ["n", "heads", "splits", "features"]


@triton.jit
def one_of(blocks):
    """Which block of which pair of batch row and head a program has. All are on one axis: the
    others end at 65,535."""
    return tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)


@triton.jit
def load_rows(
    base, first, end, stride, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows from `first` on, [BLOCK, D]; zeros from `end` on and beyond HEAD_DIM."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, D)
    live = (row < end - first)[:, None]
    if HEAD_DIM < D:
        live = live & (column < HEAD_DIM)[None, :]
    pointer = base + tl.cast(first, tl.int64) * stride
    return tl.load(pointer + row[:, None] * stride + column[None, :], mask=live, other=0.0)


@triton.jit
def store_rows(
    base, first, end, stride, tile, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.arange(0, BLOCK), tl.arange(0, D)
    live = (row < end - first)[:, None] & (column < HEAD_DIM)[None, :]
    pointer = base + tl.cast(first, tl.int64) * stride
    pointer = pointer + row[:, None] * stride + column[None, :]
    tl.store(pointer, tile.to(base.dtype.element_ty), mask=live)


@triton.jit
def log_sum(a, b):
    """log2(2^a + 2^b), where one of them is finite."""
    high = tl.maximum(a, b)
    return high + tl.log2(tl.exp2(a - high) + tl.exp2(b - high))


@triton.jit
def is_token(VALID, row, token, end, PADDED: tl.constexpr):
    seen = token < end
    if PADDED:
        seen = seen & (tl.load(VALID + row + token, mask=seen, other=0) != 0)
    return seen


@remembered
@triton.jit(do_not_specialize=COUNTS)
def sum_keys(
    KEY, VALUE, WEIGHT, VALID, SUMS, TOTALS,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    n, heads, splits, size, features, scale, half,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, BN: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax of some places over one piece of the keys: values, not divided yet, in SUMS
    [pairs, splits, features + 1, head_dim]; in TOTALS [pairs, splits, 2, features + 1] the
    exponents they are relative to, and what to divide by. Last, the plain sum and number."""
    blocks = tl.cdiv(features, BF)
    block, number = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    split, pair = number % splits, (number // splits).to(tl.int64)
    batch, head = pair // heads, pair % heads
    KEY += batch * k_batch + head * k_head
    VALUE += batch * v_batch + head * v_head
    place = block * BF + tl.arange(0, BF)
    w = load_rows(WEIGHT, block * BF, features, HEAD_DIM, HEAD_DIM, D, BF)
    largest = tl.full((BF,), FLOOR, tl.float32)
    total = tl.zeros((BF,), tl.float32)
    acc = tl.zeros((BF, D), tl.float32)
    count = tl.zeros((BN,), tl.float32)
    plain = tl.zeros((D,), tl.float32)
    end = tl.minimum(n, (split + 1) * size)
    for first in range(split * size, end, BN):
        seen = is_token(VALID, batch * n, first + tl.arange(0, BN), end, PADDED)
        k = load_rows(KEY, first, end, k_token, HEAD_DIM, D, BN)
        v = load_rows(VALUE, first, end, v_token, HEAD_DIM, D, BN)
        wide = k.to(tl.float32)
        e = tl.dot(w, tl.trans(k), input_precision=PRECISION) * scale
        e -= (tl.sum(wide * wide, 1) * half)[None, :]
        e = tl.where(seen[None, :], e, -float("inf"))
        new = tl.maximum(largest, tl.max(e, 1))
        f = tl.exp2(e - (new - LIFT)[:, None]).to(v.dtype)
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(f.to(tl.float32), 1)
        acc = tl.dot(f, v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new
        # By all, though the first block's counts: no branch within a loop that loads ahead.
        count += seen.to(tl.float32)
        plain += tl.sum(tl.where(seen[:, None], v.to(tl.float32), 0.0), 0)
    piece = pair * splits + split
    SUMS += piece * (features + 1) * HEAD_DIM
    TOTALS += piece * 2 * (features + 1)
    store_rows(SUMS, block * BF, features, HEAD_DIM, acc, HEAD_DIM, D, BF)
    tl.store(TOTALS + place, largest - LIFT, mask=place < features)
    tl.store(TOTALS + features + 1 + place, total, mask=place < features)
    if block == 0:
        column = tl.arange(0, D)
        tl.store(SUMS + features * HEAD_DIM + column, plain, mask=column < HEAD_DIM)
        tl.store(TOTALS + 2 * features + 1, tl.sum(count, 0))


@remembered
@triton.jit(do_not_specialize=["splits", "features", "least"])
def join_keys(
    SUMS, TOTALS, VALUES, WIDE, LOGS, splits, features, places, least,
    HEAD_DIM: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Some columns of the values of places, less the mean of all, in VALUES and WIDE
    [pairs, features + 2, head_dim], and their log z in LOGS [pairs, places + 16], -inf where there
    is no such place. Behind them, the mean and, under all places' shares of the sum of z, the mean
    of places; top and log sum of z."""
    block, pair = one_of(tl.cdiv(HEAD_DIM, BD))
    column = block * BD + tl.arange(0, BD)
    inside = column < HEAD_DIM
    SUMS += pair * splits * (features + 1) * HEAD_DIM
    TOTALS += pair * splits * 2 * (features + 1)
    WIDE += pair * (features + 2) * HEAD_DIM
    LOGS += pair * (places + 16)
    row = tl.arange(0, BF)
    best = tl.full((BF,), FLOOR, tl.float32)
    count = 0.0
    mean = tl.zeros((BD,), tl.float32)
    for split in range(splits):
        for first in range(0, features, BF):
            at = TOTALS + split * 2 * (features + 1) + first + row
            best = tl.maximum(best, tl.load(at, mask=first + row < features, other=FLOOR))
        count += tl.load(TOTALS + split * 2 * (features + 1) + 2 * features + 1)
        at = SUMS + (split * (features + 1) + features) * HEAD_DIM + column
        mean += tl.load(at, mask=inside, other=0.0)
    some = count > 0
    top = tl.where(some, tl.max(best, 0) + LIFT, 0.0)
    count = tl.maximum(count, 1.0)
    mean = mean / count
    more = top + least + tl.log2(count)
    whole = tl.zeros((BF,), tl.float32)
    shared = tl.zeros((BD,), tl.float32)
    for first in range(0, features, BF):
        place = first + row
        live = place < features
        here = live[:, None] & inside[None, :]
        largest = tl.full((BF,), FLOOR, tl.float32)
        total = tl.zeros((BF,), tl.float32)
        acc = tl.zeros((BF, BD), tl.float32)
        for split in range(splits):
            at = TOTALS + split * 2 * (features + 1) + place
            reference = tl.load(at, mask=live, other=FLOOR)
            added = tl.load(at + features + 1, mask=live, other=0.0)
            at = SUMS + (split * (features + 1) + place)[:, None] * HEAD_DIM + column[None, :]
            new = tl.maximum(largest, reference)
            shrink, share = tl.exp2(largest - new), tl.exp2(reference - new)
            total = total * shrink + added * share
            sums = tl.load(at, mask=here, other=0.0)
            acc = acc * shrink[:, None] + sums * share[:, None]
            largest = new
        total = tl.where(total > 0, total, 1.0)
        own = largest + tl.log2(total)
        log = tl.where(some, log_sum(own, more), 0.0)
        share = tl.where(some, tl.exp2(own - log), 0.0)
        found = (acc / total[:, None] - mean[None, :]) * share[:, None]
        at = place[:, None] * HEAD_DIM + column[None, :]
        tl.store(WIDE + at, found, mask=here)
        at += pair * features * HEAD_DIM
        tl.store(VALUES + at, found.to(VALUES.dtype.element_ty), mask=here)
        log = tl.where(live, log, -float("inf"))
        tl.store(LOGS + place, log, mask=(row < BF) & (block == 0))
        z = tl.exp2(log - top)
        whole += z
        shared += tl.sum(z[:, None] * found, 0)
    total = tl.sum(whole, 0)
    tl.store(WIDE + features * HEAD_DIM + column, mean, mask=inside)
    tl.store(WIDE + (features + 1) * HEAD_DIM + column, shared / total, mask=inside)
    if block == 0:
        last = tl.arange(0, 16)
        tl.store(LOGS + places + last, tl.where(last == 0, top, tl.log2(total)))


@remembered
@triton.jit(do_not_specialize=[*COUNTS, "least"])
def read(
    QUERY, WEIGHT, VALUES, WIDE, LOGS, OUT, LSE, TRACE,
    q_batch, q_token, q_head, n, row, heads, features, places, scale, least,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What some queries make of the places; for the backward pass LSE and TRACE [pairs, row], inf
    and 0 where there is no query."""
    block, pair = one_of(tl.cdiv(n, BM))
    start = block * BM
    batch, head = pair // heads, pair % heads
    QUERY += batch * q_batch + head * q_head
    VALUES += pair * features * HEAD_DIM
    WIDE += (pair * (features + 2) + features) * HEAD_DIM
    LOGS += pair * (places + 16)
    column = tl.arange(0, D)
    q = load_rows(QUERY, start, n, q_token, HEAD_DIM, D, BM)
    peak = tl.full((BM,), FLOOR, tl.float32)
    largest = tl.full((BM,), FLOOR, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for first in range(0, features, BF):
        place = first + tl.arange(0, BF)
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        v = load_rows(VALUES, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        log = tl.load(LOGS + place)
        e = tl.dot(q, tl.trans(w), input_precision=PRECISION) * scale
        if not WHOLE:
            e = tl.where((place < features)[None, :], e, -float("inf"))
        peak = tl.maximum(peak, tl.max(e, 1))
        e += log[None, :]
        new = tl.maximum(largest, tl.max(e, 1))
        p = tl.exp2(e - (new - LIFT)[:, None]).to(v.dtype)
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p.to(tl.float32), 1)
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision=PRECISION)
        largest = new
    own = largest - LIFT + tl.log2(total)
    peak += tl.load(LOGS + places) + least
    more = peak + tl.load(LOGS + places + 1)
    lse = log_sum(own, more)
    mean = tl.load(WIDE + column, mask=column < HEAD_DIM, other=0.0)
    shared = tl.load(WIDE + HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)
    out = acc * (tl.exp2(own - lse) / total)[:, None] + mean[None, :]
    out += tl.exp2(more - lse)[:, None] * shared[None, :]
    OUT += (batch * n * heads + head) * HEAD_DIM
    store_rows(OUT, start, n, heads * HEAD_DIM, out, HEAD_DIM, D, BM)
    token = start + tl.arange(0, BM)
    lse = tl.where(token < n, lse, float("inf"))
    tl.store(LSE + pair * row + token, lse, mask=token < row)
    tl.store(TRACE + pair * row + token, tl.exp2(peak - lse), mask=token < row)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def backward_query(
    QUERY, GRAD, WEIGHT, VALUES, LOGS, LSE, TRACE, DELTA, GRAD_QUERY,
    q_batch, q_token, q_head, g_batch, g_token, g_head,
    n, row, heads, features, places, scale, back,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of some queries, and in DELTA [pairs, row] the mean under p of the gradients of p:
    from a first pass over the places, as the output is too coarse to tell it."""
    block, pair = one_of(tl.cdiv(n, BM))
    start = block * BM
    batch, head = pair // heads, pair % heads
    QUERY += batch * q_batch + head * q_head
    GRAD += batch * g_batch + head * g_head
    VALUES += pair * features * HEAD_DIM
    LOGS += pair * (places + 16)
    token = start + tl.arange(0, BM)
    q = load_rows(QUERY, start, n, q_token, HEAD_DIM, D, BM)
    g = load_rows(GRAD, start, n, g_token, HEAD_DIM, D, BM)
    lse = tl.load(LSE + pair * row + token, mask=token < row, other=float("inf"))
    trace = tl.load(TRACE + pair * row + token, mask=token < row, other=0.0)
    top = tl.load(LOGS + places)
    delta = tl.zeros((BM,), tl.float32)
    for first in range(0, features, BF):
        place = first + tl.arange(0, BF)
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        v = load_rows(VALUES, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        log = tl.load(LOGS + place)
        e = tl.dot(q, tl.trans(w), input_precision=PRECISION) * scale + log[None, :]
        p = tl.exp2(e - lse[:, None]) + trace[:, None] * tl.exp2(log - top)[None, :]
        delta += tl.sum(p * tl.dot(g, tl.trans(v), input_precision=PRECISION), 1)
    acc = tl.zeros((BM, D), tl.float32)
    for first in range(0, features, BF):
        place = first + tl.arange(0, BF)
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        v = load_rows(VALUES, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        log = tl.load(LOGS + place)
        e = tl.dot(q, tl.trans(w), input_precision=PRECISION) * scale + log[None, :]
        more = tl.dot(g, tl.trans(v), input_precision=PRECISION) - delta[:, None]
        de = (tl.exp2(e - lse[:, None]) * more).to(w.dtype)
        acc = tl.dot(de, w, acc, input_precision=PRECISION)
    GRAD_QUERY += (batch * n * heads + head) * HEAD_DIM
    store_rows(GRAD_QUERY, start, n, heads * HEAD_DIM, acc * back, HEAD_DIM, D, BM)
    tl.store(DELTA + pair * row + token, delta, mask=token < row)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def sum_queries(
    QUERY, GRAD, WEIGHT, LOGS, LSE, TRACE, DELTA, SUMS, TOTALS,
    q_batch, q_token, q_head, g_batch, g_token, g_head,
    n, row, heads, splits, size, features, places, scale,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the values of some places from one piece of the queries, in SUMS
    [pairs, splits, features, head_dim], and in TOTALS [pairs, splits, features] sums of p delta."""
    blocks = tl.cdiv(features, BF)
    block, number = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    split, pair = number % splits, (number // splits).to(tl.int64)
    batch, head = pair // heads, pair % heads
    QUERY += batch * q_batch + head * q_head
    GRAD += batch * g_batch + head * g_head
    LOGS += pair * (places + 16)
    place = block * BF + tl.arange(0, BF)
    w = load_rows(WEIGHT, block * BF, features, HEAD_DIM, HEAD_DIM, D, BF)
    log = tl.load(LOGS + place)
    z = tl.exp2(log - tl.load(LOGS + places))
    total = tl.zeros((BF,), tl.float32)
    acc = tl.zeros((BF, D), tl.float32)
    end = tl.minimum(n, (split + 1) * size)
    for first in range(split * size, end, BN):
        token = first + tl.arange(0, BN)
        at = pair * row + token
        q = load_rows(QUERY, first, end, q_token, HEAD_DIM, D, BN)
        g = load_rows(GRAD, first, end, g_token, HEAD_DIM, D, BN)
        lse = tl.load(LSE + at, mask=token < row, other=float("inf"))
        trace = tl.load(TRACE + at, mask=token < row, other=0.0)
        delta = tl.load(DELTA + at, mask=token < row, other=0.0)
        e = tl.dot(w, tl.trans(q), input_precision=PRECISION) * scale + log[:, None]
        p = tl.exp2(e - lse[None, :]) + z[:, None] * trace[None, :]
        total += tl.sum(p * delta[None, :], 1)
        # What rounding takes off is added too: all gradients of keys and values come through here.
        rounded = p.to(g.dtype)
        acc = tl.dot(rounded, g, acc, input_precision=PRECISION)
        rest = (p - rounded.to(tl.float32)).to(g.dtype)
        acc = tl.dot(rest, g, acc, input_precision=PRECISION)
    piece = pair * splits + split
    SUMS += piece * features * HEAD_DIM
    store_rows(SUMS, block * BF, features, HEAD_DIM, acc, HEAD_DIM, D, BF)
    tl.store(TOTALS + piece * features + place, total, mask=place < features)


@remembered
@triton.jit(do_not_specialize=["splits", "features"])
def join_queries(
    SUMS, TOTALS, VALUES, WIDE, GRADS, OFFSETS, splits, features, places, lower,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Gradients of the values of some places, times `lower`, in GRADS [pairs, features, head_dim];
    in OFFSETS [pairs, places], what to take off their products with values to get the gradients
    of a. It is put together from the rounded gradients, so that roundings cancel where a key is all
    that a place has."""
    block, pair = one_of(places // BF)
    first = block * BF
    place = first + tl.arange(0, BF)
    total = tl.zeros((BF,), tl.float32)
    acc = tl.zeros((BF, D), tl.float32)
    for split in range(splits):
        piece = pair * splits + split
        base = SUMS + piece * features * HEAD_DIM
        acc += load_rows(base, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        total += tl.load(TOTALS + piece * features + place, mask=place < features, other=0.0)
    acc *= lower
    rounded = acc.to(GRADS.dtype.element_ty)
    GRADS += pair * features * HEAD_DIM
    store_rows(GRADS, first, features, HEAD_DIM, rounded, HEAD_DIM, D, BF)
    VALUES += pair * features * HEAD_DIM
    WIDE += pair * (features + 2) * HEAD_DIM
    used = load_rows(VALUES, first, features, HEAD_DIM, HEAD_DIM, D, BF).to(tl.float32)
    exact = load_rows(WIDE, first, features, HEAD_DIM, HEAD_DIM, D, BF)
    column = tl.arange(0, D)
    mean = tl.load(WIDE + features * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)
    found = tl.sum(rounded.to(tl.float32) * (exact + mean[None, :]) - acc * used, 1)
    tl.store(OFFSETS + pair * places + place, found + total * lower)


@remembered
@triton.jit(do_not_specialize=[*COUNTS, "least"])
def backward_key(
    KEY, VALUE, WEIGHT, VALID, GRADS, OFFSETS, LOGS, GRAD_KEY, GRAD_VALUE,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    n, heads, features, places, scale, half, back, least, lift,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys and their values. a is 2^lift times itself, which GRADS and OFFSETS
    make up for: it sums up to 1 over all keys, and they are sums over all queries."""
    block, pair = one_of(tl.cdiv(n, BM))
    start = block * BM
    batch, head = pair // heads, pair % heads
    KEY += batch * k_batch + head * k_head
    VALUE += batch * v_batch + head * v_head
    GRADS += pair * features * HEAD_DIM
    LOGS += pair * (places + 16)
    OFFSETS += pair * places
    k = load_rows(KEY, start, n, k_token, HEAD_DIM, D, BM)
    v = load_rows(VALUE, start, n, v_token, HEAD_DIM, D, BM)
    wide = k.to(tl.float32)
    length = tl.sum(wide * wide, 1) * half - lift
    trace = tl.load(LOGS + places) + least + lift
    rest = tl.zeros((BM,), tl.float32)
    dk = tl.zeros((BM, D), tl.float32)
    dv = tl.zeros((BM, D), tl.float32)
    for first in range(0, features, BF):
        place = first + tl.arange(0, BF)
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        g = load_rows(GRADS, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        log = tl.where(place < features, tl.load(LOGS + place), float("inf"))
        offset = tl.load(OFFSETS + place)
        e = tl.dot(k, tl.trans(w), input_precision=PRECISION) * scale - length[:, None]
        a = tl.exp2(e - log[None, :])
        all_of_it = (a + tl.exp2(trace - log)[None, :]).to(g.dtype)
        dv = tl.dot(all_of_it, g, dv, input_precision=PRECISION)
        da = tl.dot(v, tl.trans(g), input_precision=PRECISION) - offset[None, :]
        de = (a * da).to(w.dtype)
        rest += tl.sum(de.to(tl.float32), 1)
        dk = tl.dot(de, w, dk, input_precision=PRECISION)
    dk = dk * back - k.to(tl.float32) * (rest * back * back)[:, None]
    seen = is_token(VALID, batch * n, start + tl.arange(0, BM), n, PADDED)[:, None]
    at = (batch * n * heads + head) * HEAD_DIM
    store_rows(GRAD_KEY + at, start, n, heads * HEAD_DIM, tl.where(seen, dk, 0.0), HEAD_DIM, D, BM)
    store_rows(
        GRAD_VALUE + at, start, n, heads * HEAD_DIM, tl.where(seen, dv, 0.0), HEAD_DIM, D, BM
    )
