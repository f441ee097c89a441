"""Attention dropout as a pure function of (seed, batch, head, query, key).

Every backend drops exactly the same entries for the same seed, the backward pass recomputes the
mask instead of storing n x w bits, and a test can compare a fused kernel with the oracle.
The mixing function is the 32-bit finaliser "lowbias32"; `kernels.py` holds the same few lines.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (held in int64): each input bit moves every output bit."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)


def threshold(p: float) -> int:
    """Entries whose 24-bit draw is below this are dropped."""
    return round(p * (1 << 24))


def kept(seed: Tensor, stream: Tensor, query: Tensor, key: Tensor, p: float) -> Tensor:
    """Bool, True = keep. `stream` is batch * heads + head; all index tensors broadcast together."""
    row = mix((mix((seed + stream) & WORD) + query) & WORD)
    return (mix(row ^ (key * GOLDEN & WORD)) >> 8) >= threshold(p)


def new_seed(device: torch.device) -> Tensor:
    """A seed drawn from torch's generator on the device: no host synchronisation, captured by
    CUDA graphs, replayed by activation checkpointing, fixed by `torch.manual_seed`."""
    return torch.randint(0, 2**31 - 1, (1,), device=device, dtype=torch.int64)
