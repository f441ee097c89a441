"""Attention within clusters in PyTorch's own operations, any device: sort, chunk, attend, unsort.
Where tokens of a chunk do not see all of it, or several rounds are merged, `rounds` does it.

Memory is linear in the number of tokens: chunks are computed a few at a time and, while gradients
are wanted, again in the backward pass.
"""

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from longspan.ops.clustered import rounds

# Scores that are computed at a time, over all batch rows and heads. On a GPU every time has to be
# launched, so there are no more than some of them.
_SCORES = 2**23
_TIMES = 16
# Tokens in a chunk of causal attention. In longer ones more keys are scored that are out of reach,
# with shorter ones products are too small.
_CAUSAL = 64


class How(NamedTuple):
    """What is asked of the attention within chunks."""

    before: int  # chunks in front that are seen too
    self_last: bool
    dropout_p: float
    scale: float


class _Sorted(NamedTuple):
    places: Tensor  # [batch, chunks, heads, size]: which token stands where, -1 = none
    there: Tensor  # the same as rows of [batch * tokens * heads, ...]; any row for none
    back: Tensor  # [batch, tokens, heads]: where each token stands, as a row of `places`


def clustered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Tensor,
    *,
    size: int,
    before: int,
    causal: bool,
    self_last: bool,
    valid: Tensor | None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`clustered_attention` of as many queries as keys."""
    clusters = clusters.expand(-1, -1, query.shape[2], -1)
    if causal or clusters.shape[3] > 1:
        chunk, reach = size, before
        if causal:  # a window in the sorted order, whatever the chunks
            chunk, reach = min(size, _CAUSAL), size
            before = -(-reach // chunk)
        asked = rounds.Asked(chunk, before, reach, self_last, dropout_p, scale)
        out = rounds.attend(query, key, value, clusters, causal=causal, valid=valid, asked=asked)
    else:
        how = How(before, self_last, dropout_p, scale)
        by = _sort(clusters[..., 0], size, valid)
        out = _one_round(query, key, value, by, valid is not None, how)
    return out if valid is None else out.masked_fill(~valid[..., None, None], 0.0)


def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    *,
    self_last: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`routed_attention`."""
    batch, tokens, heads, head_dim = query.shape
    how = How(0, self_last, dropout_p, scale)
    there = _rows(places.clamp(min=0), tokens).flatten()
    q, k, v = (
        t.reshape(-1, head_dim).index_select(0, there).view(*places.shape, head_dim)
        for t in (query, key, value)
    )
    out = _attend(q, k, v, places, how)
    # One row more for the slots without a member.
    there = there.masked_fill((places < 0).flatten(), batch * tokens * heads)
    wide = torch.promote_types(out.dtype, torch.float32)
    sums = torch.zeros(batch * tokens * heads + 1, head_dim, dtype=wide, device=out.device)
    sums = sums.index_add(0, there, out.reshape(-1, head_dim).to(wide))
    count = torch.zeros_like(sums[:, 0]).index_add(0, there, torch.ones_like(there, dtype=wide))
    return (sums[:-1] / count[:-1, None].clamp(min=1)).to(query.dtype).view(query.shape)


def _sort(cluster: Tensor, size: int, valid: Tensor | None) -> _Sorted:
    """By clusters [batch, tokens, heads]."""
    tokens = cluster.shape[1]
    cluster = cluster.transpose(1, 2).to(torch.int32)
    if valid is not None:
        cluster = cluster.masked_fill(~valid[:, None], torch.iinfo(torch.int32).max)
    order = cluster.argsort(dim=-1, stable=True)
    slot = torch.empty_like(order)
    count = torch.arange(tokens, device=order.device).expand_as(order)
    slot.scatter_(-1, order, count)
    there = order
    if valid is not None:
        order = order.masked_fill(~valid[:, None].expand_as(order).gather(-1, order), -1)
    places, there = (
        pad(t, (0, -tokens % size), value=fill).unflatten(-1, (-1, size)).transpose(1, 2)
        for t, fill in ((order, -1), (there, 0))
    )
    batch, chunks, heads, _ = places.shape
    head = torch.arange(heads, device=slot.device)
    row = torch.arange(batch, device=slot.device)[:, None, None]
    slot = slot.transpose(1, 2)
    back = ((row * chunks + slot // size) * heads + head) * size + slot % size
    return _Sorted(places, _rows(there, tokens), back)


def _rows(places: Tensor, tokens: int) -> Tensor:
    """Places [batch, chunks, heads, size] as rows of a tensor [batch * tokens * heads, ...]."""
    batch, _, heads, _ = places.shape
    row = torch.arange(batch, device=places.device)[:, None, None, None]
    head = torch.arange(heads, device=places.device)[:, None]
    return (row * tokens + places) * heads + head


class _Move(torch.autograd.Function):
    """Rows to other places, and gradients back by the same list: nothing has to be added up."""

    @staticmethod
    def forward(ctx, rows: Tensor, there: Tensor, back: Tensor, real: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`there` says which row to take for each place, `back` the place of each row; `real` marks
        the rows that any place takes, None = all."""
        ctx.save_for_backward(there, back, real)
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        there, back, real = ctx.saved_tensors
        moved = _Move.apply(gradient, back, there, None)
        return moved if real is None else moved * real[:, None], None, None, None


def _one_round(
    query: Tensor, key: Tensor, value: Tensor, by: _Sorted, padded: bool, how: How
) -> Tensor:
    """[batch, tokens, heads, head_dim]."""
    head_dim = query.shape[-1]
    there, back = by.there.flatten(), by.back.flatten()
    q, k, v = (
        _Move.apply(t.reshape(-1, head_dim), there, back, None).view(*by.places.shape, head_dim)
        for t in (query, key, value)
    )
    # Slots are empty, and tokens meet themselves, in the same places of every head.
    places = by.places[:, :, :1] if padded else by.places[:1, :, :1]
    full = not padded and query.shape[1] % places.shape[3] == 0
    places = None if full and how.before == 0 and not how.self_last else places
    out = _attend(q, k, v, places, how)
    filled = None
    _, chunks, _, size = by.places.shape
    if query.shape[1] < chunks * size:  # slots behind the last token are nobody's
        slot = torch.arange(chunks * size, device=query.device).view(chunks, 1, size)
        filled = (slot < query.shape[1]).expand_as(by.places).flatten()
    return _Move.apply(out.reshape(-1, head_dim), back, there, filled).view(query.shape)


def _attend(query: Tensor, key: Tensor, value: Tensor, places: Tensor | None, how: How) -> Tensor:
    """Of tensors [batch, chunks, heads, size, head_dim]: what the tokens of each chunk make of it
    and of those in front. Their places are [batch or 1, chunks, heads or 1, size], None if all see
    all."""
    batch, chunks, heads, size, _ = query.shape
    wanted = torch.is_grad_enabled()
    on_cpu = query.device.type == "cpu"
    if places is None and not (on_cpu and how.dropout_p > 0):
        together = chunks  # fused attention keeps no scores
    else:
        # A CPU is faster with what stays in its caches; gradients would be computed twice for it.
        most = _SCORES // 8 if on_cpu and not wanted else _SCORES
        together = max(1, most // max(1, batch * heads * size * size * (how.before + 1)))
        if not on_cpu:
            together = max(together, chunks // _TIMES)
    again = wanted and together < chunks
    own = [_cut(t, together) for t in (query, places)]
    wide = [_cut(t, together, how.before) for t in (key, value, places)]
    given: tuple[Any, ...]
    parts = []
    for given in zip(*own, *wide, strict=False):  # the first says how many there are
        if again:
            keep = how.dropout_p > 0  # the same weights have to be dropped again
            few: Any = partial(checkpoint, _few, use_reentrant=False, preserve_rng_state=keep)
            done = few(how, *given)
        else:
            done = _few(how, *given)
        parts.append(done)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _cut(tensor: Tensor | None, together: int, before: int = 0) -> Iterator[Tensor | None]:
    """[batch, chunks, ...] in parts of `together` chunks, each with the `before` chunks in front of
    it; those in front of the first say that they are none. Cut once, so that the backward pass
    puts gradients together once."""
    if tensor is None:
        yield from repeat(None)
        return
    front = tensor.new_full((tensor.shape[0], before, *tensor.shape[2:]), -1)
    for part in tensor.split(together, dim=1):
        part = torch.cat((front, part), dim=1) if before else part
        yield part
        front = part[:, part.shape[1] - before :]


def _few(
    how: How,
    query: Tensor,
    places: Tensor | None,
    key: Tensor,
    value: Tensor,
    listed: Tensor | None,
) -> Tensor:
    """The same for a few chunks, whose keys begin `how.before` chunks earlier."""
    chunks = query.shape[1]

    def beside(tensor: Tensor) -> Tensor:
        """Each chunk behind those in front of it: [batch, chunks, heads, keys, ...]."""
        parts = [tensor[:, step : step + chunks] for step in range(how.before + 1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    seen = None
    if places is not None and listed is not None:
        seen = _seen(places, beside(listed), how.self_last)
        seen = seen.expand(query.shape[0], *seen.shape[1:]).flatten(0, 1)
    out = scaled_dot_product_attention(
        *(t.flatten(0, 1) for t in (query, beside(key), beside(value))),
        attn_mask=seen,
        dropout_p=how.dropout_p,
        scale=how.scale,
    )
    return out.unflatten(0, query.shape[:2])


def _seen(places: Tensor, listed: Tensor, self_last: bool) -> Tensor:
    """[..., size, keys]: who sees whom of the tokens at `places` and those `listed` beside them."""
    seen = (listed >= 0)[..., None, :]
    if self_last:
        itself = places[..., None] == listed[..., None, :]
        others = seen & ~itself
        alone = ~others.any(-1, keepdim=True)
        seen = torch.where(alone, itself & seen, others)
    # A slot without a token sees nothing and would be NaN; nobody reads it.
    return seen | ~seen.any(-1, keepdim=True)
