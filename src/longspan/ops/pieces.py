"""Attention piece by piece, without what grows as queries times keys: memory of one piece.

In the backward pass a piece is computed once more, or, if it can do without, from what came out of
it and the log-sum-exps of its rows. Torch's checkpoints would compute them again, too, but return
for every piece a gradient of all keys, nearly all of it zeros, which takes time as the square of
the text. Here pieces add to one.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.ops.again import Again


class Piece(Protocol):
    """Some queries, and the keys and values that these look at."""

    @property
    def own(self) -> slice:
        """Its queries, along the dimension that is cut."""
        ...

    def take(self, *states: Tensor) -> tuple[Tensor, ...]:
        """Its keys and values, of all."""
        ...

    def add(self, totals: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        """What belongs to those that `take` took, to contiguous tensors of all."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
        """What comes out for its queries, shaped as these."""
        ...


class KnowingPiece(Piece, Protocol):
    """One that knows its gradients."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What `attend` returns, and what has to be kept beside it."""
        ...

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        kept: Tensor,
    ) -> Sequence[Tensor]:
        """Gradients of query, key and value."""
        ...


def in_pieces(
    pieces: Sequence[Piece],
    dim: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *learned: Tensor,
    random: bool,
    knowing: bool = False,
) -> Tensor:
    """What all pieces make of queries that are cut along `dim`, shaped as these; differentiable
    once. `learned` is what else has gradients; `random`: they draw numbers; `knowing`: they are
    `KnowingPiece`s, which draw nothing and learn nothing else."""
    tensors = query, key, value, *learned
    if not by_torch(pieces):
        if knowing:
            return _KnowingPieces.apply(pieces, dim, query, key, value)
        return _Pieces.apply(pieces, dim, random, *tensors)
    if len(pieces) == 1:
        return _attend(pieces[0], dim, *tensors)
    parts = [checkpoint(_attend, one, dim, *tensors, use_reentrant=False) for one in pieces]
    return torch.cat(parts, dim)


def by_torch(pieces: Sequence[Piece]) -> bool:
    """Whether torch finds the gradients: a compiler cannot look into what `_Pieces` does."""
    return len(pieces) == 1 or torch.compiler.is_compiling()


def wide(tensor: Tensor) -> torch.dtype:
    """In which what a tensor gets from many places is added up."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _attend(
    piece: Piece, dim: int, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor
) -> Tensor:
    own = _cut(query, dim, piece)
    return piece.attend(own, *piece.take(key, value), *learned)


def _cut(tensor: Tensor, dim: int, piece: Piece) -> Tensor:
    return tensor[(slice(None),) * dim + (piece.own,)]


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pieces: Sequence[Piece], dim: int, random: bool, query: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.save_for_backward(query, *others)
        ctx.pieces, ctx.dim, ctx.again = pieces, dim, Again(query, random=random)
        out = torch.empty_like(query)
        for piece in pieces:
            _cut(out, dim, piece)[...] = _attend(piece, dim, query, *others)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse_second()
        query, key, value, *learned = ctx.saved_tensors
        learned = [t.detach().requires_grad_() for t in learned]
        by_query = torch.empty_like(query)
        # A key may be in many pieces: its gradient is a long sum.
        sums = [t.new_zeros(t.shape, dtype=wide(t)) for t in (key, value, *learned)]
        with ctx.again():
            for piece in ctx.pieces:
                own = _cut(query, ctx.dim, piece), *piece.take(key, value)
                leaves = [t.detach().requires_grad_() for t in own]
                with torch.enable_grad():
                    out = piece.attend(*leaves, *learned)
                found = torch.autograd.grad(
                    out, [*leaves, *learned], _cut(gradient, ctx.dim, piece), allow_unused=True
                )
                _cut(by_query, ctx.dim, piece)[...] = found[0]
                piece.add(sums[:2], found[1:3])
                for total, more in zip(sums[2:], found[3:], strict=True):
                    if more is not None:
                        total += more
        tensors = key, value, *learned
        found = [total.to(t.dtype) for total, t in zip(sums, tensors, strict=True)]
        return None, None, None, by_query, *found


class _KnowingPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pieces: Sequence[KnowingPiece],
        dim: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        out, kept = torch.empty_like(query), []
        for piece in pieces:
            part, own = piece.forward(_cut(query, dim, piece), *piece.take(key, value))
            _cut(out, dim, piece)[...] = part
            kept.append(own)
        ctx.save_for_backward(query, key, value, out, *kept)
        ctx.pieces, ctx.dim = pieces, dim
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse_second()
        query, key, value, out, *kept = ctx.saved_tensors
        by_query = torch.empty_like(query)
        sums = [t.new_zeros(t.shape, dtype=wide(t)) for t in (key, value)]
        for piece, own in zip(ctx.pieces, kept, strict=True):
            sent, asked, made = (_cut(t, ctx.dim, piece) for t in (gradient, query, out))
            found = piece.backward(sent, asked, *piece.take(key, value), made, own)
            _cut(by_query, ctx.dim, piece)[...] = found[0]
            piece.add(sums, found[1:])
        by_key, by_value = (total.to(t.dtype) for total, t in zip(sums, (key, value), strict=True))
        return None, None, by_query, by_key, by_value


def _refuse_second() -> None:
    if torch.is_grad_enabled():  # by create_graph; torch's own decorator may say nothing
        raise RuntimeError("attention in pieces: gradients can be taken once, not of gradients")
