"""Absolute positions: the sinusoids, and a learned table made longer."""

import math

import torch
from torch import Tensor


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


def rotary_tables(
    n: int, dim: int, base: float = 10000.0, first: int = 0, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n, dim / 2] of the angles by which tokens first, first + 1 ... turn.

    Angles are computed in float64: in a long text, float32 would blur neighbouring positions.
    """
    rate = torch.arange(0, dim, 2, device=device, dtype=torch.float64)
    rate = torch.exp(rate * (-math.log(base) / dim))
    place = torch.arange(n, device=device, dtype=torch.float64) + first
    angle = place[:, None] * rate
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, n, heads, dim] turned by position: each pair (i, i + dim / 2) by its own angle."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    one, two = x.to(wide).chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)
