"""The fused kernels behind `centroids.py`: products compared where they are formed, and the largest
of a row without sorting it."""

import triton
import triton.language as tl

from longspan.ops.launch import remembered

NUMBERS = ["n", "heads", "rounds", "count", "dim"]


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def nearest(
    POINTS, DIRECTIONS, FOUND, batch_stride, token_stride, head_stride,
    n, heads, rounds, count, dim,
    OPPOSITES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """FOUND [batch, heads, rounds, n]: the direction with the largest product, the first of equals,
    of DIRECTIONS [rounds, heads, count, dim] and, behind all of these, their OPPOSITES."""
    blocks = tl.cdiv(n, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    number, head, batch = row % rounds, row // rounds % heads, row // rounds // heads
    token = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    POINTS += batch * batch_stride + head * head_stride
    DIRECTIONS += (number * heads + head) * count * dim
    best = tl.full((BM,), -float("inf"), tl.float32)
    place = tl.zeros((BM,), tl.int32)
    last = tl.full((BM,), -float("inf"), tl.float32)  # the same of opposites
    behind = tl.zeros((BM,), tl.int32)
    for first in range(0, count, BN):
        one = first + tl.arange(0, BN)
        products = tl.zeros((BM, BN), tl.float32)
        for at in range(0, dim, BK):
            column = at + tl.arange(0, BK)
            here = POINTS + token.to(tl.int64)[:, None] * token_stride + column[None, :]
            live = (token < n)[:, None] & (column < dim)[None, :]
            points = tl.load(here, mask=live, other=0.0)
            there = DIRECTIONS + one[:, None] * dim + column[None, :]
            live = (one < count)[:, None] & (column < dim)[None, :]
            directions = tl.load(there, mask=live, other=0.0)
            if points.dtype != directions.dtype:
                points, directions = points.to(tl.float32), directions.to(tl.float32)
            products = tl.dot(points, tl.trans(directions), products, input_precision=PRECISION)
        some = tl.where((one < count)[None, :], products, -float("inf"))
        most, which = tl.max(some, 1, return_indices=True)
        place = tl.where(most > best, first + which, place)
        best = tl.maximum(best, most)
        if OPPOSITES:
            some = tl.where((one < count)[None, :], -products, -float("inf"))
            most, which = tl.max(some, 1, return_indices=True)
            behind = tl.where(most > last, first + which, behind)
            last = tl.maximum(last, most)
    if OPPOSITES:
        place = tl.where(last > best, count + behind, place)
    tl.store(FOUND + row * n + token, place.to(tl.int64), mask=token < n)


@triton.jit
def ranks(SCORES, at, n):
    """Scores as numbers in the same order, without a sign; 0 behind the end."""
    scores = tl.load(SCORES + at, mask=at < n, other=0.0) + 0.0  # -0 is 0
    bits = scores.to(tl.uint32, bitcast=True)
    return tl.where(at < n, tl.where(scores < 0, bits ^ 0xFFFFFFFF, bits | 0x80000000), 0)


@remembered
@triton.jit(do_not_specialize=["n", "size"])
def select(SCORES, FOUND, n, size, BLOCK: tl.constexpr):
    """FOUND [rows, size]: the places of the largest of each row [rows, n], by place, of equals the
    earlier ones, -1 for one of -inf.

    Eight bits of the least that is taken are found at a time, from the first: how many there are of
    each kind among those that agree so far."""
    SCORES += tl.program_id(0).to(tl.int64) * n
    FOUND += tl.program_id(0).to(tl.int64) * size
    kind = tl.arange(0, 256)
    least = tl.full((), 0, tl.uint32)  # as far as it is known
    wanted = size  # of those that are equal to it as far as it is known
    left = tl.full((), 1, tl.int32)  # whether there are more of these
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        if left != 0:
            counts = tl.zeros((256,), tl.int32)
            for first in range(0, n, BLOCK):
                at = first + tl.arange(0, BLOCK)
                rank = ranks(SCORES, at, n)
                agree = at < n
                if step > 0:
                    agree = agree & (rank >> (shift + 8) == least >> (shift + 8))
                counts += tl.histogram((rank >> shift & 255).to(tl.int32), 256, mask=agree)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            own = (above < wanted) & (above + counts >= wanted)
            least = least | tl.sum(tl.where(own, kind, 0), 0).to(tl.uint32) << shift
            wanted = wanted - tl.sum(tl.where(own, above, 0), 0)
            left = (tl.sum(tl.where(own, counts, 0), 0) > wanted).to(tl.int32)
    none = 0x007FFFFF  # the rank of -inf
    taken = 0
    equals = 0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        rank = ranks(SCORES, at, n)
        equal = rank == least
        before = equals + tl.cumsum(equal.to(tl.int32), 0)
        take = ((rank > least) | (equal & (before <= wanted))) & (rank > none)
        slot = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(FOUND + slot, at.to(tl.int64), mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)
    for first in range(0, size, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        rest = (slot >= taken) & (slot < size)
        tl.store(FOUND + slot, tl.full((BLOCK,), -1, tl.int64), mask=rest)
