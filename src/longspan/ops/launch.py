"""Launching Triton's kernels with less work for the host.

For every launch Triton looks at each argument to find out which of its compiled versions to take,
and for short sequences that takes longer than the kernels. The same is found out here from a key
that is quicker to make, and the version that Triton chose for it before is taken again.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction


def remembered(kernel: Any) -> Any:
    """The kernel, to be called as ever: arguments by position, constants by name."""
    # Interpreted there is nothing to remember.
    return _Remembered(kernel) if isinstance(kernel, JITFunction) else kernel


class _Remembered:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._versions: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        device = next((one.get_device() for one in args if isinstance(one, Tensor)), -1)
        if device >= 0 and device != torch.cuda.current_device():
            # Triton launches on the current device, wherever the tensors are.
            with torch.cuda.device(device):
                self._launch(grid, *args, **constants)
            return
        # All that Triton compiles a version for: types, alignment, the number 1, constants, and,
        # since a version is loaded there, the device.
        key: list[Hashable] = [device, *constants.items()]
        plain = []  # tensors as addresses, which the launcher need not ask them and the driver for
        for one in args:
            if isinstance(one, Tensor):
                address = one.data_ptr()
                key += one.dtype, address & 15 == 0
                plain.append(address)
            else:
                key += _kind(one)
                plain.append(one)
        known = self._versions.get(tuple(key))
        if known is None:
            compiled = self.kernel[grid](*args, **constants)
            names = self.kernel.arg_names[len(args) :]
            self._versions[tuple(key)] = compiled, tuple(constants[name] for name in names)
            return
        compiled, rest = known
        compiled[(*grid, 1, 1)[:3]](*plain, *rest)


def _kind(argument: Any) -> tuple[Hashable, ...]:
    if type(argument) is int:
        return argument == 1, argument & 15 == 0, argument.bit_length() > 31
    base = getattr(argument, "base", None)  # of a tensor descriptor
    return (type(argument),) if base is None else (base.dtype, *argument.block_shape)
