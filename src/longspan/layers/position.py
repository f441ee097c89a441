"""Positions: the sinusoids, a learned table made longer, and rotation of queries and keys."""

import math
from typing import Any

import torch
from torch import Tensor

from longspan.ops.once import made_once
from longspan.ops.operator import operator


def sinusoids(position: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """[...] -> [..., dim]: sine in even columns, cosine in odd ones, for any position."""
    rate = torch.arange(0, dim, 2, device=position.device, dtype=torch.float32)
    rate = torch.exp(rate * (-math.log(10000.0) / dim))
    angle = position.to(torch.float32)[..., None] * rate
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., :dim].to(dtype)


def tile_positions(table: Tensor, reserved: int, length: int) -> Tensor:
    """A learned table [reserved + trained, dim] made [reserved + length, dim] by repetition.

    Repeating the trained rows keeps what attention knows about short distances everywhere but at
    the seams. Reserved rows (RoBERTa keeps some for padding) are kept once, at the front.
    """
    trained = table[reserved:]
    if not 1 <= trained.shape[0] <= length:
        raise ValueError(
            f"cannot make {trained.shape[0]} trained positions {length} long: positions are only "
            "ever added, and there must be one to repeat"
        )
    copies = -(-length // trained.shape[0])
    return torch.cat([table[:reserved], trained.repeat(copies, 1)[:length]])


def rotate(*states: Tensor, position: Tensor, base: float) -> tuple[Tensor, ...]:
    """Queries and keys [batch, tokens, heads, head_dim], turned by their position [batch, tokens].

    The two halves of a head are paired: pair i turns by position / base ** (2i / head_dim). A
    score between two turned tokens depends on how far apart they are, not on where they stand.
    Positions in float64 keep angles exact far into a text, where float32 blurs neighbours.
    """
    # Inside a graph the table is an operator of its own. The compiler would compute it anew, with
    # powers, sines and cosines in float64, for every element that is turned.
    table = _turns if torch.compiler.is_compiling() else turns
    return _turn_all(states, *table(position, states[0].shape[-1], base))


def rotate_from(first: int | Tensor, *states: Tensor, base: float) -> tuple[Tensor, ...]:
    """The same for tokens that stand one behind the other, the first of them in place `first`."""
    one = states[0]
    # Where a text is written on, every call has places of its own.
    beginning = isinstance(first, int) and first == 0  # it may be on the device
    if beginning and one.shape[1] > 1 and not torch.compiler.is_compiling():
        wide = torch.promote_types(one.dtype, torch.float32)
        return _turn_all(states, *_first_turns(one, one.shape[1], one.shape[-1], base, wide))
    place = torch.arange(one.shape[1], device=one.device, dtype=torch.float64)[None] + first
    return rotate(*states, position=place, base=base)


@made_once
def _first_turns(
    device: torch.device, tokens: int, head_dim: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """`turns` of a text's first tokens, the same for all layers that read it."""
    place = torch.arange(tokens, device=device, dtype=torch.float64)
    return tuple(t.to(dtype) for t in turns(place[None], head_dim, base))


def _turn_all(states: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    turn: Any = _turn if torch.compiler.is_compiling() else _Turned.apply
    return tuple(turn(one, cos, sin) for one in states)


class _Turned(torch.autograd.Function):
    """Keeps nothing but the table, as the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(one, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _Turned.apply(grad, cos, -sin), None, None


def _turn(one: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = one.to(torch.promote_types(one.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = cos.to(left.dtype), sin.to(left.dtype)
    to_left = (left * cos).addcmul_(right, sin, value=-1)
    to_right = (right * cos).addcmul_(left, sin)
    return torch.cat((to_left, to_right), dim=-1).to(one.dtype)


def turns(position: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [batch, tokens, 1, head_dim / 2] of the angles at each position."""
    wide = torch.float64 if position.dtype == torch.float64 else torch.float32
    step = torch.arange(0, head_dim, 2, device=position.device, dtype=wide)
    rate = 1.0 / base ** (step / head_dim)
    angle = (position.to(wide)[..., None] * rate)[:, :, None, :]
    return angle.cos(), angle.sin()


def _turn_shapes(position: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if position.dtype == torch.float64 else torch.float32
    shape = (*position.shape, 1, (head_dim + 1) // 2)
    made = position.new_empty(shape, dtype=wide)
    return made, torch.empty_like(made)


@operator("turns", fake=_turn_shapes)
def _turns(position: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    return turns(position, head_dim, base)
