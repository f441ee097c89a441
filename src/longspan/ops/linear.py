"""Linear attention: scores as products of features, so that keys and values can be summed up first.

    out_i = phi(q_i) . S / phi(q_i) . z,   S = sum_j phi(k_j) v_j^T,   z = sum_j phi(k_j)

With the random features of FAVOR+ (Performer) phi(q) . phi(k) is exp(q . k / sqrt(d)) in the mean,
so that this estimates softmax attention:

    phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m),   x' = x / d^(1/4),   rows of W: m normal vectors

Sums over all tokens, or, causally, over those before: by chunks, each chunk's own tokens through
their scores, those before through S and z. Time and memory are linear in the number of tokens.
Features can be far apart, so exponents are taken relative to a largest one, which cancels between
numerator and denominator: for a query its own, for keys one that all keys of a sum share.

A stretch of the text is taken at a time, and its features, which are several times as large as
queries and keys, are computed again in the backward pass rather than kept. In half precision on a
GPU fused kernels keep them on chip (`features`); this is their oracle, and what serves elsewhere.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import elu, pad, relu
from torch.utils.checkpoint import checkpoint

from longspan.ops.features import feature_attention, serves

KERNELS = ("softmax", "relu", "elu")
_CHUNK = 128
# Features that are computed at a time, over all batch rows and heads. A CPU wants them in its
# caches: memory fresh from the system costs it more, page by page, than the features.
_CPU_FEATURES = 2**19
_FEATURES = 2**27


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
    if (
        kernel == "softmax"
        and projection is not None
        and not projection.requires_grad  # a gradient that it would not be given there
        and serves(query, key, value)
    ):
        return feature_attention(query, key, value, projection, valid, eps)
    with _full_precision(query):
        (q, k, v), projection = _wide(query, key, value, projection)
        v = _with_ones(v)
        if valid is not None:
            v = v * valid[:, None, :, None]
        size = _stretch(k, projection)
        found = []
        masks = [None] * len(k.split(size, 2)) if valid is None else valid.split(size, 1)
        for given in zip(k.split(size, 2), v.split(size, 2), masks, strict=True):
            found.append(_again(_summed, *given, projection, kernel))
        largest = torch.stack([one.reference for one in found]).amax(0)
        sums = sum(
            (one.sums * (one.reference - largest).exp()[..., None, None] for one in found),
            torch.zeros_like(found[0].sums),
        )
        if kernel != "softmax":
            eps = 0.0
        sums = sums + eps * v.sum(2, keepdim=True)
        out = [_again(_read, part, sums, projection, kernel, eps) for part in q.split(size, 2)]
        out = torch.cat(out, 2)
    return out.transpose(1, 2).to(query.dtype)


def _summed(
    key: Tensor, value: Tensor, valid: Tensor | None, projection: Tensor | None, kernel: str
) -> Sums:
    """Sums over a stretch [batch, heads, tokens, ...]; values of padding are zero already."""
    if kernel != "softmax":
        key = _features(key, projection, kernel)
        return Sums(key.mT @ value, key.new_zeros(key.shape[:2]))
    assert projection is not None
    key = softmax_exponents(key, projection)
    if valid is not None:
        key = key.masked_fill(~valid[:, None, :, None], -torch.inf)
    # It cancels, but for eps, so no gradient comes from there. A stretch of padding alone has none.
    largest = key.detach().amax((-2, -1)).clamp(min=torch.finfo(key.dtype).min)
    return Sums((key - largest[..., None, None]).exp().mT @ value, largest)


def _read(
    query: Tensor, sums: Tensor, projection: Tensor | None, kernel: str, eps: float
) -> Tensor:
    """What queries [batch, heads, tokens, head_dim] make of sums over all keys."""
    if kernel == "softmax":
        # eps in every feature is eps times the sum over features.
        both = _query_features(query, projection) @ sums + eps * sums.sum(2, keepdim=True)
    else:
        both = _features(query, projection, kernel) @ sums
    return _divide(both)


def _query_features(query: Tensor, projection: Tensor | None) -> Tensor:
    """Relative to the largest of each query; so its length, part of every exponent, is not."""
    assert projection is not None
    exponents = (query * query.shape[-1] ** -0.25) @ projection.mT
    return (exponents - exponents.detach().amax(-1, keepdim=True)).exp()


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
    with _full_precision(query):
        (q, k, v), projection = _wide(query, key, value, projection)
        size = _stretch(k, projection)
        parts = []
        for given in zip(q.split(size, 2), k.split(size, 2), v.split(size, 2), strict=True):
            part, *after = _again(_scan, *given, projection, kernel, before)
            parts.append(part)
            before = Sums(*after)
        out = torch.cat(parts, 2)
    assert before is not None
    after = Sums(before.sums.detach(), before.reference.detach())
    return out.transpose(1, 2).to(query.dtype), after


def _scan(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor | None, kernel: str, before: Sums | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A stretch [batch, heads, tokens, head_dim], given what was summed up before it; and the sums
    after it, with their exponents."""
    tokens = q.shape[2]
    size = min(_CHUNK, tokens)
    v = _chunks(_with_ones(v), size)
    if kernel == "softmax":
        assert projection is not None
        q = _chunks(_query_features(q, projection), size)
        k = softmax_exponents(k, projection)
        k = pad(k, (0, 0, 0, -tokens % size), value=-torch.inf).unflatten(2, (-1, size))
        own = k.detach().amax((-2, -1))  # [batch, heads, chunks]
        k = (k - own[..., None, None]).exp()
    else:
        q, k = (_chunks(_features(t, projection, kernel), size) for t in (q, k))
        own = k.new_zeros(k.shape[:3])
    sums, reference = _sums_before(k.mT @ v, own, before)
    # Both parts relative to the larger of their exponents.
    share = (reference[..., :-1] - reference[..., 1:]).exp()
    here = (own - reference[..., 1:]).exp()
    scores = (q @ k.mT).tril() * here[..., None, None]
    both = (q @ sums[:, :, :-1]) * share[..., None, None] + scores @ v
    out = _divide(both).flatten(2, 3)[:, :, :tokens]
    return out, sums[:, :, -1], reference[..., -1]


def _sums_before(sums: Tensor, own: Tensor, before: Sums | None) -> tuple[Tensor, Tensor]:
    """Sums before each chunk and after the last [batch, heads, chunks + 1, ...], from those of the
    chunks, relative to the largest exponents up to there, [batch, heads, chunks + 1].

    Added up in float64, whose range allows one common exponent for all chunks: so a running sum
    of the device does it, with no loop over chunks.
    """
    if before is None:
        before = Sums(torch.zeros_like(sums[:, :, 0]), torch.full_like(own[..., 0], -torch.inf))
    sums = torch.cat((before.sums.to(sums.dtype)[:, :, None], sums), 2)
    own = torch.cat((before.reference.to(own.dtype)[..., None], own), 2)
    reference = own.cummax(-1).values
    last = reference[..., -1:]
    added = (sums.double() * (own - last).double().exp()[..., None, None]).cumsum(2)
    back = (last - reference).double().clamp(max=700.0).exp()
    return (added * back[..., None, None]).to(sums.dtype), reference


def _features(states: Tensor, projection: Tensor | None, kernel: str) -> Tensor:
    if kernel == "elu":
        return elu(states) + 1.0
    if kernel != "relu":
        raise ValueError(f"kernel={kernel!r} is unknown; choose from {', '.join(KERNELS)}")
    assert projection is not None
    return relu(states @ projection.mT) + 1e-3


def _stretch(key: Tensor, projection: Tensor | None) -> int:
    """Tokens to take at a time: as many as fit, in whole chunks."""
    batch, heads, _, head_dim = key.shape
    features = head_dim if projection is None else projection.shape[0]
    most = _CPU_FEATURES if key.device.type == "cpu" else _FEATURES
    return _CHUNK * max(1, most // (_CHUNK * batch * heads * features))


def _again(function: Callable[..., Any], *given: Any) -> Any:
    """Call it, and once more in the backward pass instead of keeping what it makes."""
    if not torch.is_grad_enabled():
        return function(*given)
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)


def _full_precision(like: Tensor) -> torch.autocast:
    """Exponents and long sums are no place for half precision."""
    return torch.autocast(like.device.type, enabled=False)


def _wide(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """[batch, heads, tokens, head_dim], in at least float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    tensors = [t.transpose(1, 2).to(dtype) for t in (query, key, value)]
    return tensors, None if projection is None else projection.to(dtype)


def _with_ones(value: Tensor) -> Tensor:
    """A column more, which sums up to the denominator."""
    return pad(value, (0, 1), value=1.0)


def _chunks(tensor: Tensor, size: int) -> Tensor:
    """[batch, heads, tokens, ...] -> [batch, heads, chunks, size, ...]."""
    missing = -tensor.shape[2] % size
    return pad(tensor, (0, 0, 0, missing)).unflatten(2, (-1, size))


def _divide(both: Tensor) -> Tensor:
    """Numerators by the denominators beside them; zero, and no gradient, where nothing was seen
    or all that was seen has vanished beside something larger."""
    below = both[..., -1:]
    return both[..., :-1] / below.masked_fill(below < 1e-30, torch.inf)
