"""CUDA graphs: what a function launches, recorded once and launched again as a whole."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class RecordingError(RuntimeError):
    """What no graph can do, found out before anything was recorded."""


def possible(tensors: Sequence[Tensor]) -> bool:
    """Whether a call with these could be recorded here and now."""
    if torch.compiler.is_compiling() or not all(one.is_cuda for one in tensors):
        return False
    return not torch.cuda.is_current_stream_capturing()


def new_pool() -> Any:
    """Memory for graphs that are replayed one after the other, in this order."""
    torch.cuda.empty_cache()  # what was cached so far would be of no use to them
    return torch.cuda.graph_pool_handle()


@contextmanager
def trying(device: torch.device) -> Iterator[None]:
    """On this device, and as if nobody had drawn random numbers meanwhile."""
    with torch.cuda.device(device):
        numbers = torch.cuda.get_rng_state()
        try:
            yield
        finally:
            torch.cuda.set_rng_state(numbers)


def rehearse(run: Callable[[], object], times: int = 1) -> None:
    """Run it as it will be recorded: whatever is set up on first use is set up by then.

    Raises `RecordingError` if it waits for the device, which no graph can do: a recording that
    fails half-way keeps its memory for good, so that this is looked for first.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    before = torch.cuda.get_sync_debug_mode()
    try:
        with torch.cuda.stream(aside), _nothing_kept():
            for number in range(times + 1):
                # Compiling, the first time, may well wait.
                _on_waiting("error" if number else "default")
                run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise RecordingError(str(error).strip().splitlines()[0]) from error
    finally:
        _on_waiting(before)
        torch.cuda.current_stream().wait_stream(aside)


def record(run: Callable[[], Made], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Made]:
    """A graph of what `run` launches, and what it returned: tensors that a replay fills.

    Raises RuntimeError if it cannot be recorded.
    """
    graph = torch.cuda.CUDAGraph()
    device = torch.cuda.current_device()
    numbers = torch.cuda.get_rng_state(device)
    try:
        # Other threads, such as one that reads the next batch, may go on using the device.
        with (
            _nothing_kept(),
            torch.cuda.graph(
                graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local"
            ),
        ):
            made = run()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):
            torch.cuda.synchronize()
            # Its state still believes in the recording and would refuse to draw another number.
            generator = torch.cuda.default_generators[device]
            generator.graphsafe_set_state(torch.Generator(f"cuda:{device}"))
            torch.cuda.set_rng_state(numbers, device)
        raise
    return graph, made


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    """To record on. Torch's own is on the device of the first recording, whichever comes next; and
    only graphs of one stream share the memory of a pool."""
    return torch.cuda.Stream(device)


def _on_waiting(mode: int | str) -> None:
    with warnings.catch_warnings():  # that torch does not notice every kind
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """Weights that autocast made half-precise before would be gone, or old, in a replay, and those
    that it makes here are no one else's."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
