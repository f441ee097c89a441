"""The fused kernels behind `fused.py`. Tokens stay where they are: a program takes some slots of
one round's sorted order, and reads and writes the rows of the tokens that stand in them.

Reading aids:

- *Slots, places, rows.* PLACES says which token stands in each slot; ~token is one that is padding,
  and sees nothing. Each token has one slot in each round, so that its row belongs to one program,
  and nothing is ever atomic: results do not depend on the order in which programs run.
- *Marks.* Of two tokens one sees the other in a round if its mark there is at least as large, and
  larger by no more than `reach`. Those of tokens in all rounds are laid out in the order of each,
  rows of `span` that may be read beyond their end.
- *Rounds.* A key that a token sees in several counts once, as part of it in each. With the
  log-sum-exp over all of them, weights backward are those of one softmax: rounds add up.
- *ROUTED.* Clusters choose their members, so a token may stand in many slots, or none: rows are
  those of slots, put together by `gather`. What a token makes of each of its clusters counts by
  their number, which is in the log-sum-exp.
- Scores are kept in base 2: `scale` includes log2(e), and so does the log-sum-exp. It is +inf for
  rows that see nothing, whose weights recompute to exactly zero, and NEVER for those that see
  themselves alone.
"""

import triton
import triton.language as tl

from longspan.ops.launch import remembered
from longspan.ops.window.kernels import is_kept, load_rows, row_key, store_rows

# Finite, so that (-inf) - NEVER stays -inf where inf - inf would be NaN.
NEVER = tl.constexpr(-1.0e30)
PADDING = tl.constexpr(0x7FFFFFFF)  # the cluster of what is none, sorted last

# Lengths vary from call to call; strides and sizes of chunks keep their divisibility, which decides
# how wide memory is read.
NUMBERS = ["n", "slots", "heads", "lists", "before", "drop"]


@triton.jit
def one_of(blocks):
    """Which block of which row a program has. All are on one axis: the others end at 65,535."""
    return tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)


@remembered
@triton.jit(do_not_specialize=["n", "span", "size"])
def settle(
    CLUSTERS, ORDER, PLACES, BY_TOKEN, MARKS, n, span, size,
    ROUNDS: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Of clusters and tokens in sorted order [lists, rounds, n]: PLACES, and marks, by token if
    they are to be looked up from other rounds."""
    block, row = one_of(tl.cdiv(n, BM))
    slot = block * BM + tl.arange(0, BM)
    here = slot < n
    cluster = tl.load(CLUSTERS + row * n + slot, mask=here, other=0)
    token = tl.load(ORDER + row * n + slot, mask=here, other=0).to(tl.int32)
    tl.store(PLACES + row * n + slot, tl.where(cluster == PADDING, ~token, token), mask=here)
    # Causally, tokens of different clusters are kept further apart than the reach.
    mark = slot + cluster * (size + 1) if CAUSAL else slot // size
    if ROUNDS > 1:
        BY_TOKEN += (row // ROUNDS * n) * ROUNDS + row % ROUNDS
        tl.store(BY_TOKEN + token * ROUNDS, mark, mask=here)
    elif CAUSAL:
        tl.store(MARKS + row * span + slot, mark, mask=here)


@remembered
@triton.jit(do_not_specialize=["n", "span"])
def spread(ORDER, BY_TOKEN, MARKS, n, span, ROUNDS: tl.constexpr, BM: tl.constexpr):
    """The marks that tokens have in all rounds, in the order of each."""
    block, row = one_of(tl.cdiv(n, BM))
    slot = block * BM + tl.arange(0, BM)
    here = slot < n
    token = tl.load(ORDER + row * n + slot, mask=here, other=0).to(tl.int32)
    BY_TOKEN += (row // ROUNDS * n) * ROUNDS
    MARKS += row * ROUNDS * span
    for other in tl.static_range(ROUNDS):
        mark = tl.load(BY_TOKEN + token * ROUNDS + other, mask=here, other=0)
        tl.store(MARKS + other * span + slot, mark, mask=here)


@triton.jit
def own_marks(slot, MARKS, number, span, CAUSAL: tl.constexpr):
    """What a token's own round compares: marks, of which chunks alone can do without reading."""
    if CAUSAL:
        return tl.load(MARKS + number * span + slot)
    return slot


@triton.jit
def visible(
    x, ok, i, j, slot_i, slot_j, MARKS, number, span, reach,
    ROUNDS: tl.constexpr, SELF_LAST: tl.constexpr,
):  # fmt: skip
    """Scores of queries at places i and keys at places j, which broadcast together: -inf for what
    is not `ok` in their own round, and less by the share of other rounds for what is."""
    ok = ok & (j >= 0)
    if SELF_LAST:
        ok = ok & (i != j)
    if ROUNDS > 1:
        times = tl.full(x.shape, 1.0, tl.float32)
        for step in tl.static_range(1, ROUNDS):
            other = (number + step) % ROUNDS * span
            apart = tl.load(MARKS + other + slot_i) - tl.load(MARKS + other + slot_j)
            times += tl.where(apart.to(tl.uint32) <= tl.cast(reach, tl.uint32), 1.0, 0.0)
        x -= tl.log2(times)
    return tl.where(ok, x, float("-inf"))


@triton.jit
def between(mark, low, width):
    """low <= mark < low + width in one comparison: unsigned, what lies below wraps to the top."""
    return (mark[None, :] - low[:, None]).to(tl.uint32) < tl.cast(width, tl.uint32)


@triton.jit
def members(START, batch, head, heads, n, place, live):
    """In how many slots tokens stand."""
    START += (batch * heads + head) * (n + 1) + place
    return tl.load(START + 1, mask=live, other=1) - tl.load(START, mask=live, other=0)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def forward(
    Q, K, V, OUT, LSE, PLACES, MARKS, START, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    n, slots, span, heads, lists, size, before, reach, scale, drop, boost,
    ROUNDS: tl.constexpr, CAUSAL: tl.constexpr, ROUTED: tl.constexpr, SELF_LAST: tl.constexpr,
    DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [rounds, batch, rows, heads, dim] and log-sum-exp [rounds, batch, heads, rows] of BM
    slots of one round and head."""
    block, stream = one_of(tl.cdiv(slots, BM))
    first, number = block * BM, (stream % ROUNDS).to(tl.int32)
    batch, head = stream // ROUNDS // heads, (stream // ROUNDS % heads).to(tl.int32)
    rows = slots if ROUTED else n
    batches = (tl.num_programs(0) // (tl.cdiv(slots, BM) * ROUNDS * heads)).to(tl.int64)
    PLACES += ((batch * lists + head % lists) * ROUNDS + number) * slots
    MARKS += ((batch * lists + head % lists) * ROUNDS + number) * ROUNDS * span
    slot = first + tl.arange(0, BM)
    place = tl.load(PLACES + slot, mask=slot < slots, other=-1)
    live = place >= 0
    row = slot if ROUTED else tl.where(live, place, ~place)
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    q = load_rows(Q + batch * q_batch + head * q_head, place, q_token, live, HEAD_DIM, D)
    begin = tl.maximum(first - reach, 0) if CAUSAL else tl.maximum(first // size - before, 0) * size
    end = tl.minimum(first + BM if CAUSAL else ((first + BM - 1) // size + 1) * size, slots)
    mark = own_marks(slot, MARKS, number, span, CAUSAL)
    low = mark - reach if CAUSAL else (mark // size - before) * size
    width = reach + 1 if CAUSAL else (before + 1) * size
    chance = row
    if DROPOUT:
        chance = row_key(SEED, (batch * heads + head) * ROUNDS + number, row)

    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), NEVER, tl.float32)
    for s in range(begin, end, BN):
        others = s + tl.arange(0, BN)
        listed = tl.load(PLACES + others, mask=others < end, other=-1)
        k = load_rows(K, listed, k_token, listed >= 0, HEAD_DIM, D)
        v = load_rows(V, listed, v_token, listed >= 0, HEAD_DIM, D)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        x = visible(
            x, between(own_marks(others, MARKS, number, span, CAUSAL), low, width),
            place[:, None], listed[None, :], slot[:, None], others[None, :],
            MARKS, number, span, reach, ROUNDS, SELF_LAST,
        )  # fmt: skip
        new = tl.maximum(peak, tl.max(x, 1))
        p = tl.exp2(x - new[:, None])
        fade = tl.exp2(peak - new)
        total = total * fade + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(is_kept(chance[:, None], listed[None, :], drop), p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        peak = new

    seen = live & (total > 0)
    acc = acc * tl.where(seen, boost / total, 0.0)[:, None]
    lse = tl.where(seen, peak + tl.log2(total), float("inf"))
    if ROUTED:
        lse += tl.log2(members(START, batch, head, heads, n, place, live).to(tl.float32))
    if SELF_LAST:
        alone = live & (total == 0)
        lse = tl.where(alone, NEVER, lse)
        if tl.max(alone.to(tl.int32), 0) > 0:
            if DROPOUT:
                alone = alone & is_kept(chance, place, drop)
            own = load_rows(V, place, v_token, alone, HEAD_DIM, D)
            acc += own.to(tl.float32) * boost
    part = number * batches + batch
    OUT += part * rows * heads * HEAD_DIM + head * HEAD_DIM
    store_rows(OUT, row, heads * HEAD_DIM, slot < slots, acc, HEAD_DIM, D)
    tl.store(LSE + (part * heads + head) * rows + row, lse, mask=slot < slots)


@remembered
@triton.jit(do_not_specialize=["n", "heads"])
def merge(
    PARTS, PART_LSE, OUT, LSE, n, heads,
    ROUNDS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rounds as one softmax over the keys of all."""
    block, stream = one_of(tl.cdiv(n, BM))
    batch, head = stream // heads, stream % heads
    batches = (tl.num_programs(0) // (tl.cdiv(n, BM) * heads)).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    here = row < n
    PART_LSE += (batch * heads + head) * n + row
    peak = tl.full((BM,), NEVER, tl.float32)
    real = here
    for number in tl.static_range(ROUNDS):
        lse = tl.load(PART_LSE + number * batches * heads * n, mask=here, other=float("inf"))
        real = lse < float("inf")  # padding in one round is padding in all
        peak = tl.maximum(peak, tl.where(real, lse, NEVER))
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    PARTS += batch * n * heads * HEAD_DIM + head * HEAD_DIM
    for number in tl.static_range(ROUNDS):
        lse = tl.load(PART_LSE + number * batches * heads * n, mask=here, other=float("inf"))
        share = tl.where(real, tl.exp2(lse - peak), 0.0)
        part = PARTS + number * batches * n * heads * HEAD_DIM
        out = load_rows(part, row, heads * HEAD_DIM, real, HEAD_DIM, D).to(tl.float32)
        acc += out * share[:, None]
        total += share
    acc = acc / tl.where(real, total, 1.0)[:, None]
    OUT += batch * n * heads * HEAD_DIM + head * HEAD_DIM
    store_rows(OUT, row, heads * HEAD_DIM, here, acc, HEAD_DIM, D)
    lse = tl.where(real, peak + tl.log2(tl.where(real, total, 1.0)), float("inf"))
    tl.store(LSE + (batch * heads + head) * n + row, lse, mask=here)


@remembered
@triton.jit(do_not_specialize=["n", "slots", "heads"])
def gather(
    PARTS, SLOTS, START, OUT, n, slots, heads,
    MEAN: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """From rows of slots [parts, batch, slots, heads, dim] to rows of tokens, the sum or the MEAN:
    those of a token are listed in SLOTS from its START on."""
    block, stream = one_of(tl.cdiv(n, BM))
    parts = 1 if MEAN else 3
    batch, head = stream // parts // heads, stream // parts % heads
    batches = tl.num_programs(0) // (tl.cdiv(n, BM) * parts * heads)
    part = stream % parts * batches + batch
    row = block * BM + tl.arange(0, BM)
    here = row < n
    start = tl.load(START + (batch * heads + head) * (n + 1) + row, mask=here, other=0)
    count = members(START, batch, head, heads, n, row, here)
    count = tl.where(here, count, 0)
    SLOTS += (batch * heads + head) * slots
    PARTS += part * slots * heads * HEAD_DIM + head * HEAD_DIM
    acc = tl.zeros((BM, D), tl.float32)
    for step in range(tl.max(count, 0)):
        more = step < count
        slot = tl.load(SLOTS + start + step, mask=more, other=0)
        acc += load_rows(PARTS, slot, heads * HEAD_DIM, more, HEAD_DIM, D).to(tl.float32)
    if MEAN:
        acc = acc / tl.maximum(count, 1).to(tl.float32)[:, None]
    OUT += part * n * heads * HEAD_DIM + head * HEAD_DIM
    store_rows(OUT, row, heads * HEAD_DIM, here, acc, HEAD_DIM, D)


@remembered
@triton.jit(do_not_specialize=["count"])
def add_up(PARTS, OUT, count, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of [ROUNDS, count] over rounds."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < count
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(ROUNDS):
        acc += tl.load(PARTS + place, mask=here, other=0.0).to(tl.float32)
        PARTS += count
    tl.store(OUT + place, acc.to(OUT.dtype.element_ty), mask=here)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def backward_query(
    Q, K, V, OUT, GRAD, LSE, SUMS, GRADS, PLACES, MARKS, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head,
    n, slots, span, heads, lists, size, before, reach, scale, factor, drop, boost,
    ROUNDS: tl.constexpr, CAUSAL: tl.constexpr, ROUTED: tl.constexpr, SELF_LAST: tl.constexpr,
    DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One round's part in the gradient of the queries of BM slots, the first of GRADS [rounds, 3,
    batch, rows, heads, dim]; and SUMS [2, rounds, batch, heads, slots] for the keys' kernel, the
    log-sum-exp and delta = sum(out * grad), in the order of each round."""
    block, stream = one_of(tl.cdiv(slots, BM))
    first, number = block * BM, (stream % ROUNDS).to(tl.int32)
    batch, head = stream // ROUNDS // heads, (stream // ROUNDS % heads).to(tl.int32)
    rows = slots if ROUTED else n
    batches = (tl.num_programs(0) // (tl.cdiv(slots, BM) * ROUNDS * heads)).to(tl.int64)
    PLACES += ((batch * lists + head % lists) * ROUNDS + number) * slots
    MARKS += ((batch * lists + head % lists) * ROUNDS + number) * ROUNDS * span
    slot = first + tl.arange(0, BM)
    place = tl.load(PLACES + slot, mask=slot < slots, other=-1)
    live = place >= 0
    row = slot if ROUTED else tl.where(live, place, ~place)
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    q = load_rows(Q + batch * q_batch + head * q_head, place, q_token, live, HEAD_DIM, D)
    g = load_rows(GRAD + batch * g_batch + head * g_head, place, g_token, live, HEAD_DIM, D)
    OUT += batch * rows * heads * HEAD_DIM + head * HEAD_DIM
    out = load_rows(OUT, row, heads * HEAD_DIM, live, HEAD_DIM, D)
    delta = tl.sum(out.to(tl.float32) * g.to(tl.float32), 1)
    lse = tl.load(LSE + (batch * heads + head) * rows + row, mask=live, other=float("inf"))
    SUMS += ((number * batches + batch) * heads + head) * slots + slot
    tl.store(SUMS, lse, mask=slot < slots)
    tl.store(SUMS + ROUNDS * batches * heads * slots, delta, mask=slot < slots)
    begin = tl.maximum(first - reach, 0) if CAUSAL else tl.maximum(first // size - before, 0) * size
    end = tl.minimum(first + BM if CAUSAL else ((first + BM - 1) // size + 1) * size, slots)
    mark = own_marks(slot, MARKS, number, span, CAUSAL)
    low = mark - reach if CAUSAL else (mark // size - before) * size
    width = reach + 1 if CAUSAL else (before + 1) * size
    chance = row
    if DROPOUT:
        chance = row_key(SEED, (batch * heads + head) * ROUNDS + number, row)

    dq = tl.zeros((BM, D), tl.float32)
    for s in range(begin, end, BN):
        others = s + tl.arange(0, BN)
        listed = tl.load(PLACES + others, mask=others < end, other=-1)
        k = load_rows(K, listed, k_token, listed >= 0, HEAD_DIM, D)
        v = load_rows(V, listed, v_token, listed >= 0, HEAD_DIM, D)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        x = visible(
            x, between(own_marks(others, MARKS, number, span, CAUSAL), low, width),
            place[:, None], listed[None, :], slot[:, None], others[None, :],
            MARKS, number, span, reach, ROUNDS, SELF_LAST,
        )  # fmt: skip
        p = tl.exp2(x - lse[:, None])
        dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(is_kept(chance[:, None], listed[None, :], drop), dp * boost, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    GRADS += (number * 3 * batches + batch) * rows * heads * HEAD_DIM + head * HEAD_DIM
    store_rows(GRADS, row, heads * HEAD_DIM, slot < slots, dq * factor, HEAD_DIM, D)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def backward_key(
    Q, K, V, GRAD, SUMS, GRADS, PLACES, MARKS, START, SEED,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head,
    n, slots, span, heads, lists, size, before, reach, scale, factor, drop, boost,
    ROUNDS: tl.constexpr, CAUSAL: tl.constexpr, ROUTED: tl.constexpr, SELF_LAST: tl.constexpr,
    DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for the keys and values of BN slots, the second and third of GRADS: their own chunk
    looks at them, and those behind."""
    block, stream = one_of(tl.cdiv(slots, BN))
    first, number = block * BN, (stream % ROUNDS).to(tl.int32)
    batch, head = stream // ROUNDS // heads, (stream // ROUNDS % heads).to(tl.int32)
    rows = slots if ROUTED else n
    batches = (tl.num_programs(0) // (tl.cdiv(slots, BN) * ROUNDS * heads)).to(tl.int64)
    PLACES += ((batch * lists + head % lists) * ROUNDS + number) * slots
    MARKS += ((batch * lists + head % lists) * ROUNDS + number) * ROUNDS * span
    slot = first + tl.arange(0, BN)
    place = tl.load(PLACES + slot, mask=slot < slots, other=-1)
    live = place >= 0
    row = slot if ROUTED else tl.where(live, place, ~place)
    Q += batch * q_batch + head * q_head
    GRAD += batch * g_batch + head * g_head
    LSE = SUMS + ((number * batches + batch) * heads + head) * slots
    DELTA = LSE + ROUNDS * batches * heads * slots
    k = load_rows(K + batch * k_batch + head * k_head, place, k_token, live, HEAD_DIM, D)
    v = load_rows(V + batch * v_batch + head * v_head, place, v_token, live, HEAD_DIM, D)
    begin = first if CAUSAL else first // size * size
    end = first + BN + reach if CAUSAL else ((first + BN - 1) // size + before + 1) * size
    end = tl.minimum(end, slots)
    mark = own_marks(slot, MARKS, number, span, CAUSAL)
    low = mark if CAUSAL else mark // size * size
    width = reach + 1 if CAUSAL else (before + 1) * size

    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for s in range(begin, end, BM):
        others = s + tl.arange(0, BM)
        asking = tl.load(PLACES + others, mask=others < end, other=-1)
        q = load_rows(Q, asking, q_token, asking >= 0, HEAD_DIM, D)
        g = load_rows(GRAD, asking, g_token, asking >= 0, HEAD_DIM, D)
        lse = tl.load(LSE + others, mask=others < end, other=float("inf"))
        delta = tl.load(DELTA + others, mask=others < end, other=0.0)
        x = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        x = visible(
            x, between(own_marks(others, MARKS, number, span, CAUSAL), low, width),
            asking[None, :], place[:, None], others[None, :], slot[:, None],
            MARKS, number, span, reach, ROUNDS, SELF_LAST,
        )  # fmt: skip
        p = tl.exp2(x - lse[None, :])
        dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        kept = p
        if DROPOUT:
            there = others if ROUTED else asking
            keep = is_kept(row_key(SEED, stream, there)[None, :], place[:, None], drop)
            kept = tl.where(keep, p * boost, 0.0)
            dp = tl.where(keep, dp * boost, 0.0)
        dv = tl.dot(kept.to(g.dtype), g, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    if SELF_LAST:
        # Who sees itself alone in all rounds returns the mean of their values.
        alone = live & (tl.load(LSE + slot, mask=slot < slots, other=0.0) < 0.5 * NEVER)
        if tl.max(alone.to(tl.int32), 0) > 0:
            if DROPOUT:
                alone = alone & is_kept(row_key(SEED, stream, row), place, drop)
            share = tl.full((BN,), boost / ROUNDS, tl.float32)
            if ROUTED:
                share = boost / members(START, batch, head, heads, n, place, live).to(tl.float32)
            g = load_rows(GRAD, place, g_token, alone, HEAD_DIM, D)
            dv += g.to(tl.float32) * share[:, None]
    step = batches * rows * heads * HEAD_DIM
    GRADS += ((number * 3 + 1) * batches + batch) * rows * heads * HEAD_DIM + head * HEAD_DIM
    store_rows(GRADS, row, heads * HEAD_DIM, slot < slots, dk * factor, HEAD_DIM, D)
    store_rows(GRADS + step, row, heads * HEAD_DIM, slot < slots, dv, HEAD_DIM, D)
