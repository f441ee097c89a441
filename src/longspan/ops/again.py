"""What is computed once more in the backward pass, with the numbers that it had."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Again:
    """The precision of now and, unless nothing is to be drawn, the random numbers, for later."""

    def __init__(self, like: Tensor, *, random: bool = True) -> None:
        kind = like.device.type
        self.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        self.host, self.devices, self.states = None, [], []
        if random:
            self.host = torch.get_rng_state()
            self.devices, self.states = get_device_states(like)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """As it was then; afterwards as if nobody had drawn anything."""
        fork = nullcontext() if self.host is None else torch.random.fork_rng(self.devices)
        with fork, torch.autocast(**self.autocast):
            if self.host is not None:
                torch.set_rng_state(self.host)
                set_device_states(self.devices, self.states)
            yield
