"""Choosing among implementations of one op: the fastest that can serve, or why each cannot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# (device, dtype, *sizes) -> the reason the backend cannot serve such a call, or None. Which sizes
# matter, the head size first, is the op's business.
Refusal = Callable[..., str | None]


@dataclass(frozen=True)
class Backend:
    """One implementation of an op. `home` is the device type `auto` keeps it for (None: any)."""

    name: str
    summary: str
    refusal: Refusal
    home: str | None = None


def choose(
    name: str,
    candidates: Sequence[Backend],
    device: torch.device,
    dtype: torch.dtype,
    *sizes: int,
) -> Backend:
    """The backend called `name`, or for "auto" the first candidate that can serve the call.

    A named backend never falls back to another one: if it cannot serve, the error says why.
    """
    by_name = {backend.name: backend for backend in candidates}
    if name != "auto":
        if name not in by_name:
            raise ValueError(f"backend={name!r} is unknown; choose from auto, {', '.join(by_name)}")
        reason = by_name[name].refusal(device, dtype, *sizes)
        if reason is not None:
            raise ValueError(f"backend={name!r} cannot serve this call: {reason}")
        return by_name[name]
    reasons = []
    for backend in candidates:
        if backend.home is not None and backend.home != device.type:
            reasons.append(f"{backend.name}: is for {backend.home} tensors, these are on {device}")
            continue
        reason = backend.refusal(device, dtype, *sizes)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ValueError("no backend can serve this call:\n  " + "\n  ".join(reasons))
