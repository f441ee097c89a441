"""Where global tokens are, as a list of fixed length, and the states found there."""

import torch
from torch import Tensor


def global_positions(global_mask: Tensor, most: int | None = None) -> Tensor:
    """Positions [batch, most] of the nonzero entries of a mask [batch, tokens], then -1.

    `most` is the capacity; None reads the largest count back from the device. A row with more
    global tokens than that is an error: at once where the count can be seen without stalling a
    device, else from the device itself, when it gets there.
    """
    chosen = global_mask != 0
    batch, tokens = chosen.shape
    counts = chosen.sum(dim=1)
    if not chosen.is_cuda and not torch.compiler.is_compiling():
        needed = int(counts.max()) if chosen.numel() else 0
        if most is not None and needed > most:
            raise ValueError(f"{needed} global tokens in one row, but room for only {most}")
        most = needed if most is None else most
    elif most is None:
        most = int(counts.max())
    else:
        torch._assert_async((counts <= most).all(), "more global tokens in one row than room")
    slot = torch.where(chosen, chosen.cumsum(dim=1) - 1, most).clamp(max=most)
    position = torch.arange(tokens, device=chosen.device).expand(batch, tokens)
    empty = torch.full((batch, most + 1), -1, device=chosen.device)
    return empty.scatter(1, slot, position)[:, :most]


def take_rows(hidden: Tensor, positions: Tensor) -> Tensor:
    """Rows [batch, g, dim] of [batch, tokens, dim]; an empty slot (-1) gets the first token's."""
    at = positions.clamp(min=0).long()[..., None].expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, at)
