// What Python hands over: one call of window attention. Mirrored by `_Call` in __init__.py.
#pragma once
#include <cstdint>

struct Tensor {  // [batch, tokens, heads, head_dim], head_dim contiguous; strides in elements
    void* data;
    int64_t batch, token, head;
};

struct Call {
    int64_t batch, tokens, heads, group, head_dim;  // group: query heads per key head
    int64_t left, right, causal, global_rows;
    int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
    int64_t threads;
    int64_t drop, seed;  // a 24-bit draw below `drop` drops an entry
    double boost, scale;
    const int64_t* dilation;                                // [heads]
    const int32_t *start, *stop, *holes, *rank, *places;    // Visibility, each may be null
    Tensor query, key, value, out, grad, grad_query;
    Tensor grad_key, grad_value;  // float32, zero at first, one head per query head
    float *lse, *delta;           // [batch, heads, tokens], lse to base 2
};
