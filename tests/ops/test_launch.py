"""A version that Triton has chosen is taken again for calls it would choose the same for, only."""

from contextlib import contextmanager

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


class Elsewhere(torch.Tensor):
    def get_device(self):
        return 1


def test_kernels_run_where_their_tensors_are(monkeypatch):
    """Also on a GPU that is not the current one; versions are not taken from one to the other."""
    current, seen = [0], []

    @contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    class Watched(Kernel):
        def __getitem__(self, grid):
            seen.append((current[-1], len(grid)))
            return super().__getitem__(grid)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    fast = remembered(Watched())
    for x in (torch.zeros(8), torch.zeros(8).as_subclass(Elsewhere)):
        call(fast, x)
        call(fast, x)
    # Compiled by a call with a grid of two, launched by one of three.
    assert seen == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert current == [0]
