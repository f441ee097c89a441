"""Several rounds of clusters, or causal ones, in PyTorch's own operations: one softmax over what a
token sees in any of them.

A key that several rounds have in common counts in the first of them alone. Rounds are sorted and
cut into chunks, a few of which are computed at a time, so that what is made of them stays in a
CPU's caches, and again in the backward pass, by the log-sum-exp over all rounds. Every token has
one slot in each round, so nothing is added up at random places.

Who sees whom follows from marks: of two tokens one sees the other in a round if its mark there is
at least as large, and larger by no more than `reach`.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Scores are kept in base 2, as is the log-sum-exp: on a CPU exp2 takes a third of the time of exp,
# and a twentieth where most are hidden.
_LOG2E = math.log2(math.e)
# Instead of scores: finite, so that rows that see nothing are no NaN, and far enough apart that a
# token's own score counts if it sees no other, in no round, and never beside one.
_HIDDEN, _ITSELF = -1e30, -1e20
# Scores that are computed at a time. On a GPU every time has to be launched, so there are no more
# than some of them.
_SCORES, _SCORES_ON_CPU, _TIMES = 2**23, 2**18, 16


class Asked(NamedTuple):
    size: int  # of a chunk
    before: int  # chunks in front that are looked at
    reach: int
    self_last: bool
    dropout_p: float
    scale: float


class _Laid(NamedTuple):
    """Tokens in the order of each round. All batch rows and heads follow each other, each behind
    `before` empty chunks, so that none looks into another."""

    rows: Tensor  # [rounds, slots]: who stands where, a row of [batch * tokens * heads, ...]
    empty: Tensor  # [rounds, slots] bool: nobody does, whatever `rows` says
    back: Tensor  # [rounds, batch * tokens * heads]: the slot of each
    marks: Tensor  # [rounds, batch * tokens * heads]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Tensor,
    *,
    causal: bool,
    valid: Tensor | None,
    asked: Asked,
) -> Tensor:
    """`clustered_attention` of as many queries as keys, clusters [batch, tokens, heads, rounds];
    what comes out for padding is anything. Differentiable once."""
    before = min(asked.before, -(-query.shape[1] // asked.size) - 1)  # there are no more
    asked = asked._replace(before=before, reach=asked.reach if causal else before)
    laid = _lay_out(clusters, causal, valid, asked)
    rows = (t.reshape(-1, t.shape[-1]) for t in (query, key, value))
    return _Rounds.apply(*rows, laid, asked).view(query.shape)


def _lay_out(clusters: Tensor, causal: bool, valid: Tensor | None, asked: Asked) -> _Laid:
    batch, tokens, heads, rounds = clusters.shape
    size, before, device = asked.size, asked.before, clusters.device
    chunks = -(-tokens // size)
    cluster = clusters.permute(3, 0, 2, 1).to(torch.int32)
    if valid is not None:
        cluster = cluster.masked_fill(~valid[:, None], torch.iinfo(torch.int32).max)
    order = cluster.argsort(dim=-1, stable=True)
    slot = torch.empty_like(order)
    slot.scatter_(-1, order, torch.arange(tokens, device=device).expand_as(order))
    # Causally, tokens of different clusters are kept further apart than the reach.
    mark = slot + cluster * (asked.reach + 1) if causal else slot // size
    small = not causal and chunks < torch.iinfo(torch.int16).max
    mark = mark.to(torch.int16 if small else torch.int32)
    row = torch.arange(batch, device=device)[:, None, None]
    head = torch.arange(heads, device=device)[:, None]
    empty = torch.zeros_like(order, dtype=torch.bool)
    if valid is not None:
        empty = ~valid[:, None].expand_as(order).gather(-1, order)
    around = (before * size, chunks * size - tokens)
    # Places without a token read the first of their own document: of another's, weight 0 times
    # what is not a number would not be 0.
    rows = (row * tokens + pad(order, around)) * heads + head
    back = slot + ((row * heads + head) * (before + chunks) + before) * size
    return _Laid(
        rows.flatten(1),
        pad(empty, around, value=True).flatten(1),
        *(t.transpose(2, 3).reshape(rounds, -1) for t in (back, mark)),
    )


class _Piece(NamedTuple):
    """Some chunks of one round, and the chunks that they look at."""

    own: slice  # slots of their tokens
    wide: slice  # the same and those in front
    rows: Tensor  # of `wide`
    hidden: Tensor  # [chunks, size, keys]: how often, 0 = seen
    asked: Asked

    def take(self, states: Tensor, dtype: torch.dtype, *, wide: bool = False) -> Tensor:
        """States by row -> [chunks, size, dim], or the [chunks, keys, dim] that they look at."""
        size, before = self.asked.size, self.asked.before
        rows = self.rows if wide else self.rows[before * size :]
        return self.split(states.index_select(0, rows).to(dtype), wide=wide)

    def split(self, states: Tensor, *, wide: bool = False) -> Tensor:
        size, before = self.asked.size, self.asked.before
        if not wide:
            return states.unflatten(0, (-1, size))
        return states.unfold(0, (before + 1) * size, size).mT  # a view: chunks share their keys

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        made = torch.bmm(query, key.mT)
        made.add_(self.hidden.to(made.dtype), alpha=_HIDDEN)
        if self.asked.self_last:
            itself = made.diagonal(self.asked.before * self.asked.size, 1, 2)
            itself.clamp_(max=_ITSELF)
        return made


def _pieces(laid: _Laid, number: int, asked: Asked) -> Iterator[_Piece]:
    """Of the round of that number."""
    size, before = asked.size, asked.before
    rows, empty = laid.rows[number], laid.empty[number]
    marks = laid.marks[: number + 1].index_select(1, rows)
    least, most = torch.iinfo(marks.dtype).min, torch.iinfo(marks.dtype).max
    theirs = marks.masked_fill(empty, most)
    chunks, keys = len(rows) // size, (before + 1) * size
    if rows.device.type == "cpu":
        together = max(1, _SCORES_ON_CPU // (size * keys))
    else:
        together = max(1, _SCORES // (size * keys), chunks // _TIMES)
    for first in range(before, chunks, together):
        own = slice(first * size, min(first + together, chunks) * size)
        wide = slice(own.start - before * size, own.stop)

        def apart(r: int, own: slice = own, wide: slice = wide) -> Tensor:
            """How much larger marks are than others', plus the least number there is: what is
            negative wraps around, so that only what is seen is as small as `seen`."""
            mine = (marks[r, own] + least).view(-1, size, 1)
            return mine - theirs[r, wide].unfold(0, keys, size)[:, None]

        seen = least + asked.reach
        hidden = apart(number).clamp_(seen, seen + 1)
        if number == 0:
            hidden -= seen
        else:
            before_this = apart(0)
            for r in range(1, number):
                torch.minimum(before_this, apart(r), out=before_this)
            hidden -= before_this.clamp_(seen, seen + 1)
            hidden += 1
        yield _Piece(own, wide, rows[wide], hidden, asked)


class _Rounds(torch.autograd.Function):
    """Of rows [batch * tokens * heads, head_dim]."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, laid: _Laid, asked: Asked
    ) -> Tensor:
        dtype = _wide(query)
        # What is merged so far, by row; and this round's, by slot.
        out, lse = query.new_zeros(query.shape, dtype=dtype), None
        part = out.new_empty(laid.rows.shape[1], query.shape[1])
        top, total = out.new_empty(2, len(part))
        kept = []
        with torch.autocast(query.device.type, enabled=False):
            for number, back in enumerate(laid.back):
                for piece in _pieces(laid, number, asked):
                    q = piece.take(query, dtype) * (asked.scale * _LOG2E)
                    scores = piece.scores(q, piece.take(key, dtype, wide=True))
                    highest = scores.amax(-1, keepdim=True)
                    weights = scores.sub_(highest).exp2_()
                    top[piece.own] = highest.flatten()
                    total[piece.own] = weights.sum(-1).flatten()
                    if asked.dropout_p > 0:
                        kept.append(torch.rand_like(weights) >= asked.dropout_p)
                        weights *= kept[-1]
                    into = piece.split(part[piece.own])
                    torch.bmm(weights, piece.take(value, dtype, wide=True), out=into)
                high = top.index_select(0, back)
                new = high + total.index_select(0, back).log2()
                new = new if lse is None else torch.logaddexp2(lse, new)
                if lse is not None:
                    out *= (lse - new).exp2_()[:, None]
                out.addcmul_(part.index_select(0, back), (high - new).exp2_()[:, None])
                lse = new
        if asked.dropout_p > 0:
            out *= _rise(asked)
        ctx.save_for_backward(query, key, value, out, lse, *laid, *kept)
        ctx.asked = asked
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # by create_graph; torch's own decorator may say nothing
            raise RuntimeError("clustered_attention: gradients can be taken once, not of gradients")
        query, key, value, out, lse, *others = ctx.saved_tensors
        laid, kept, asked = _Laid(*others[:4]), iter(others[4:]), ctx.asked
        size, dtype = asked.size, out.dtype
        mean = (grad * out).sum(-1)
        found = [torch.zeros_like(out) for _ in range(3)]
        parts = [out.new_empty(laid.rows.shape[1], query.shape[1]) for _ in range(3)]
        with torch.autocast(query.device.type, enabled=False):
            for number, back in enumerate(laid.back):
                for part in parts[1:]:
                    part.zero_()
                # Slots that nobody reads have no weights.
                rows, empty = laid.rows[number], laid.empty[number]
                sums = lse.index_select(0, rows).masked_fill_(empty, torch.inf)
                means = mean.index_select(0, rows)
                for piece in _pieces(laid, number, asked):
                    q = piece.take(query, dtype) * (asked.scale * _LOG2E)
                    k, v = (piece.take(t, dtype, wide=True) for t in (key, value))
                    g = piece.take(grad, dtype)
                    weights = piece.scores(q, k).sub_(sums[piece.own].view(-1, size, 1)).exp2_()
                    by_weight = torch.bmm(g, v.mT)
                    heavy = weights
                    if asked.dropout_p > 0:
                        factor = next(kept) * _rise(asked)
                        heavy, by_weight = weights * factor, by_weight * factor
                    by_score = by_weight.sub_(means[piece.own].view(-1, size, 1)).mul_(weights)
                    torch.bmm(by_score, k, out=piece.split(parts[0][piece.own]))
                    for part, made in zip(parts[1:], (by_score.mT @ q, heavy.mT @ g), strict=True):
                        for step, of in enumerate(made.split(size, 1)):
                            first = piece.wide.start + step * size
                            part[first : first + of.shape[0] * size] += of.flatten(0, 1)
                for total, part in zip(found, parts, strict=True):
                    total += part.index_select(0, back)
        found[0] *= asked.scale
        found[1] /= _LOG2E
        return (
            *(t.to(one.dtype) for t, one in zip(found, (query, key, value), strict=True)),
            None,
            None,
        )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _rise(asked: Asked) -> float:
    """Of the weights that are not dropped."""
    return 1.0 / (1.0 - asked.dropout_p) if asked.dropout_p < 1 else 0.0
