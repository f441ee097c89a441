"""Attention within clusters in PyTorch's own operations, any device: sort, chunk, attend, unsort.

Memory is linear in the number of tokens: chunks are computed a few at a time and, while gradients
are wanted, again in the backward pass.
"""

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

NEVER = -1e30  # the log-sum-exp of a round in which a token saw itself alone
# Scores that are computed at a time, over all batch rows and heads. On a GPU every time has to be
# launched, so there are no more than some of them.
_SCORES = 2**23
_TIMES = 16


class How(NamedTuple):
    """What is asked of the attention within chunks."""

    before: int  # chunks in front that are seen too
    reach: int | None  # how far apart marks may be, see `_sort`; None: all that is listed is seen
    self_last: bool
    merged: bool  # whether the log-sum-exp is wanted, too
    dropout_p: float
    scale: float


class _Sorted(NamedTuple):
    places: Tensor  # [batch, chunks, heads, size]: which token stands where, -1 = none
    there: Tensor  # the same as rows of [batch * tokens * heads, ...]; any row for none
    back: Tensor  # [batch, tokens, heads]: where each token stands, as a row of `places`
    mark: Tensor  # [batch, tokens, heads]


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
    heads, rounds = query.shape[2], clusters.shape[3]
    clusters = clusters.expand(-1, -1, heads, -1)
    made = [_sort(clusters[..., r], size, causal, valid) for r in range(rounds)]
    reach = size if causal else before
    how = How(
        before=1 if causal else before,
        reach=reach if causal or rounds > 1 else None,
        self_last=self_last,
        merged=rounds > 1,
        dropout_p=dropout_p,
        scale=scale,
    )
    marks = None if how.reach is None else torch.stack([one.mark for one in made], dim=-1)
    padded = valid is not None
    parts = [
        _one_round(query, key, value, marks, one, number, padded, how)
        for number, one in enumerate(made)
    ]
    out = _merge(parts, query.dtype) if rounds > 1 else parts[0][0]
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
    how = How(0, None, self_last, merged=False, dropout_p=dropout_p, scale=scale)
    there = _rows(places.clamp(min=0), tokens).flatten()
    q, k, v = (
        t.reshape(-1, head_dim).index_select(0, there).view(*places.shape, head_dim)
        for t in (query, key, value)
    )
    out, _ = _attend(q, k, v, places, None, 0, how)
    # One row more for the slots without a member.
    there = there.masked_fill((places < 0).flatten(), batch * tokens * heads)
    wide = torch.promote_types(out.dtype, torch.float32)
    sums = torch.zeros(batch * tokens * heads + 1, head_dim, dtype=wide, device=out.device)
    sums = sums.index_add(0, there, out.reshape(-1, head_dim).to(wide))
    count = torch.zeros_like(sums[:, 0]).index_add(0, there, torch.ones_like(there, dtype=wide))
    return (sums[:-1] / count[:-1, None].clamp(min=1)).to(query.dtype).view(query.shape)


def _sort(cluster: Tensor, size: int, causal: bool, valid: Tensor | None) -> _Sorted:
    """By clusters [batch, tokens, heads]. Of two tokens, one sees the other if its mark is at
    least as large, and larger by no more than `How.reach`."""
    tokens = cluster.shape[1]
    cluster = cluster.transpose(1, 2).to(torch.int32)
    if valid is not None:
        cluster = cluster.masked_fill(~valid[:, None], torch.iinfo(torch.int32).max)
    order = cluster.argsort(dim=-1, stable=True)
    slot = torch.empty_like(order)
    count = torch.arange(tokens, device=order.device).expand_as(order)
    slot.scatter_(-1, order, count)
    # Causally, tokens of different clusters are kept further apart than the reach.
    mark = slot + cluster * (size + 1) if causal else slot // size
    small = not causal and tokens // size < torch.iinfo(torch.int16).max
    mark = mark.transpose(1, 2).to(torch.int16 if small else torch.int32)
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
    return _Sorted(places, _rows(there, tokens), back, mark)


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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    marks: Tensor | None,
    by: _Sorted,
    number: int,
    padded: bool,
    how: How,
) -> tuple[Tensor, Tensor | None]:
    """[batch, tokens, heads, head_dim] and, if wanted, the log-sum-exp [batch, tokens, heads]."""
    head_dim = query.shape[-1]
    there, back = by.there.flatten(), by.back.flatten()
    q, k, v = (
        _Move.apply(t.reshape(-1, head_dim), there, back, None).view(*by.places.shape, head_dim)
        for t in (query, key, value)
    )
    if marks is not None:
        marks = marks.flatten(0, 2).index_select(0, there).view(*by.places.shape, -1)
    places = by.places
    if marks is None:
        # Slots are empty, and tokens meet themselves, in the same places of every head.
        places = places[:, :, :1] if padded else places[:1, :, :1]
        full = not padded and query.shape[1] % places.shape[3] == 0
        places = None if full and how.before == 0 and not how.self_last else places
    out, sums = _attend(q, k, v, places, marks, number, how)
    filled = None
    _, chunks, _, size = by.places.shape
    if query.shape[1] < chunks * size:  # slots behind the last token are nobody's
        slot = torch.arange(chunks * size, device=query.device).view(chunks, 1, size)
        filled = (slot < query.shape[1]).expand_as(by.places).flatten()
    out = _Move.apply(out.reshape(-1, head_dim), back, there, filled).view(query.shape)
    if sums is not None:
        sums = _Move.apply(sums.reshape(-1, 1), back, there, filled).view(query.shape[:3])
    return out, sums


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor | None,
    marks: Tensor | None,
    number: int,
    how: How,
) -> tuple[Tensor, Tensor | None]:
    """Of tensors [batch, chunks, heads, size, head_dim]: what the tokens of each chunk make of it
    and of those in front, and, if wanted, the log-sum-exp [batch, chunks, heads, size]. Their
    places are [batch or 1, chunks, heads or 1, size], None if all see all; their marks of all
    rounds [..., rounds], of which `number` is this one."""
    batch, chunks, heads, size, _ = query.shape
    wanted = torch.is_grad_enabled()
    # A CPU is faster with what stays in its caches; gradients would be computed twice for it.
    on_cpu = query.device.type == "cpu"
    most = _SCORES // 8 if on_cpu and not wanted else _SCORES
    together = max(1, most // max(1, batch * heads * size * size * (how.before + 1)))
    if not on_cpu:
        # Without a mask, fused attention keeps no scores.
        together = chunks if places is None else max(together, chunks // _TIMES)
    again = wanted and together < chunks
    own = [_cut(t, together) for t in (query, places, marks)]
    wide = [_cut(t, together, how.before) for t in (key, value, places, marks)]
    given: tuple[Any, ...]
    parts = []
    for given in zip(*own, *wide, strict=False):  # the first says how many there are
        if again:
            keep = how.dropout_p > 0  # the same weights have to be dropped again
            few: Any = partial(checkpoint, _few, use_reentrant=False, preserve_rng_state=keep)
            done = few(number, how, *given)
        else:
            done = _few(number, how, *given)
        parts.append(done)
    if len(parts) == 1:
        return parts[0]
    out, sums = zip(*parts, strict=True)
    return torch.cat(out, 1), torch.cat(sums, 1) if how.merged else None


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
    number: int,
    how: How,
    query: Tensor,
    places: Tensor | None,
    marks: Tensor | None,
    key: Tensor,
    value: Tensor,
    listed: Tensor | None,
    marked: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The same for a few chunks, whose keys begin `how.before` chunks earlier."""
    chunks = query.shape[1]

    def beside(tensor: Tensor) -> Tensor:
        """Each chunk behind those in front of it: [batch, chunks, heads, keys, ...]."""
        parts = [tensor[:, step : step + chunks] for step in range(how.before + 1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    key, value = beside(key), beside(value)
    listed = None if listed is None else beside(listed)
    marked = None if marked is None else beside(marked)
    if how.merged:
        assert places is not None
        assert listed is not None
        assert marks is not None
        assert marked is not None
        return _weighed(number, how, query, places, marks, key, value, listed, marked)
    seen = None
    if places is not None and listed is not None:
        inside = True
        if marks is not None and marked is not None:
            inside, _ = _within(marks, marked, number, how)
        seen, _ = _seen(places, listed, inside, how)
        seen = seen.expand(query.shape[0], *seen.shape[1:]).flatten(0, 1)
    out = scaled_dot_product_attention(
        *(t.flatten(0, 1) for t in (query, key, value)),
        attn_mask=seen,
        dropout_p=how.dropout_p,
        scale=how.scale,
    )
    return out.unflatten(0, query.shape[:2]), None


def _weighed(
    number: int,
    how: How,
    query: Tensor,
    places: Tensor,
    marks: Tensor,
    key: Tensor,
    value: Tensor,
    listed: Tensor,
    marked: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same for one round of several, with the log-sum-exp."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if query.dtype == torch.float16:
        query, key = query.to(wide), key.to(wide)  # whose products may be out of its range
    with torch.autocast(query.device.type, enabled=False):
        scores = query @ key.mT
    inside, times = _within(marks, marked, number, how)
    seen, alone = _seen(places, listed, inside, how)
    scores = scores.to(wide) * how.scale - times.to(wide).clamp(min=1).log()
    scores = scores.masked_fill(~seen, -torch.inf)
    sums = scores.logsumexp(-1)
    weights = (scores - sums[..., None]).exp()
    sums = sums if alone is None else sums.masked_fill(alone[..., 0], NEVER)
    return dropout(weights, how.dropout_p).to(value.dtype) @ value, sums


def _seen(
    places: Tensor, listed: Tensor, inside: Tensor | bool, how: How
) -> tuple[Tensor, Tensor | None]:
    """[..., size, keys]: who sees whom of the tokens at `places` and those `listed` beside them;
    and, if it matters, which see themselves alone [..., size, 1]."""
    seen, alone = (listed >= 0)[..., None, :] & inside, None
    if how.self_last:
        itself = places[..., None] == listed[..., None, :]
        others = seen & ~itself
        alone = ~others.any(-1, keepdim=True)
        seen = torch.where(alone, itself & seen, others)
    # A slot without a token sees nothing and would be NaN; nobody reads it.
    return seen | ~seen.any(-1, keepdim=True), alone


def _within(marks: Tensor, marked: Tensor, number: int, how: How) -> tuple[Tensor, Tensor]:
    """Which keys the tokens see by their marks in this round, and in how many rounds."""
    inside = []
    for mark, theirs in zip(marks.unbind(-1), marked.unbind(-1), strict=True):
        apart = mark[..., None] - theirs[..., None, :]
        inside.append(apart.clamp(0, how.reach) == apart)
    times = inside[0].to(torch.int16)
    for other in inside[1:]:
        times = times + other
    return inside[number], times


def _merge(parts: list[tuple[Tensor, Tensor | None]], dtype: torch.dtype) -> Tensor:
    """Rounds as one softmax over the keys of all."""
    sums = torch.stack([one for _, one in parts if one is not None], dim=-1)
    share = sums.softmax(-1)
    total = sum(out * share[..., number, None] for number, (out, _) in enumerate(parts))
    assert isinstance(total, Tensor)
    return total.to(dtype)
