"""What a call asks for besides its tensors, and which tokens may be seen at all.

Two small values travel from the public function to every backend:

- `Pattern`: the numbers known before any data is looked at (window, dilation, scale ...);
- `Visibility`: padding, packing and global tokens, as tensors that stay on the device. It is built
  once per batch by `visibility()` and can serve every layer of a model.
"""

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

# No row is longer: windows and dilations beyond it mean the same, and products of two stay exact.
_FARTHEST = 2**31 - 1


class Pattern(NamedTuple):
    """The shape of the attention: everything that is a plain number."""

    left: int  # steps a query sees to its left, each `dilation` tokens long
    right: int  # and to its right; 0 makes the whole call causal, global tokens included
    dilation: tuple[int, ...]  # one per query head
    scale: float
    dropout_p: float = 0.0
    global_rows: bool = True  # False: global tokens are seen by all; their own rows stay zero

    @property
    def causal(self) -> bool:
        return self.right == 0

    def head_groups(self) -> list[tuple[int, int, int]]:
        """Runs of neighbouring heads with one dilation: (first head, end, dilation)."""
        groups: list[tuple[int, int, int]] = []
        for head, step in enumerate(self.dilation):
            if groups and groups[-1][2] == step:
                groups[-1] = (groups[-1][0], head + 1, step)
            else:
                groups.append((head, head + 1, step))
        return groups


def _as_int(value: Any) -> Any:
    """A plain int where the value is a whole number of any kind (numpy's, say), else itself."""
    if isinstance(value, bool):
        return repr(value)  # True is an int to Python, and a mistake here
    if not hasattr(value, "__index__") or getattr(value, "ndim", 0):
        return value  # arrays and tensors have an index only if they hold a single number
    try:
        return operator.index(value)
    except TypeError:
        return value


def check_window(window: int | Sequence[int]) -> tuple[int, int]:
    """(left, right) of a window given as that or as an even int, or an error."""
    window = _as_int(window)
    if not isinstance(window, (int, tuple, list)):
        raise TypeError(f"window must be an even int or (left, right), got {window!r}")
    if isinstance(window, int):
        if window < 0 or window % 2:
            raise ValueError(
                f"window={window} must be even and not negative (half on each side); "
                "use (left, right) for an uneven one"
            )
        side = min(window // 2, _FARTHEST)
        return side, side
    sides = [_as_int(side) for side in window]
    if len(sides) != 2 or not all(type(side) is int for side in sides):
        raise TypeError(f"window must be two ints (left, right), got {window!r}")
    left, right = sides
    if left < 0 or right < 0:
        raise ValueError(f"window={window!r} must not be negative on either side")
    return min(left, _FARTHEST), min(right, _FARTHEST)


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(max(head_dim, 1))
    if not isinstance(scale, Real) or not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    return float(scale)


def check_dilation(dilation: int | Sequence[int], heads: int) -> tuple[int, ...]:
    """One dilation per head, or an error."""
    dilation = _as_int(dilation)
    single = not isinstance(dilation, Sequence)
    steps = (dilation,) * heads if single else tuple(_as_int(step) for step in dilation)
    if not all(type(step) is int for step in steps):
        raise TypeError(f"dilation must be an int or one int per head, got {dilation!r}")
    if len(steps) != heads:
        raise ValueError(f"dilation has {len(steps)} entries for {heads} heads: {steps}")
    if min(steps) < 1:
        raise ValueError(f"dilation must be at least 1 (1 = none), got {dilation!r}")
    return tuple(min(step, _FARTHEST) for step in steps)


class Visibility(NamedTuple):
    """Which tokens exist, which belong together and which are global. All int32, on the device.

    Token i may only see tokens start[i] <= j < stop[i]; padding has start = stop = 0, which also
    marks it as invisible. A field is None where the call needs no such information.
    """

    start: Tensor | None = None  # [batch, tokens]
    stop: Tensor | None = None  # [batch, tokens]
    holes: Tensor | None = None  # [batch]: 1 if padding stands between visible tokens
    rank: Tensor | None = None  # [batch, tokens + 1]: global tokens before each position
    places: Tensor | None = None  # [batch, tokens]: where the global tokens are, then zeros

    def valid(self) -> Tensor | None:
        """Bool [batch, tokens], False = padding."""
        return None if self.stop is None else self.stop > 0

    def is_global(self) -> Tensor | None:
        """Bool [batch, tokens], True = global."""
        return None if self.rank is None else self.rank[:, 1:] > self.rank[:, :-1]


def visibility(
    like: Tensor,
    *,
    attention_mask: Tensor | None = None,
    global_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Visibility:
    """Describe a batch shaped [batch, tokens, ...] like `like`, without waiting for a GPU."""
    masks = {
        "attention_mask": attention_mask,
        "global_mask": global_mask,
        "cu_seqlens": cu_seqlens,
    }
    check_masks(like, **masks)
    return describe(like, **masks)


def describe(
    like: Tensor,
    *,
    attention_mask: Tensor | None,
    global_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Visibility:
    """`visibility` of masks that have been checked."""
    if attention_mask is None and global_mask is None and cu_seqlens is None:
        return Visibility()
    batch, tokens = like.shape[:2]
    position = torch.arange(tokens, device=like.device, dtype=torch.int32)
    valid = None if attention_mask is None else attention_mask != 0
    start = stop = holes = None
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(device=like.device, dtype=torch.int32)
        document = torch.searchsorted(bounds, position, right=True)
        # Positions before the first or behind the last boundary belong to no document.
        inside = (document > 0) & (document < bounds.shape[0])
        document = document.clamp(1, bounds.shape[0] - 1)
        valid = inside.expand(batch, tokens) if valid is None else valid & inside
        start = torch.where(valid, bounds[document - 1], 0)
        stop = torch.where(valid, bounds[document], 0)
        holes = (~valid).any(dim=1).to(torch.int32)
    elif valid is not None:
        # Not `tokens`: where any number of them is compiled for, torch 2.11 takes it for 64 bits.
        first = torch.where(valid, position, _FARTHEST).amin(dim=1, keepdim=True)
        last = torch.where(valid, position + 1, 0).amax(dim=1, keepdim=True)
        start = torch.where(valid, first, 0)
        stop = torch.where(valid, last, 0)
        holes = (valid.sum(dim=1, keepdim=True) < last - first).to(torch.int32).squeeze(1)
    rank = places = None
    if global_mask is not None:
        chosen = global_mask != 0
        if valid is not None:
            chosen = chosen & valid
        count = torch.cumsum(chosen, dim=1, dtype=torch.int32)
        rank = torch.nn.functional.pad(count, (1, 0))
        # Every token that is not global is sent to one spare slot behind the list.
        slot = torch.where(chosen, count - 1, tokens).to(torch.int64)
        places = torch.zeros(batch, tokens + 1, device=like.device, dtype=torch.int32)
        places = places.scatter(1, slot, position.expand(batch, tokens))[:, :tokens].contiguous()
    return Visibility(_dense(start), _dense(stop), holes, rank, places)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int32).contiguous()


def check_masks(
    like: Tensor,
    *,
    attention_mask: Tensor | None,
    global_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise unless the masks fit a batch shaped [batch, tokens, ...] like `like`."""
    batch, tokens = like.shape[:2]
    for name, mask in (("attention_mask", attention_mask), ("global_mask", global_mask)):
        if mask is None:
            continue
        if not isinstance(mask, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}")
        if mask.shape != (batch, tokens):
            raise ValueError(
                f"{name} must be [batch, tokens] = {(batch, tokens)}, got {tuple(mask.shape)}"
            )
        if mask.device != like.device:
            raise ValueError(f"{name} is on {mask.device}, the tensors are on {like.device}")
        if mask.is_floating_point() or mask.is_complex():
            raise TypeError(
                f"{name} must be bool or integer with 1 = yes and 0 = no, got {mask.dtype} "
                "(an additive mask of 0 and -inf is something else)"
            )
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must be [documents + 1] boundaries, got shape {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.device.type not in ("cpu", like.device.type):
        raise ValueError(
            f"cu_seqlens is on {cu_seqlens.device}, the tensors are on {like.device}; "
            "it may be there or on the cpu"
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens describes documents packed into one row, but batch is {batch}"
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return  # reading the values would stall the device, or break the graph
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != tokens or values != sorted(values):
        raise ValueError(
            f"cu_seqlens must rise from 0 to tokens = {tokens}, got {values[:4]}...{values[-2:]}"
            if len(values) > 6
            else f"cu_seqlens must rise from 0 to tokens = {tokens}, got {values}"
        )
