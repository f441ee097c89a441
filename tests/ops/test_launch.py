"""A version that Triton has chosen is taken again for calls it would choose the same for, only."""

import pytest
import torch
from triton import JITFunction

from longspan.ops.launch import remembered


class Kernel(JITFunction):
    """Notes how it is called; what it "compiled" notes how it is launched."""

    arg_names = ("X", "n", "scale", "SIZE")  # pyright: ignore[reportAssignmentType]

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def call(*args, **constants):
            self.compiled.append((grid, args, constants))
            return self

        def launch(*args):
            self.launched.append((grid, args))

        return launch if len(grid) == 3 else call


def call(fast, x, n=32, grid=(4, 2), **constants):
    fast[grid](x, n, 0.5, **{"SIZE": 16, **constants})


def test_the_second_call_is_a_launch():
    kernel = Kernel()
    fast = remembered(kernel)
    x, y = torch.zeros(8), torch.ones(8)
    call(fast, x, num_warps=4)
    call(fast, y, n=48, grid=(7, 2), num_warps=4)
    assert kernel.compiled == [((4, 2), (x, 32, 0.5), {"SIZE": 16, "num_warps": 4})]
    ((grid, args),) = kernel.launched
    # Options such as the number of warps are no arguments of what was compiled.
    assert grid == (7, 2, 1)
    assert args == (y.data_ptr(), 48, 0.5, 16)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 33},  # no multiple of 16
        {"n": 1},
        {"n": 2**31},  # 64 bits
        {"x": torch.zeros(8, dtype=torch.float16)},
        {"x": torch.zeros(8)[1:]},  # not aligned
        {"SIZE": 32},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_what_triton_compiles_anew_is_not_taken_from_memory(change):
    kernel = Kernel()
    fast = remembered(kernel)
    first = {"x": torch.zeros(8), "num_warps": 4}
    call(fast, **first)
    call(fast, **{**first, **change})
    assert len(kernel.compiled) == 2
    assert not kernel.launched
