"""The fused kernels behind `spans.py`. A program takes ROWS neighbouring tokens, or spans of which
the sums are known, of one head, and halves their number until one is left."""

import triton
import triton.language as tl

from longspan.ops.launch import remembered
from longspan.ops.window.kernels import load_rows, store_rows

ROWS = tl.constexpr(64)
NUMBERS = ["tokens", "total", "heads", "start", "offset", "levels"]


@triton.jit
def count_spans(tokens, level, WHOLE: tl.constexpr):
    """Of 2^level tokens; WHOLE: without a last one that has fewer."""
    if WHOLE:
        return tokens >> level
    return (tokens + (1 << level) - 1) >> level


@triton.jit
def halved(x):
    """Sums of neighbours, [rows, D] -> [rows / 2, D]."""
    return tl.sum(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), 1)


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def means(
    K, V, VALID, COUNTED, KEYS, VALUES, COUNTS, K_SUMS, V_SUMS, SUMMED,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    tokens, total, heads, start, offset, levels,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Means of the spans of levels start + 1 to start + STEPS that consist of this program's rows.
    TOKENS: the rows are tokens, which are copied; else sums, of so many tokens as COUNTED says."""
    rows = count_spans(tokens, start, False)
    chunks = tl.cdiv(rows, ROWS)
    chunk, stream = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = stream // heads, stream % heads
    i = chunk * ROWS + tl.arange(0, ROWS)
    here = i < rows
    k = load_rows(K + batch * k_batch + head * k_head, i, k_token, here, HEAD_DIM, D)
    v = load_rows(V + batch * v_batch + head * v_head, i, v_token, here, HEAD_DIM, D)
    k = k.to(tl.float32)
    v = v.to(tl.float32)
    dense = heads * HEAD_DIM
    KEYS += batch * total * dense + head * HEAD_DIM
    VALUES += batch * total * dense + head * HEAD_DIM
    COUNTS += batch * total
    if TOKENS:
        count = here.to(tl.int32)
        if MASKED:
            count = tl.load(VALID + batch * tokens + i, mask=here, other=0).to(tl.int32)
            k = tl.where(count[:, None] > 0, k, 0.0)
            v = tl.where(count[:, None] > 0, v, 0.0)
            tl.store(COUNTS + i, count, mask=here & (head == 0))
        store_rows(KEYS, i, dense, here, k, HEAD_DIM, D)
        store_rows(VALUES, i, dense, here, v, HEAD_DIM, D)
    else:
        count = tl.load(COUNTED + batch * rows + i, mask=here, other=0)
    offset += count_spans(tokens, start, WHOLE)
    for step in tl.static_range(1, STEPS + 1):
        k = halved(k)
        v = halved(v)
        count = tl.sum(tl.reshape(count, (ROWS >> step, 2)), 1)
        one = chunk * (ROWS >> step) + tl.arange(0, ROWS >> step)
        spans = count_spans(tokens, start + step, WHOLE)
        live = (one < spans) & (start + step < levels)
        share = 1.0 / tl.maximum(count, 1).to(tl.float32)
        store_rows(KEYS, offset + one, dense, live, k * share[:, None], HEAD_DIM, D)
        store_rows(VALUES, offset + one, dense, live, v * share[:, None], HEAD_DIM, D)
        if MASKED:
            tl.store(COUNTS + offset + one, count, mask=live & (head == 0))
        offset += spans
    one = chunk + tl.arange(0, 1)
    to = batch * chunks * dense + head * HEAD_DIM
    store_rows(K_SUMS + to, one, dense, one >= 0, k, HEAD_DIM, D)
    store_rows(V_SUMS + to, one, dense, one >= 0, v, HEAD_DIM, D)
    tl.store(SUMMED + batch * chunks + one, count, mask=(one >= 0) & (head == 0))


@remembered
@triton.jit(do_not_specialize=NUMBERS)
def means_backward(
    DKEYS, DVALUES, VALID, COUNTS, DK, DV,
    k_batch, k_token, k_head, v_batch, v_token, v_head, tokens, total, heads, levels,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradients of ROWS tokens: their shares in those of all spans that they are in."""
    chunks = tl.cdiv(tokens, ROWS)
    chunk, stream = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = stream // heads, stream % heads
    i = chunk * ROWS + tl.arange(0, ROWS)
    DKEYS += batch * k_batch + head * k_head
    DVALUES += batch * v_batch + head * v_head
    dk = tl.zeros((ROWS, D), tl.float32)
    dv = tl.zeros((ROWS, D), tl.float32)
    here = i < tokens
    offset = 0
    for level in range(levels):
        one = i >> level
        spans = count_spans(tokens, level, WHOLE)
        live = here & (one < spans)
        if MASKED:
            count = tl.load(COUNTS + batch * total + offset + one, mask=live, other=1)
        else:
            count = tl.minimum(1 << level, tokens - (one << level))
        share = 1.0 / tl.maximum(count, 1).to(tl.float32)
        g = load_rows(DKEYS, offset + one, k_token, live, HEAD_DIM, D)
        dk += g.to(tl.float32) * share[:, None]
        g = load_rows(DVALUES, offset + one, v_token, live, HEAD_DIM, D)
        dv += g.to(tl.float32) * share[:, None]
        offset += spans
    if MASKED:
        real = tl.load(VALID + batch * tokens + i, mask=here, other=0) != 0
        dk = tl.where(real[:, None], dk, 0.0)
        dv = tl.where(real[:, None], dv, 0.0)
    dense = heads * HEAD_DIM
    to = batch * tokens * dense + head * HEAD_DIM
    store_rows(DK + to, i, dense, here, dk, HEAD_DIM, D)
    store_rows(DV + to, i, dense, here, dv, HEAD_DIM, D)
