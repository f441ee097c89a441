"""Means over the spans of a binary tree, all of its levels in a pass or two over the tokens, on a
GPU: what `tree` otherwise writes as some ten operations for each level."""

from typing import Any

import torch
from torch import Tensor

from longspan.ops.listed_fused import serves as serves  # the same tensors
from longspan.ops.operator import differentiable, operator

_ROWS, _STEPS = 64, 6  # tokens that one program takes, and how often they can be halved


def count_spans(tokens: int, levels: int, whole: bool) -> list[int]:
    """Of each level; `whole`: without a last one that has fewer tokens."""
    return [tokens >> n if whole else -(-tokens // 2**n) for n in range(levels)]


def _shapes(key, value, valid, levels, whole):
    batch, tokens, heads, head_dim = key.shape
    total = sum(count_spans(tokens, levels, whole))
    counts = key.new_empty((batch, total if valid is not None else 0), dtype=torch.int32)
    shape = (batch, total, heads, head_dim)
    return key.new_empty(shape), value.new_empty(shape), counts


@operator("span_means", fake=_shapes)
def span_means(
    key: Tensor, value: Tensor, valid: Tensor | None, levels: int, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [batch, spans, heads, head_dim] of all levels one behind the other, tokens
    first, and with `valid` bool [batch, tokens] of how many tokens each is the mean, [batch,
    spans]. Of tokens [batch, tokens, heads, head_dim]."""
    from longspan.ops import span_kernels  # on first use: the package can be imported without

    batch, tokens, heads, head_dim = key.shape
    keys, values, counts = _shapes(key, value, valid, levels, whole)
    if keys.numel() == 0:
        return keys, values, counts
    key, value = _dense(key), _dense(value)
    mask = key if valid is None else valid.contiguous()
    options = _options(key, whole, valid)
    spans = count_spans(tokens, levels, whole)
    inputs, counted = (key, value), key
    for start in range(0, max(1, levels - 1), _STEPS):
        chunks = -(-inputs[0].shape[1] // _ROWS)
        sums = [
            torch.empty(batch, chunks, heads, head_dim, dtype=torch.float32, device=key.device)
            for _ in inputs
        ]
        summed = torch.empty(batch, chunks, dtype=torch.int32, device=key.device)
        span_kernels.means[(chunks * batch * heads,)](
            *inputs, mask, counted, keys, values, counts if valid is not None else key,
            *sums, summed, *_strides(*inputs),
            tokens, keys.shape[1], heads, start, sum(spans[:start]), levels,
            TOKENS=start == 0, STEPS=_STEPS, **options,
        )  # fmt: skip
        inputs, counted = sums, summed
    return keys, values, counts


@operator(
    "span_means_backward",
    fake=lambda dkeys, dvalues, valid, counts, tokens, *rest: tuple(
        t.new_empty((t.shape[0], tokens, *t.shape[2:])) for t in (dkeys, dvalues)
    ),
)
def _backward(
    dkeys: Tensor,
    dvalues: Tensor,
    valid: Tensor | None,
    counts: Tensor,
    tokens: int,
    levels: int,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    from longspan.ops import span_kernels

    batch, total, heads, head_dim = dkeys.shape
    dk, dv = (t.new_empty((batch, tokens, heads, head_dim)) for t in (dkeys, dvalues))
    if dk.numel() == 0:
        return dk, dv
    dkeys, dvalues = _dense(dkeys), _dense(dvalues)
    span_kernels.means_backward[(-(-tokens // _ROWS) * batch * heads,)](
        dkeys, dvalues, dkeys if valid is None else valid.contiguous(), counts, dk, dv,
        *_strides(dkeys, dvalues), tokens, total, heads, levels,
        **_options(dkeys, whole, valid),
    )  # fmt: skip
    return dk, dv


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride(dim) for tensor in tensors for dim in range(3))


def _options(like: Tensor, whole: bool, valid: Tensor | None) -> dict[str, Any]:
    head_dim = like.shape[3]
    wide = max(16, 1 << (head_dim - 1).bit_length())
    return {
        "HEAD_DIM": head_dim,
        "D": wide,
        "num_warps": max(4, wide // 16),
        "WHOLE": whole,
        "MASKED": valid is not None,
    }


def _save(ctx, inputs, output):
    key, _, valid, *ctx.numbers = inputs
    ctx.tokens = key.shape[1]
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(valid, output[2])


def _gradients(ctx, dkeys, dvalues, _):
    valid, counts = ctx.saved_tensors
    return *_backward(dkeys, dvalues, valid, counts, ctx.tokens, *ctx.numbers), None, None, None


differentiable(span_means, _gradients, save=_save)
