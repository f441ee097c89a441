"""Linformer's attention: keys and values of n tokens made k, k a constant.

    softmax(Q (E K)^T / sqrt(d)) (F V),   E and F: k x n

The three ways of making them fewer stand here as functions; `lowrank_attention` is what follows.
Plain PyTorch, time and memory n k.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def project_tokens(states: Tensor, weight: Tensor) -> Tensor:
    """[batch, n, heads, head_dim] -> [batch, k, heads, head_dim] by weights [heads or 1, k,
    length], of which fewer tokens use the leading n columns. Padding has to be zero."""
    if states.shape[1] < weight.shape[-1]:  # the gradient of a cut fills all of it with zeros
        weight = weight[..., : states.shape[1]]
    weight = weight.to(states.dtype)
    if weight.shape[0] == 1:
        return torch.einsum("kn,bnhd->bkhd", weight[0], states)
    return torch.einsum("hkn,bnhd->bkhd", weight, states)


def pool_tokens(states: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """[batch, n, heads, head_dim] -> [batch, ceil(n / size), heads, head_dim], means of the tokens
    that are none of padding, which has to be zero."""
    count = count_tokens(states, size, valid).clamp(min=1)
    return _cut(states, size).sum(2) / count[..., None, None].to(states.dtype)


def convolve_tokens(states: Tensor, weight: Tensor) -> Tensor:
    """The same with weights [heads or 1, size, head_dim, head_dim] in place of means."""
    weight = weight.to(states.dtype).expand(states.shape[2], -1, -1, -1)
    return torch.einsum("bgshd,hsde->bghe", _cut(states, weight.shape[1]), weight)


def count_tokens(states: Tensor, size: int, valid: Tensor | None) -> Tensor:
    """[batch, ceil(n / size)]: how many tokens of each piece are none of padding."""
    if valid is None:
        valid = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return _cut(valid, size).sum(2)


def _cut(tensor: Tensor, size: int) -> Tensor:
    """[batch, n, ...] -> [batch, ceil(n / size), size, ...]."""
    missing = -tensor.shape[1] % size
    return pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)).unflatten(1, (-1, size))


def lowrank_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """[batch, n, heads, head_dim] of queries shaped so, and keys and values [batch, k, heads,
    head_dim]; `visible` [batch, k] marks those that stand for any token (None = all do)."""
    attended = scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        attn_mask=None if visible is None else visible[:, None, None],
        dropout_p=dropout_p,
        scale=scale,
    )
    return attended.transpose(1, 2)
