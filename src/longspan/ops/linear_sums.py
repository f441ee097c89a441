"""Linear attention in PyTorch's operations: two torch operators with backward passes of their own.

Features are several times as large as queries and keys, so those of a piece of the text are made
at a time, and once more backward. On a CPU they stay in its caches from the product that writes
them, through shifts and exponentials in place, to the products that read them.

Inside, pairs of a batch row and a head are one axis: states [pairs, tokens, head_dim], features
[pairs, tokens, features], sums [pairs, features, head_dim + 1], whose last column belongs to the
denominator. All that is kept is in at least float32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import elu, pad

from longspan.ops.operator import differentiable, operator

_LEAST = 1e-3  # a feature of "relu"
# Features of a piece, of all pairs. A CPU wants them in the cache of a core.
_CPU_FEATURES = 2**18
_FEATURES = 2**25
_ROWS = 64  # tokens of a piece: with fewer, products are slow
_CHUNK = 128
_CHUNKS = 64  # of a piece: the sums before each are made of those of all others


class _Map:
    """Queries and keys to features and, from gradients of features, back."""

    def __init__(self, projection: Tensor | None, kernel: str, like: Tensor) -> None:
        self.softmax = kernel == "softmax"
        self.root = like.shape[-1] ** -0.5 if self.softmax else 1.0
        # The scale of queries and keys is in the vectors; "elu" has none.
        self.vectors = None if projection is None else self.root**0.5 * projection.to(_wide(like))

    def of_queries(self, query: Tensor, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Relative to the largest exponent of each query [pairs, tokens, 1], and that. So a
        query's length, part of all of its exponents, is not."""
        made = self._project(query)
        if not self.softmax:
            return made, torch.zeros_like(made[..., :1])
        top = made.amax(-1, keepdim=True) if top is None else top
        return made.sub_(top).exp_(), top

    def of_keys(
        self,
        key: Tensor,
        there: Tensor | None = None,
        reference: Tensor | None = None,
        *,
        above: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Relative to `reference` [pairs, 1, 1] or else to the largest exponent of all keys and of
        what was `above` before; and that. Where nothing is `there` [pairs, tokens, 1] it is 0."""
        made = self._project(key)
        if not self.softmax:
            return made, made.new_zeros(made.shape[0], 1, 1)
        half = key.square().sum(-1, keepdim=True).mul_(self.root / 2)
        if there is not None:
            half.masked_fill_(~there, torch.inf)
        if reference is None:
            reference = (made.amax(-1, keepdim=True) - half).amax(1, keepdim=True)
            least = torch.finfo(made.dtype).min  # a piece of padding has none
            reference = reference.clamp_(min=least) if above is None else reference.maximum(above)
        # One after the other: long keys have a `half` so large that the sum would be rounded.
        return made.sub_(half).sub_(reference).exp_(), reference

    def _project(self, states: Tensor) -> Tensor:
        if self.vectors is None:
            return elu(states).add_(1.0)
        made = states @ self.vectors.mT
        return made if self.softmax else made.relu_().add_(_LEAST)

    def back(
        self, grad: Tensor, features: Tensor, states: Tensor, learned: Tensor, *, keys: bool
    ) -> Tensor:
        """The gradient of queries or keys; that of features is used up, that of the projection
        added to `learned`, unless it is empty."""
        if self.vectors is None:
            return grad.mul_(features.clamp(max=1.0))
        grad.mul_(features if self.softmax else features > _LEAST)
        if learned.numel() > 0:
            found = torch.einsum("ptf,ptd->fd", grad, states)
            learned.add_(found, alpha=self.root**0.5)
        found = grad @ self.vectors
        if self.softmax and keys:
            found.addcmul_(states, grad.sum(-1, keepdim=True), value=-self.root)
        return found


def _sizes(query: Tensor, value: Tensor, projection: Tensor | None) -> tuple[int, int, int]:
    """Of sums: pairs, features, columns."""
    batch, _, heads, head_dim = query.shape
    features = head_dim if projection is None else projection.shape[0]
    return batch * heads, features, value.shape[-1] + 1


def _shapes(query, key, value, projection, *rest):
    pairs, features, columns = _sizes(query, value, projection)
    about = {"dtype": _wide(query)}
    return (
        query.new_empty((*query.shape[:-1], value.shape[-1]), **about),
        query.new_empty((2, pairs, query.shape[1], 1), **about),
        query.new_empty((pairs, features, columns), **about),
        query.new_empty((pairs, 1, 1), **about),
    )


@operator("linear_attention", fake=_shapes)
def linear_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    valid: Tensor | None,
    kernel: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output; for the backward pass of each query the largest exponent and one over the
    denominator, sums over all keys, and the exponent that these are relative to."""
    made = out, rows, sums, reference = _shapes(query, key, value, projection)
    sums.zero_()
    reference.fill_(torch.finfo(reference.dtype).min)
    with _full_precision(query):
        phi = _Map(projection, kernel, query)
        total = torch.zeros_like(sums[:, :1])
        for own in _pieces(sums, key.shape[1]):
            k, v, there = _keys(key, value, own, valid)
            features, larger = phi.of_keys(k, there, above=reference)
            sums.mul_(reference.sub_(larger).exp_()).baddbmm_(features.mT, v)
            reference.copy_(larger)
            total += v.sum(1, keepdim=True)
        # eps in every feature of keys is eps times the sum of values, and in every feature of
        # queries eps times the sum over features.
        sums.add_(total, alpha=eps)
        every = eps * sums.sum(1, keepdim=True)
        for own in _pieces(sums, query.shape[1]):
            features, rows[0, :, own] = phi.of_queries(_take(query, own))
            rows[1, :, own] = _divide((features @ sums).add_(every), out, own)
    return made


def _gradient_shapes(grad, query, key, value, projection, *rest):
    *_, learn = rest
    dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
    return dq, dk, dv, query.new_empty(projection.shape if learn else 0, dtype=_wide(query))


@operator("linear_attention_backward", fake=_gradient_shapes)
def linear_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    valid: Tensor | None,
    out: Tensor,
    rows: Tensor,
    sums: Tensor,
    reference: Tensor,
    kernel: str,
    eps: float,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = dq, dk, dv, learned = _gradient_shapes(grad, query, key, value, projection, learn)
    learned.zero_()
    with _full_precision(query):
        phi = _Map(projection, kernel, query)
        by_sums = torch.zeros_like(sums)
        total = torch.zeros_like(sums[:, :1])
        for own in _pieces(sums, query.shape[1]):
            q, both = _take(query, own), _by_both(grad, out, rows, own)
            features, _ = phi.of_queries(q, rows[0, :, own])
            by_sums.baddbmm_(features.mT, both)
            total += both.sum(1, keepdim=True)
            _put(dq, own, phi.back(both @ sums.mT, features, q, learned, keys=False))
        by_sums.add_(total, alpha=eps)
        every = eps * by_sums.sum(1, keepdim=True)
        for own in _pieces(sums, key.shape[1]):
            k, v, there = _keys(key, value, own, valid)
            features, _ = phi.of_keys(k, there, reference)
            found = (features @ by_sums).add_(every)[..., :-1]
            _put(dv, own, found if there is None else found.masked_fill(~there, 0.0))
            _put(dk, own, phi.back(v @ by_sums.mT, features, k, learned, keys=True))
    return made


def _save(ctx, inputs, output):
    *tensors, ctx.kernel, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, grad, *rest):
    if grad is None:
        return (None,) * 7
    _once()
    learn = ctx.needs_input_grad[3]
    found = linear_backward_op(grad, *ctx.saved_tensors, ctx.kernel, ctx.eps, learn)
    return *found[:3], found[3] if learn else None, None, None, None


differentiable(linear_op, _gradients, save=_save)


def _causal_shapes(query, key, value, projection, sums, reference, kernel, keep):
    pairs, features, columns = _sizes(query, value, projection)
    tokens = query.shape[1]
    whole, chunks = tokens // _CHUNK, -(-tokens // _CHUNK)
    pieces = -(-whole // _together(pairs * features, query)) + chunks - whole
    about = {"dtype": _wide(query)}
    return (
        query.new_empty((*query.shape[:-1], value.shape[-1]), **about),
        query.new_empty((pairs, features, columns), **about),
        query.new_empty((pairs, 1), **about),
        query.new_empty((2, pairs, tokens, 1), **about),
        query.new_empty((pairs, chunks + 1), **about),
        query.new_empty((pieces if keep else 0, pairs, features, columns), **about),
    )


@operator("causal_linear_attention", fake=_causal_shapes)
def causal_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    sums: Tensor | None,
    reference: Tensor | None,
    kernel: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and sums and their exponent after it. For the backward pass: of each query as in
    `linear_op`, the exponents of `sums` and of all chunks, and, to `keep`, sums before pieces."""
    made = _causal_shapes(query, key, value, projection, sums, reference, kernel, keep)
    out, now, last, rows, tops, kept = made
    now.zero_()
    last.fill_(torch.finfo(last.dtype).min)
    if sums is not None and reference is not None:
        now.copy_(sums.flatten(0, 1))
        last.copy_(reference.flatten()[:, None])
    tops[:, :1] = last
    with _full_precision(query):
        phi = _Map(projection, kernel, query)
        for index, (own, chunks, count) in enumerate(_stretches(now, query.shape[1])):
            if keep:
                kept[index] = now
            q, k, v = (_cut(t, count) for t in (_take(query, own), *_keys(key, value, own)[:2]))
            q, top = phi.of_queries(q)
            k, own_top = phi.of_keys(k)
            rows[0, :, own] = _joined(top, count)
            tops[:, chunks] = own_top.view(-1, count)
            weights, share, reached = _weights(last, tops[:, chunks])
            last.copy_(reached)
            found = _apart(torch.bmm(k.mT, v), count)
            before = _mixed(weights[..., 1:], found, weights[..., :1], now)
            now.copy_(before[:, -1])
            both = torch.bmm(q, before[:, :-1].flatten(0, 1))
            both.baddbmm_(torch.bmm(q, k.mT).tril_().mul_(share), v)
            rows[1, :, own] = _divide(_joined(both, count), out, own)
    return made


@operator("causal_linear_attention_backward", fake=_gradient_shapes)
def causal_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor | None,
    out: Tensor,
    rows: Tensor,
    tops: Tensor,
    kept: Tensor,
    kernel: str,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = dq, dk, dv, learned = _gradient_shapes(grad, query, key, value, projection, learn)
    learned.zero_()
    with _full_precision(query):
        phi = _Map(projection, kernel, query)
        reached = tops.cummax(1).values
        after = kept.new_zeros(kept.shape[1:])
        pieces = zip(kept, _stretches(after, query.shape[1]), strict=True)
        for before, (own, chunks, count) in reversed(list(pieces)):
            both = _cut(_by_both(grad, out, rows, own), count)
            states, keys, v = (
                _cut(t, count) for t in (_take(query, own), *_keys(key, value, own)[:2])
            )
            q, _ = phi.of_queries(states, _cut(rows[0, :, own], count))
            k, _ = phi.of_keys(keys, reference=tops[:, chunks].reshape(-1, 1, 1))
            weights, share, _ = _weights(reached[:, chunks.start - 1, None], tops[:, chunks])
            # The sums of the last chunk are for later pieces to read.
            found = _apart(k, count)[:, :-1].mT @ _apart(v, count)[:, :-1]
            before = _mixed(weights[:, :-1, 1:-1], found, weights[:, :-1, :1], before)
            by_scores = torch.bmm(both, v.mT).tril_().mul_(share)
            by_q = torch.bmm(both, before.flatten(0, 1).mT).baddbmm_(by_scores, k)
            # What was before and each chunk, as weighted above, from the reads and from later.
            found, weights = _apart(torch.bmm(q.mT, both), count), weights.mT
            by_sums = _mixed(weights[..., :-1], found, weights[..., -1:], after)
            after, by_sums = by_sums[:, 0], by_sums[:, 1:].flatten(0, 1)
            by_k = torch.bmm(v, by_sums.mT).baddbmm_(by_scores.mT, q)
            scores = torch.bmm(q, k.mT).tril_().mul_(share)
            by_v = torch.bmm(scores.mT, both[..., :-1]).baddbmm_(k, by_sums[..., :-1])
            by_q = phi.back(by_q, q, states, learned, keys=False)
            by_k = phi.back(by_k, k, keys, learned, keys=True)
            for tensor, by in ((dq, by_q), (dk, by_k), (dv, by_v)):
                _put(tensor, own, _joined(by, count))
    return made


def _save_causal(ctx, inputs, output):
    *tensors, _, _, ctx.kernel, _ = inputs
    out, _, _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, *saved)


def _causal_gradients(ctx, grad, *rest):
    if grad is None:
        return (None,) * 8
    _once()
    learn = ctx.needs_input_grad[3]
    found = causal_backward_op(grad, *ctx.saved_tensors, ctx.kernel, learn)
    return *found[:3], found[3] if learn else None, None, None, None, None


differentiable(causal_op, _causal_gradients, save=_save_causal)


def _once() -> None:
    if torch.is_grad_enabled():  # by create_graph
        raise RuntimeError("linear attention: gradients can be taken once, not of gradients")


def _weights(last: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From exponents of what was before [pairs, 1] and of chunks [pairs, chunks]: the weights
    [pairs, chunks + 1, 1 + chunks] of what was before and of chunks in the sums before each chunk
    and after the last; the weight of each chunk beside the sums before it; and the exponent that
    sums after the last are relative to. The sums before a chunk are relative to what the chunk
    may have raised the largest exponent to, so no weight is above 1."""
    given = torch.cat((last, here), 1)
    reached = given.cummax(1).values[:, 1:]
    last = reached[:, -1:]
    weights = given[:, None] - torch.cat((reached, last), 1)[..., None]
    return weights.exp_().tril_(), (here - reached).exp_().view(-1, 1, 1), last


def _mixed(weights: Tensor, sums: Tensor, share: Tensor, carried: Tensor) -> Tensor:
    """Sums [pairs, count, features, columns] by weights [pairs, others, count], and what is carried
    from piece to piece by its own [pairs, others, 1]. That is no part of the product: if products
    may be rounded (TF32), it would be so at every piece, or token, again."""
    made = torch.bmm(weights, sums.flatten(2)).unflatten(2, sums.shape[2:])
    return made.addcmul_(share[..., None], carried[:, None])


def _pieces(sums: Tensor, tokens: int) -> Iterator[slice]:
    pairs, features, _ = sums.shape
    size = max(_ROWS, _at_a_time(sums) // max(1, pairs * features))
    for first in range(0, tokens, size):
        yield slice(first, min(tokens, first + size))


def _stretches(sums: Tensor, tokens: int) -> Iterator[tuple[slice, slice, int]]:
    """Pieces of whole chunks and one of what is left: its tokens, the places of its chunks after
    that of the sums before, and how many there are."""
    pairs, features, _ = sums.shape
    together = _together(pairs * features, sums)
    whole = tokens // _CHUNK
    for first in range(0, whole, together):
        last = min(whole, first + together)
        yield slice(first * _CHUNK, last * _CHUNK), slice(first + 1, last + 1), last - first
    if tokens > whole * _CHUNK:
        yield slice(whole * _CHUNK, tokens), slice(whole + 1, whole + 2), 1


def _together(features: int, like: Tensor) -> int:
    """Chunks of a piece, of so many features per token."""
    return min(_CHUNKS, max(1, _at_a_time(like) // max(1, features * _CHUNK)))


def _at_a_time(like: Tensor) -> int:
    return _CPU_FEATURES if like.device.type == "cpu" else _FEATURES


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _full_precision(like: Tensor) -> torch.autocast:
    """Exponents and long sums are no place for half precision."""
    return torch.autocast(like.device.type, enabled=False)


def _take(tensor: Tensor, own: slice) -> Tensor:
    """[batch, tokens, heads, head_dim] -> [pairs, those tokens, head_dim]."""
    return tensor[:, own].transpose(1, 2).flatten(0, 1).to(_wide(tensor))


def _put(tensor: Tensor, own: slice, found: Tensor) -> None:
    tensor[:, own] = found.unflatten(0, tensor.shape[:3:2]).transpose(1, 2)


def _keys(
    key: Tensor, value: Tensor, own: slice, valid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys; values with a column more, which sums up to the denominator; and where they are, if
    not everywhere. Both are zero in padding."""
    k, v = _take(key, own), pad(_take(value, own), (0, 1), value=1.0)
    if valid is None:
        return k, v, None
    there = valid[:, own].repeat_interleave(key.shape[2], 0)[..., None]
    return k.masked_fill(~there, 0.0), v.masked_fill(~there, 0.0), there


def _cut(tensor: Tensor, count: int) -> Tensor:
    """[pairs, tokens, ...] -> [pairs * count, tokens of a chunk, ...]."""
    return tensor.unflatten(1, (count, tensor.shape[1] // count)).flatten(0, 1)


def _apart(tensor: Tensor, count: int) -> Tensor:
    """[pairs * count, ...] -> [pairs, count, ...]."""
    return tensor.unflatten(0, (tensor.shape[0] // count, count))


def _joined(tensor: Tensor, count: int) -> Tensor:
    return _apart(tensor, count).flatten(1, 2)


def _divide(both: Tensor, out: Tensor, own: slice) -> Tensor:
    """Numerators by the denominators beside them into `out`, and one over these: zero, and no
    gradient, where nothing was seen or all that was seen has vanished beside something larger."""
    below = both[..., -1:]
    inverse = below.masked_fill(below < 1e-30, torch.inf).reciprocal_()
    above, share = (t.unflatten(0, out.shape[:3:2]) for t in (both[..., :-1], inverse))
    torch.mul(above, share, out=out[:, own].transpose(1, 2))
    return inverse


def _by_both(grad: Tensor, out: Tensor, rows: Tensor, own: slice) -> Tensor:
    """Gradients of numerators and denominators [pairs, tokens, head_dim + 1]."""
    found = _take(grad, own)
    below = (found * _take(out, own)).sum(-1, keepdim=True).neg_()
    return torch.cat((found, below), -1).mul_(rows[1, :, own])
