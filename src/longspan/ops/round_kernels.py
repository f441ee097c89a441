"""The fused kernels behind `rounds.py`. A program takes some rows of one chunk and head, with all
the keys that these have to look at."""

import triton
import triton.language as tl

from longspan.ops.launch import remembered

NEVER = tl.constexpr(-1e30)

# Compiled once for all of these.
COUNTS = ["number", "reach", "size", "keys"]


@remembered
@triton.jit(do_not_specialize=COUNTS)
def softmax(
    SCORES,
    MARKS,
    MARKED,
    PLACES,
    LISTED,
    SHARES,
    SUMS,
    scale,
    number,
    reach,
    size,
    keys,
    ROUNDS: tl.constexpr,
    SELF_LAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    blocks = tl.cdiv(size, BM)
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    column = tl.arange(0, BN)
    mine, theirs = chunk * size + row, chunk * keys + column
    live = (row < size)[:, None] & (column < keys)[None, :]
    at = mine[:, None] * keys + column[None, :]
    scores = tl.load(SCORES + at, mask=live, other=0.0).to(tl.float32) * scale
    listed = tl.load(LISTED + theirs, mask=column < keys, other=-1)
    times = tl.zeros((BM, BN), tl.int32)
    own = tl.zeros((BM, BN), tl.int32)
    for other in tl.static_range(ROUNDS):
        mark = tl.load(MARKS + mine * ROUNDS + other, mask=row < size, other=0).to(tl.int32)
        marked = tl.load(MARKED + theirs * ROUNDS + other, mask=column < keys, other=0)
        apart = mark[:, None] - marked.to(tl.int32)[None, :]
        inside = ((apart >= 0) & (apart <= reach)).to(tl.int32)
        times += inside
        own = tl.where(number == other, inside, own)
    seen = live & (own > 0) & (listed >= 0)[None, :]
    alone = tl.zeros((BM,), tl.int32) > 0
    if SELF_LAST:
        place = tl.load(PLACES + mine, mask=row < size, other=-1)
        itself = place[:, None] == listed[None, :]
        others = seen & ~itself
        alone = tl.max(others.to(tl.int32), 1) == 0
        seen = (alone[:, None] & itself & seen) | others
    # A slot without a token sees nothing and would be NaN; nobody reads it.
    seen = seen | (tl.max(seen.to(tl.int32), 1) == 0)[:, None]
    scores -= tl.log(tl.maximum(times, 1).to(tl.float32))
    scores = tl.where(seen, scores, -float("inf"))
    largest = tl.max(scores, 1)
    weights = tl.exp(scores - largest[:, None])
    total = tl.sum(weights, 1)
    weights = weights / total[:, None]
    tl.store(SHARES + at, weights.to(SHARES.dtype.element_ty), mask=live)
    tl.store(SUMS + mine, tl.where(alone, NEVER, largest + tl.log(total)), mask=row < size)


@remembered
@triton.jit(do_not_specialize=["rows", "keys"])
def softmax_backward(
    SHARES,
    GRAD,
    SUMS,
    GRAD_SUMS,
    GRAD_SCORES,
    scale,
    rows,
    keys,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, BN)
    live = (row < rows)[:, None] & (column < keys)[None, :]
    at = row[:, None] * keys + column[None, :]
    weights = tl.load(SHARES + at, mask=live, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + at, mask=live, other=0.0).to(tl.float32)
    sums = tl.load(SUMS + row, mask=row < rows, other=NEVER)
    more = tl.load(GRAD_SUMS + row, mask=row < rows, other=0.0)
    more = tl.where(sums > 0.5 * NEVER, more, 0.0) - tl.sum(weights * grad, 1)
    found = weights * (grad + more[:, None]) * scale
    tl.store(GRAD_SCORES + at, found.to(GRAD_SCORES.dtype.element_ty), mask=live)
