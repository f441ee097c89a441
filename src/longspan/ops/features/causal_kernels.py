"""The fused kernels behind `causal.py`: attention by features where a token sees those before it.

Reading aids:

- *Places* are as in `kernels`: a softmax over keys for every feature, then one over features for
  every query. Causally what a place holds grows along the text. It is written down before every
  *chunk*, and a query reads those of its chunk.
- Keys of its own chunk a query sees by their scores, S_tj = sum_m f_tm g_jm, features relative to
  the largest of each query and of each key. So nothing that is read depends on what comes later,
  not even in rounding.
- Backward, places hold for every key what later chunks want of it: the mean of their gradients, and
  of what is to be taken off (*extra*), under a softmax over queries. That is the same walk, from
  the end, with e_tm - lse_t for exponents.
- A text is cut into *pieces* that are walked side by side: once for what each adds, which is put
  together from piece to piece, then again from there, writing down.
- Exponents of keys and queries alike are scale (w . x) - shift. Logarithms and exponents are in
  base 2. There is nothing at a place whose log is -inf.
- Backward, products have features for rows and tokens for columns, and what both loops share is
  their second factor.
"""

import triton
import triton.language as tl

from longspan.ops.features.kernels import FLOOR, LIFT, load_rows, one_of, store_rows
from longspan.ops.launch import remembered

UP = tl.constexpr(15.0)  # features of queries and keys are 2^UP at most, which leaves room below
STEEP = tl.constexpr(100.0)  # no power of 2 above this: where all features of a score have vanished

COUNTS = ["n", "heads", "pairs", "pair0", "pieces", "size", "chunks", "features"]


@triton.jit
def load_numbers(base, first, count, BLOCK: tl.constexpr, beyond):
    at = first + tl.arange(0, BLOCK)
    return tl.load(base + at, mask=at < count, other=beyond)


@triton.jit
def load_tops(TOPS, pair, pairs, row, start, n, CHUNK: tl.constexpr):
    """Of a chunk's queries and of its keys the largest exponents, and what is taken off the keys'
    so that these are UP: inf beyond the text, where there is no key."""
    every = tl.cast(pairs, tl.int64) * row
    TOPS += pair * row
    of_query = load_numbers(TOPS, start, n, CHUNK, 0.0)
    of_key = load_numbers(TOPS + every, start, n, CHUNK, -float("inf"))
    shift = load_numbers(TOPS + 2 * every, start, n, CHUNK, float("inf"))
    return of_query, of_key, tl.where(of_key > FLOOR, shift + of_key - UP, float("inf"))


@triton.jit
def load_mean(base, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    return tl.load(base + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)


@triton.jit
def rounded(tile, dtype: tl.constexpr):
    """In half precision, and what rounding takes off. float16 ends where others go on."""
    if dtype == tl.float16:
        tile = tl.minimum(tl.maximum(tile, -65504.0), 65504.0)
    made = tile.to(dtype)
    return made, (tile - made.to(tl.float32)).to(dtype)


@triton.jit
def as_tf32(tile):
    """To the nearest; products would cut off what is beyond."""
    return ((tile.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def as_feature(tile, dtype: tl.constexpr):
    """As a factor of products of features, which can be far below the largest: float16 has as many
    digits as tf32, but ends too soon."""
    if dtype == tl.float16:
        tile = as_tf32(tile)
    else:
        tile = tile.to(dtype)
    return tile


@triton.jit
def as_features(tile, dtype: tl.constexpr):
    """As the other factor, and what rounding takes off."""
    if dtype == tl.float16:
        made = as_tf32(tile)
        rest = tile - made
    else:
        made, rest = rounded(tile, dtype)
    return made, rest


@remembered
@triton.jit(do_not_specialize=COUNTS)
def peaks(
    QUERY, KEY, WEIGHT, TOPS,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    n, row, heads, pairs, features, scale, half,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BF: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """TOPS [3, pairs, row]: the largest exponent of each query and of each key, and the shift of
    each key; beyond the text -inf, -inf and inf."""
    block, pair = one_of(tl.cdiv(n, CHUNK))
    start = block * CHUNK
    batch, head = pair // heads, pair % heads
    QUERY += batch * q_batch + head * q_head
    KEY += batch * k_batch + head * k_head
    q = load_rows(QUERY, start, n, q_token, HEAD_DIM, D, CHUNK)
    k = load_rows(KEY, start, n, k_token, HEAD_DIM, D, CHUNK)
    wide = k.to(tl.float32)
    shift = tl.sum(wide * wide, 1) * half
    of_query = tl.full((CHUNK,), -float("inf"), tl.float32)
    of_key = tl.full((CHUNK,), -float("inf"), tl.float32)
    for first in range(0, features, BF):
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        e = tl.dot(q, tl.trans(w), input_precision=PRECISION) * scale
        x = tl.dot(k, tl.trans(w), input_precision=PRECISION) * scale
        if not WHOLE:
            there = (first + tl.arange(0, BF) < features)[None, :]
            e = tl.where(there, e, -float("inf"))
            x = tl.where(there, x, -float("inf"))
        of_query = tl.maximum(of_query, tl.max(e, 1))
        of_key = tl.maximum(of_key, tl.max(x, 1))
    token = start + tl.arange(0, CHUNK)
    inside, known = token < row, token < n
    TOPS += pair * row
    tl.store(TOPS + token, tl.where(known, of_query, -float("inf")), mask=inside)
    TOPS += tl.cast(pairs, tl.int64) * row
    tl.store(TOPS + token, tl.where(known, of_key - shift, -float("inf")), mask=inside)
    TOPS += tl.cast(pairs, tl.int64) * row
    tl.store(TOPS + token, tl.where(known, shift, float("inf")), mask=inside)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def walk(
    STATE, VALUE, WEIGHT, SHIFT, EXTRA, START, STARTED, STARTED_EXTRA, HELD, LOGS, EXTRAS,
    s_batch, s_token, s_head, v_batch, v_token, v_head,
    n, row, heads, pair0, pieces, size, chunks, features, places, scale,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BF: tl.constexpr,
    KEEP: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some places along one piece of the text: means of values, and logs of what they were divided
    by.

    To KEEP: in HELD [own pairs, chunks, features + 1, head_dim] and LOGS [own pairs, chunks,
    places] what is there before each chunk, and, in REVERSE, in EXTRAS likewise the means of EXTRA;
    from START [pairs, pieces + 1, features + 1, head_dim] with STARTED and STARTED_EXTRA
    [pairs, pieces + 1, places] on. Else what the piece adds, into the place behind its own there,
    or, in REVERSE, into its own, the one behind the last being what all start from.

    Behind the last place stands in START the plain sum of values, and in HELD about their mean,
    which is taken off all places there: so what is rounded is what differs. In REVERSE there is
    no such, but what rounding took off [own pairs, chunks, 2 * features, head_dim].
    """
    blocks = tl.cdiv(features, BF)
    block, number = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    piece, own = number % pieces, (number // pieces).to(tl.int64)
    pair = own + pair0
    batch, head = pair // heads, pair % heads
    STATE += batch * s_batch + head * s_head
    VALUE += batch * v_batch + head * v_head
    SHIFT += pair * row
    EXTRA += pair * row
    lines = features + 1
    if REVERSE:
        lines = 2 * features
    HELD += own * chunks * lines * HEAD_DIM
    LOGS += own * chunks * places
    EXTRAS += own * chunks * places
    column = tl.arange(0, D)
    place = block * BF + tl.arange(0, BF)
    there = place < features
    w = load_rows(WEIGHT, block * BF, features, HEAD_DIM, HEAD_DIM, D, BF)
    # What is held is relative to 2^reference.
    reference = tl.full((BF,), FLOOR, tl.float32)
    total = tl.zeros((BF,), tl.float32)
    extra = tl.zeros((BF,), tl.float32)
    acc = tl.zeros((BF, D), tl.float32)
    plain = tl.zeros((D,), tl.float32)
    at = pair * (pieces + 1) + piece
    if KEEP == REVERSE:
        at += 1
    START += at * (features + 1) * HEAD_DIM
    if KEEP:
        log = tl.load(STARTED + at * places + place)
        total = tl.where(log > FLOOR, 1.0, 0.0)
        reference = tl.maximum(log, FLOOR)
        acc += load_rows(START, block * BF, features, HEAD_DIM, HEAD_DIM, D, BF)
        plain += tl.load(START + features * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)
        if REVERSE:
            extra = tl.load(STARTED_EXTRA + at * places + place)
    first = piece * size
    last = tl.minimum(first + size, chunks)
    for step in range(first, last):
        chunk = step
        if REVERSE:
            chunk = first + last - 1 - step
        if KEEP:
            share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
            log = tl.where(there & (total > 0), reference + tl.log2(total), -float("inf"))
            here = tl.cast(chunk, tl.int64)
            held = acc * share[:, None]
            to = HELD + here * lines * HEAD_DIM
            if not REVERSE:
                # All programs round it alike. One more than there are: it is defined for none.
                mean = (plain / (1.0 + chunk * CHUNK)).to(HELD.dtype.element_ty)
                tl.store(
                    to + features * HEAD_DIM + column, mean, mask=(column < HEAD_DIM) & (block == 0)
                )
                held -= mean.to(tl.float32)[None, :]
            near, rest = rounded(held, HELD.dtype.element_ty)
            store_rows(to, block * BF, features, HEAD_DIM, near, HEAD_DIM, D, BF)
            if REVERSE:
                to += features * HEAD_DIM
                store_rows(to, block * BF, features, HEAD_DIM, rest, HEAD_DIM, D, BF)
            tl.store(LOGS + here * places + place, log, mask=place < places)
            if REVERSE:
                tl.store(EXTRAS + here * places + place, extra * share, mask=place < places)
        start = chunk * CHUNK
        x = load_rows(STATE, start, n, s_token, HEAD_DIM, D, CHUNK)
        v = load_rows(VALUE, start, n, v_token, HEAD_DIM, D, CHUNK)
        shift = load_numbers(SHIFT, start, n, CHUNK, float("inf"))
        e = tl.dot(w, tl.trans(x), input_precision=PRECISION) * scale - shift[None, :]
        new = tl.maximum(reference, tl.max(e, 1) - LIFT)
        f = tl.exp2(e - new[:, None])
        near, rest = rounded(f, v.dtype)
        shrink = tl.exp2(reference - new)
        acc = tl.dot(near, v, acc * shrink[:, None], input_precision=PRECISION)
        if REVERSE:
            # All gradients of keys come through here.
            acc = tl.dot(rest, v, acc, input_precision=PRECISION)
            total = total * shrink + tl.sum(f, 1)
            more = load_numbers(EXTRA, start, n, CHUNK, 0.0)
            extra = extra * shrink + tl.sum(f * more[None, :], 1)
        else:
            total = total * shrink + tl.sum(near.to(tl.float32), 1)
            plain += tl.sum(v.to(tl.float32), 0)
        reference = new
    if not KEEP:
        share = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        log = tl.where(there & (total > 0), reference + tl.log2(total), -float("inf"))
        held = acc * share[:, None]
        store_rows(START, block * BF, features, HEAD_DIM, held, HEAD_DIM, D, BF)
        tl.store(
            START + features * HEAD_DIM + column, plain, mask=(column < HEAD_DIM) & (block == 0)
        )
        tl.store(STARTED + at * places + place, log, mask=place < places)
        if REVERSE:
            tl.store(STARTED_EXTRA + at * places + place, extra * share, mask=place < places)


@remembered
@triton.jit(do_not_specialize=["pieces", "features"])
def join(
    START, STARTED, STARTED_EXTRA, pieces, features, places,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BF: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """What pieces add becomes what there is before, or in REVERSE behind, each of them and after
    all, for some places: see `walk`."""
    block, pair = one_of(tl.cdiv(features, BF))
    START += pair * (pieces + 1) * (features + 1) * HEAD_DIM
    STARTED += pair * (pieces + 1) * places
    STARTED_EXTRA += pair * (pieces + 1) * places
    place = block * BF + tl.arange(0, BF)
    known = place < places
    at = tl.cast(0, tl.int64)
    if REVERSE:
        at += pieces
    log = tl.load(STARTED + at * places + place, mask=known, other=-float("inf"))
    total = tl.where(log > FLOOR, 1.0, 0.0)
    reference = tl.maximum(log, FLOOR)
    extra = tl.zeros((BF,), tl.float32)
    held = START + at * (features + 1) * HEAD_DIM
    acc = load_rows(held, block * BF, features, HEAD_DIM, HEAD_DIM, D, BF)
    column = tl.arange(0, D)
    inside = (column < HEAD_DIM) & (block == 0)
    plain = tl.load(held + features * HEAD_DIM + column, mask=inside, other=0.0)
    for _ in range(pieces):
        if REVERSE:
            at -= 1
        else:
            at += 1
        held = START + at * (features + 1) * HEAD_DIM
        more = STARTED_EXTRA + at * places + place
        log = tl.load(STARTED + at * places + place, mask=known, other=-float("inf"))
        added = load_rows(held, block * BF, features, HEAD_DIM, HEAD_DIM, D, BF)
        plain += tl.load(held + features * HEAD_DIM + column, mask=inside, other=0.0)
        new = tl.maximum(reference, log)
        shrink, share = tl.exp2(reference - new), tl.exp2(log - new)
        acc = acc * shrink[:, None] + added * share[:, None]
        total = total * shrink + share
        if REVERSE:
            extra = extra * shrink + tl.load(more, mask=known, other=0.0) * share
        reference = new
        divide = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        log = tl.where(total > 0, reference + tl.log2(total), -float("inf"))
        # Several threads have the same numbers, and one writes: not before all have read.
        tl.debug_barrier()
        store_rows(held, block * BF, features, HEAD_DIM, acc * divide[:, None], HEAD_DIM, D, BF)
        tl.store(STARTED + at * places + place, log, mask=known)
        tl.store(held + features * HEAD_DIM + column, plain, mask=inside)
        if REVERSE:
            tl.store(more, extra * divide, mask=known)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def read(
    QUERY, KEY, VALUE, WEIGHT, TOPS, HELD, LOGS, OUT, LSE,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    n, row, heads, pairs, pair0, chunks, features, places, scale,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BF: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the queries of a chunk make of its keys and of what was there before it, and in LSE
    [pairs, row] their log-sum-exp, inf beyond the text and where nothing is left to see."""
    chunk, own = one_of(chunks)
    pair, start = own + pair0, chunk * CHUNK
    batch, head = pair // heads, pair % heads
    QUERY += batch * q_batch + head * q_head
    KEY += batch * k_batch + head * k_head
    VALUE += batch * v_batch + head * v_head
    HELD += (own * chunks + chunk) * (features + 1) * HEAD_DIM
    LOGS += (own * chunks + chunk) * places
    of_query, of_key, lower = load_tops(TOPS, pair, pairs, row, start, n, CHUNK)
    q = load_rows(QUERY, start, n, q_token, HEAD_DIM, D, CHUNK)
    k = load_rows(KEY, start, n, k_token, HEAD_DIM, D, CHUNK)
    reference = tl.full((CHUNK,), FLOOR, tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    acc = tl.zeros((CHUNK, D), tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first in range(0, features, BF):
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        held = load_rows(HELD, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        log = tl.load(LOGS + first + tl.arange(0, BF))
        e = tl.dot(q, tl.trans(w), input_precision=PRECISION) * scale
        if not WHOLE:
            e = tl.where((first + tl.arange(0, BF) < features)[None, :], e, -float("inf"))
        x = tl.dot(w, tl.trans(k), input_precision=PRECISION) * scale - lower[None, :]
        f = as_feature(tl.exp2(e - (of_query - UP)[:, None]), q.dtype)
        g = as_feature(tl.exp2(x), q.dtype)
        scores = tl.dot(f, g, scores, input_precision=PRECISION)
        e += log[None, :]
        new = tl.maximum(reference, tl.max(e, 1) - LIFT)
        p = tl.exp2(e - new[:, None]).to(held.dtype)
        shrink = tl.exp2(reference - new)
        total = total * shrink + tl.sum(p.to(tl.float32), 1)
        acc = tl.dot(p, held, acc * shrink[:, None], input_precision=PRECISION)
        reference = new
    acc += total[:, None] * load_mean(HELD + features * HEAD_DIM, HEAD_DIM, D)[None, :]
    line = tl.arange(0, CHUNK)
    seen = (line[:, None] >= line[None, :]) & (of_key > FLOOR)[None, :]
    largest = tl.max(tl.where(seen, of_key[None, :], FLOOR), 1)
    scores = tl.where(seen, scores * tl.exp2(of_key[None, :] - largest[:, None]), 0.0)
    best = tl.max(scores, 1)
    some = best > 0
    level = of_query + largest - 2 * UP
    new = tl.where(some, level + tl.log2(tl.where(some, best, 1.0)) - LIFT, FLOOR)
    new = tl.maximum(reference, new)
    v = load_rows(VALUE, start, n, v_token, HEAD_DIM, D, CHUNK)
    rise = tl.exp2(tl.minimum(level - new, STEEP))
    weights = (scores * tl.where(some, rise, 0.0)[:, None]).to(v.dtype)
    shrink = tl.exp2(reference - new)
    total = total * shrink + tl.sum(weights.to(tl.float32), 1)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision=PRECISION)
    found = total > 0
    total = tl.where(found, total, 1.0)
    OUT += (batch * n * heads + head) * HEAD_DIM
    store_rows(OUT, start, n, heads * HEAD_DIM, acc / total[:, None], HEAD_DIM, D, CHUNK)
    token = start + line
    lse = tl.where(found & (token < n), new + tl.log2(total), float("inf"))
    tl.store(LSE + pair * row + token, lse, mask=token < row)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def backward_query(
    QUERY, KEY, VALUE, GRAD, WEIGHT, TOPS, HELD, LOGS, LSE, SUM, DELTA, GRAD_QUERY,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head,
    n, row, heads, pairs, pair0, chunks, features, places, scale, back,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BF: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of a chunk, and in DELTA [pairs, row] the mean under their weights
    of the gradients of these, in SUM their log-sum-exp: put together again from the very weights
    that gradients are made of, as the output and its weights were rounded otherwise."""
    chunk, own = one_of(chunks)
    pair, start = own + pair0, chunk * CHUNK
    batch, head = pair // heads, pair % heads
    QUERY += batch * q_batch + head * q_head
    KEY += batch * k_batch + head * k_head
    VALUE += batch * v_batch + head * v_head
    GRAD += batch * g_batch + head * g_head
    HELD += (own * chunks + chunk) * (features + 1) * HEAD_DIM
    LOGS += (own * chunks + chunk) * places
    of_query, of_key, lower = load_tops(TOPS, pair, pairs, row, start, n, CHUNK)
    lse = load_numbers(LSE + pair * row, start, n, CHUNK, float("inf"))
    q = load_rows(QUERY, start, n, q_token, HEAD_DIM, D, CHUNK)
    k = load_rows(KEY, start, n, k_token, HEAD_DIM, D, CHUNK)
    grad = load_rows(GRAD, start, n, g_token, HEAD_DIM, D, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    delta = tl.zeros((CHUNK,), tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)  # keys x queries
    for first in range(0, features, BF):
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        held = load_rows(HELD, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        log = tl.load(LOGS + first + tl.arange(0, BF))
        e = tl.dot(w, tl.trans(q), input_precision=PRECISION) * scale
        if not WHOLE:
            e = tl.where((first + tl.arange(0, BF) < features)[:, None], e, -float("inf"))
        x = tl.dot(k, tl.trans(w), input_precision=PRECISION) * scale - lower[:, None]
        f = as_feature(tl.exp2(e - (of_query - UP)[None, :]), q.dtype)
        g = as_feature(tl.exp2(x), q.dtype)
        scores = tl.dot(g, f, scores, input_precision=PRECISION)
        p = tl.exp2(e + log[:, None] - lse[None, :])
        total += tl.sum(p, 0)
        delta += tl.sum(p * tl.dot(held, tl.trans(grad), input_precision=PRECISION), 0)
    v = load_rows(VALUE, start, n, v_token, HEAD_DIM, D, CHUNK)
    line = tl.arange(0, CHUNK)
    seen = (line[:, None] <= line[None, :]) & (of_key > FLOOR)[:, None]
    # As all that is held, beside the mean.
    mean = load_mean(HELD + features * HEAD_DIM, HEAD_DIM, D)
    common = tl.sum(grad.to(tl.float32) * mean[None, :], 1)
    wanted = tl.dot(v, tl.trans(grad), input_precision=PRECISION) - common[None, :]
    # Of a key's weight, all but the product of its features with the query's.
    rise = tl.minimum(of_key[:, None] + (of_query - lse)[None, :], STEEP)
    rise = tl.where(seen, rise, -float("inf"))
    scores *= tl.exp2(rise - 2 * UP)
    total += tl.sum(scores, 0)
    total = tl.where(total > 0, total, 1.0)
    delta = (delta + tl.sum(scores * wanted, 0)) / total
    lse += tl.log2(total)
    rise = tl.minimum(rise - tl.log2(total)[None, :], STEEP)
    # Relative to the largest of each query, which is made up for behind the product.
    largest = tl.maximum(tl.max(rise, 0), FLOOR)
    by_scores = tl.exp2(rise - largest[None, :]) * (wanted - delta[None, :])
    by_scores, by_rest = as_features(by_scores, q.dtype)
    largest -= of_query + UP
    acc = tl.zeros((D, CHUNK), tl.float32)
    for first in range(0, features, BF):
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        held = load_rows(HELD, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        log = tl.load(LOGS + first + tl.arange(0, BF))
        e = tl.dot(w, tl.trans(q), input_precision=PRECISION) * scale
        if not WHOLE:
            e = tl.where((first + tl.arange(0, BF) < features)[:, None], e, -float("inf"))
        x = tl.dot(w, tl.trans(k), input_precision=PRECISION) * scale - lower[None, :]
        g = as_feature(tl.exp2(x), q.dtype)
        near = tl.dot(g, by_scores, input_precision=PRECISION)
        near = tl.dot(g, by_rest, near, input_precision=PRECISION)
        far = tl.dot(held, tl.trans(grad), input_precision=PRECISION) - delta[None, :]
        de = tl.exp2(e + largest[None, :]) * near
        de += tl.exp2(e + log[:, None] - lse[None, :]) * far
        de, lost = rounded(de, w.dtype)
        acc = tl.dot(tl.trans(w), de, acc, input_precision=PRECISION)
        acc = tl.dot(tl.trans(w), lost, acc, input_precision=PRECISION)
    GRAD_QUERY += (batch * n * heads + head) * HEAD_DIM
    made = tl.trans(acc) * back
    store_rows(GRAD_QUERY, start, n, heads * HEAD_DIM, made, HEAD_DIM, D, CHUNK)
    token = start + line
    tl.store(DELTA + pair * row + token, delta + common, mask=token < row)
    tl.store(SUM + pair * row + token, lse, mask=token < row)


@remembered
@triton.jit(do_not_specialize=COUNTS)
def backward_key(
    QUERY, KEY, VALUE, GRAD, WEIGHT, TOPS, HELD, LOGS, EXTRAS, LSE, DELTA, GRAD_KEY, GRAD_VALUE,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head,
    n, row, heads, pairs, pair0, chunks, features, places, scale, back, down,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BF: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys of a chunk and of their values, from its queries and from what HELD,
    LOGS and EXTRAS tell of later ones. Sums over these are 2^-down of what they are until the end,
    so that float16 holds them."""
    chunk, own = one_of(chunks)
    pair, start = own + pair0, chunk * CHUNK
    batch, head = pair // heads, pair % heads
    QUERY += batch * q_batch + head * q_head
    KEY += batch * k_batch + head * k_head
    VALUE += batch * v_batch + head * v_head
    GRAD += batch * g_batch + head * g_head
    HELD += (own * chunks + chunk) * 2 * features * HEAD_DIM
    LOGS += (own * chunks + chunk) * places
    EXTRAS += (own * chunks + chunk) * places
    of_query, of_key, lower = load_tops(TOPS, pair, pairs, row, start, n, CHUNK)
    lse = load_numbers(LSE + pair * row, start, n, CHUNK, float("inf"))
    delta = load_numbers(DELTA + pair * row, start, n, CHUNK, 0.0)
    q = load_rows(QUERY, start, n, q_token, HEAD_DIM, D, CHUNK)
    k = load_rows(KEY, start, n, k_token, HEAD_DIM, D, CHUNK)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)  # queries x keys
    for first in range(0, features, BF):
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        e = tl.dot(q, tl.trans(w), input_precision=PRECISION) * scale
        if not WHOLE:
            e = tl.where((first + tl.arange(0, BF) < features)[None, :], e, -float("inf"))
        x = tl.dot(w, tl.trans(k), input_precision=PRECISION) * scale - lower[None, :]
        f = as_feature(tl.exp2(e - (of_query - UP)[:, None]), q.dtype)
        g = as_feature(tl.exp2(x), q.dtype)
        scores = tl.dot(f, g, scores, input_precision=PRECISION)
    v = load_rows(VALUE, start, n, v_token, HEAD_DIM, D, CHUNK)
    grad = load_rows(GRAD, start, n, g_token, HEAD_DIM, D, CHUNK)
    line = tl.arange(0, CHUNK)
    seen = (line[:, None] >= line[None, :]) & (of_key > FLOOR)[None, :]
    rise = tl.minimum(of_key[None, :] + (of_query - lse)[:, None], STEEP)
    rise = tl.where(seen, rise, -float("inf"))
    weights = (scores * tl.exp2(rise - 2 * UP)).to(q.dtype)
    by_value = tl.dot(tl.trans(grad), weights, input_precision=PRECISION) * tl.exp2(-down)
    wanted = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    largest = tl.maximum(tl.max(rise, 0), FLOOR)
    by_scores = tl.exp2(rise - largest[None, :]) * (wanted - delta[:, None])
    by_scores, by_rest = as_features(by_scores, q.dtype)
    largest -= down + UP
    rest = tl.zeros((CHUNK,), tl.float32)
    acc = tl.zeros((D, CHUNK), tl.float32)
    for first in range(0, features, BF):
        w = load_rows(WEIGHT, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        held = load_rows(HELD, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        lost = load_rows(HELD + features * HEAD_DIM, first, features, HEAD_DIM, HEAD_DIM, D, BF)
        log = tl.load(LOGS + first + tl.arange(0, BF)) - down
        extra = tl.load(EXTRAS + first + tl.arange(0, BF))
        e = tl.dot(w, tl.trans(q), input_precision=PRECISION) * scale
        if not WHOLE:
            e = tl.where((first + tl.arange(0, BF) < features)[:, None], e, -float("inf"))
        x = tl.dot(w, tl.trans(k), input_precision=PRECISION) * scale - lower[None, :]
        f = as_feature(tl.exp2(e - (of_query - UP)[None, :]), q.dtype)
        near = tl.dot(f, by_scores, input_precision=PRECISION)
        near = tl.dot(f, by_rest, near, input_precision=PRECISION)
        x -= UP
        u = tl.exp2(x + (of_key[None, :] + log[:, None]))
        far = tl.dot(held, tl.trans(v), input_precision=PRECISION) - extra[:, None]
        far = tl.dot(lost, tl.trans(v), far, input_precision=PRECISION)
        dx = tl.exp2(x + largest[None, :]) * near + u * far
        rest += tl.sum(dx, 0)
        dx, lost = rounded(dx, w.dtype)
        acc = tl.dot(tl.trans(w), dx, acc, input_precision=PRECISION)
        acc = tl.dot(tl.trans(w), lost, acc, input_precision=PRECISION)
        by_value = tl.dot(tl.trans(held), u.to(q.dtype), by_value, input_precision=PRECISION)
    up = tl.exp2(down)
    dk = tl.trans(acc) * (back * up) - k.to(tl.float32) * (rest * (back * back * up))[:, None]
    at = (batch * n * heads + head) * HEAD_DIM
    store_rows(GRAD_KEY + at, start, n, heads * HEAD_DIM, dk, HEAD_DIM, D, CHUNK)
    dv = tl.trans(by_value) * up
    store_rows(GRAD_VALUE + at, start, n, heads * HEAD_DIM, dv, HEAD_DIM, D, CHUNK)
