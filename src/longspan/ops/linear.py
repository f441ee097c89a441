"""Linear attention: scores as products of features, so that keys and values can be summed up first.

    out_i = phi(q_i) . S / phi(q_i) . z,   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)

With the random features of FAVOR+ (Performer) phi(q) . phi(k) is exp(q . k / sqrt(d)) in the mean,
so that this estimates softmax attention:

    phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),   x' = x / d^(1/4),   rows of W: m normal vectors

Sums over all tokens, or, causally, over those before: by chunks, each chunk's own tokens through
their scores, those before through S and z. Time and memory are linear in the number of tokens.
Features can be far apart, so exponents are taken relative to a largest one, which cancels between
numerator and denominator: for a query its own, for keys one that all keys of a sum share.

In half precision on a GPU fused kernels keep the features on chip (`features`). Elsewhere those of
a piece of the text are made at a time (`linear_sums`), which is also the kernels' oracle.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.features import causal_feature_attention, feature_attention, serves
from longspan.ops.linear_sums import causal_op, linear_op
from longspan.ops.operator import refuse_forward_mode

KERNELS = ("softmax", "relu", "elu")


class Sums(NamedTuple):
    """S and z of the tokens read so far: all that a causal call needs to know of them."""

    sums: Tensor  # [batch, heads, features, head_dim + 1]: S, and z as its last column
    reference: Tensor  # [batch, heads]: the exponent they are relative to


def draw_features(
    features: int,
    head_dim: int,
    *,
    orthogonal: bool = True,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """[features, head_dim] float32: normal vectors; if orthogonal, those of each block of head_dim.

    The orthogonal matrix of a QR decomposition is uniformly distributed only if R's diagonal is
    positive. Libraries leave its signs to the algorithm, which biases the estimate.
    """
    blocks = -(-features // head_dim)
    about = {"generator": generator, "device": device, "dtype": torch.float32}
    drawn = torch.randn(blocks, head_dim, head_dim, **about)
    if orthogonal:
        direction, upper = torch.linalg.qr(drawn)
        diagonal = upper.diagonal(dim1=-2, dim2=-1)
        direction = direction * torch.where(diagonal < 0, -1.0, 1.0)[:, None]
        length = torch.randn(blocks, head_dim, head_dim, **about).norm(dim=-1, keepdim=True)
        drawn = direction * length
    return drawn.flatten(0, 1)[:features]


def softmax_exponents(states: Tensor, projection: Tensor) -> Tensor:
    """[..., head_dim] -> [..., features]: log phi, but for the constant."""
    states = states * states.shape[-1] ** -0.25
    return states @ projection.mT - states.square().sum(-1, keepdim=True) / 2


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None = None,
    *,
    kernel: str = "softmax",
    valid: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """[batch, tokens, heads, head_dim]: every token sees all that are none of padding.

    Args:
        query, key, value: [batch, tokens, heads, head_dim].
        projection: [features, head_dim] from `draw_features`, for "softmax" and "relu".
        kernel: "softmax" (positive random features), "relu" (of random projections, plus 1e-3) or
            "elu" (plus 1, of queries and keys themselves).
        valid: bool [batch, tokens], False = padding.
        eps: added to each softmax feature, relative to the largest; keeps sums off zero. Gradients
            know nothing of what sets the largest, as usual: they are off by the order of eps.
    """
    refuse_forward_mode("linear attention", query, key, value)
    projection = _needed(projection, kernel)
    if projection is not None and _fused(query, key, value, projection, kernel):
        return feature_attention(query, key, value, projection, valid, eps)
    eps = eps if kernel == "softmax" else 0.0
    out = linear_op(*_alike(query, key, value), projection, valid, kernel, eps)[0]
    return out.to(query.dtype)


def causal_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None = None,
    *,
    kernel: str = "softmax",
    before: Sums | None = None,
) -> tuple[Tensor, Sums]:
    """[batch, tokens, heads, head_dim]: every token sees itself, those before it, and those that
    were summed up `before`; and the sums after the last.

    Nothing is added to softmax features here: relative to an exponent that a later key may have
    set, it would let a trace of the future through. Other arguments as in `linear_attention`.
    """
    if key.shape != query.shape or value.shape[:3] != query.shape[:3]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"query, key and value must be of the same tokens, got {shapes}")
    refuse_forward_mode("linear attention", query, key, value)
    projection = _needed(projection, kernel)
    sums, reference = (None, None) if before is None else before
    if projection is not None and _fused(query, key, value, projection, kernel):
        out, *after = causal_feature_attention(query, key, value, projection, sums, reference)
        return out, Sums(*after)
    tensors = [t for t in (query, key, value, projection) if t is not None]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    given = *_alike(query, key, value), projection, sums, reference
    out, sums, reference, *_ = causal_op(*given, kernel, keep)
    pairs = query.shape[0], query.shape[2]
    after = Sums(sums.detach().unflatten(0, pairs), reference.detach().view(pairs))
    return out.to(query.dtype), after


def _fused(query: Tensor, key: Tensor, value: Tensor, projection: Tensor, kernel: str) -> bool:
    """Whether the kernels serve. They have no gradient for a projection that learns, and values as
    wide as queries."""
    served = kernel == "softmax" and not projection.requires_grad
    return served and value.shape[3] == query.shape[3] and serves(query, key, value)


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values as the operators take them: of one precision, that of queries."""
    if len({t.dtype for t in tensors}) == 1:
        return tensors
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return tuple(t.to(wide) for t in tensors)


def _needed(projection: Tensor | None, kernel: str) -> Tensor | None:
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is unknown; choose from {', '.join(KERNELS)}")
    if kernel == "elu":
        return None
    if projection is None:
        raise ValueError(f"kernel={kernel!r} needs a projection: see draw_features")
    return projection
