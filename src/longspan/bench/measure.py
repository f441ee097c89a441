"""Time and memory of contenders on one case, one point after the other."""

import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from longspan import graphs
from longspan.bench.benchmark import (
    OUT_OF_MEMORY,
    Case,
    Clocked,
    Contender,
    Pass,
    Point,
    Settings,
    Workload,
)
from longspan.bench.child import peak_growth

# A replay takes the GPU some microseconds to begin, and finds its caches empty; neither is part of
# a pass that follows another, as the layers of a model do. So that much work is captured at once.
ENOUGH_MS = 1.0
# Of a pass longer than this neither the host nor a cold start is a part that counts: it is made a
# few times as it is, where each time costs as much as hundreds of short ones.
LONG_MS, FEW = 100.0, 3
# After each sample the chip rests this many times as long. A kernel that keeps all of it busy for
# long comes to its power limit and lowers the clock, one that leaves half of it idle does not;
# rested, all that is captured runs at the same clock, as it does between a model's other kernels.
REST = 4


def measure(
    case: Case, kind: Pass, contenders: Sequence[Contender], settings: Settings
) -> Iterator[Point]:
    """Measure `contenders` side by side on `case`."""
    method = _measure_cuda if settings.device == "cuda" else _measure_cpu
    return method(case, kind, contenders, settings)


def _measure_cuda(
    case: Case, kind: Pass, contenders: Sequence[Contender], settings: Settings
) -> Iterator[Point]:
    device = torch.device("cuda")
    for contender in contenders:
        name = contender.name
        try:
            values = _cuda_values(contender.build(case, device), kind, settings)
            yield Point(case, name, kind, **values)
        except Exception as error:
            yield Point(case, name, kind, error=_reason(error))
        # The next contender shall find the memory that this one used.
        gc.collect()
        torch.cuda.empty_cache()


def _cuda_values(workload: Workload, kind: Pass, settings: Settings) -> dict[str, Any]:
    """What is known of a point, by name."""
    if isinstance(workload, Clocked):
        ms, mib = workload.measure()
        return {"ms": ms, "mib": mib}
    run = workload.ready(kind)
    run()  # compiles and tunes what has to be
    workload.clear()
    mib = _cuda_growth(run) + workload.resident / 2**20
    once = _cuda_clock(run, workload)
    if once > LONG_MS:
        ms = statistics.median([once, *(_cuda_clock(run, workload) for _ in range(FEW - 1))])
        return {"ms": ms, "mib": mib, "eager_ms": ms}
    workload.clear()
    eager_ms = _cuda_ms(run, workload, settings)
    replay = None if workload.waits else _capture(run, workload, 1)
    if replay is None:
        return {"ms": eager_ms, "mib": mib, "eager_ms": eager_ms}
    ms = _rested_ms(replay, settings)
    if ms < ENOUGH_MS and (several := _capture(run, workload, math.ceil(ENOUGH_MS / ms))):
        replay = several
        ms = _rested_ms(replay, settings)
    busy_ms = _cuda_ms(replay, workload, settings)
    return {"ms": ms, "mib": mib, "eager_ms": eager_ms, "busy_ms": busy_ms}


def _cuda_clock(run: Any, workload: Workload) -> float:
    """Milliseconds of one pass by the clock on the wall."""
    workload.clear()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _cuda_ms(run: Any, workload: Workload, settings: Settings) -> float:
    from triton.testing import do_bench

    # Clearing the gradients belongs to the eager call; a graph writes its own in place.
    ms: Any = do_bench(
        run,
        warmup=settings.warmup_ms,
        rep=settings.rep_ms,
        grad_to_none=None if isinstance(run, _Replay) else workload.leaves,
        return_mode="median",
    )
    return ms / run.passes if isinstance(run, _Replay) else ms


def _rested_ms(replay: "_Replay", settings: Settings) -> float:
    """As many samples as fit `rep_ms`, each with empty caches (as `do_bench`) and after a rest."""
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    samples: list[float] = []
    for _ in range(3):
        replay()
    while len(samples) < FEW or sum(samples) < settings.rep_ms:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        start.record()
        replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
        time.sleep(REST * samples[-1] / 1e3)
    return statistics.median(samples) / replay.passes


class _Replay:
    """Captured passes, one after the other: their kernels without the host that launches them."""

    def __init__(self, graph: torch.cuda.CUDAGraph, passes: int) -> None:
        self.graph, self.passes = graph, passes

    def __call__(self) -> None:
        self.graph.replay()


def _capture(run: Any, workload: Workload, passes: int) -> _Replay | None:
    """The passes as one CUDA graph, or None if it turns out that they cannot be one."""

    def one() -> None:
        workload.clear()
        run()

    def all_of_them() -> None:
        for _ in range(passes):
            one()

    try:
        graphs.rehearse(one)
        graph, _ = graphs.record(all_of_them)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    return _Replay(graph, passes)


def _cuda_growth(run: Any) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _measure_cpu(
    case: Case, kind: Pass, contenders: Sequence[Contender], settings: Settings
) -> Iterator[Point]:
    device, before = torch.device("cpu"), torch.get_num_threads()
    threads = case.threads or settings.threads
    torch.set_num_threads(threads)
    try:
        ready: dict[str, tuple[Workload, Any]] = {}
        for contender in contenders:
            try:
                contender.build(case.small(), device).ready(kind)()
                workload = contender.build(case, device)
                if isinstance(workload, Clocked):
                    ms, mib = workload.measure()
                    yield Point(case, contender.name, kind, ms=ms, mib=mib)
                else:
                    ready[contender.name] = workload, workload.ready(kind)
            except Exception as error:
                yield Point(case, contender.name, kind, error=_reason(error))
        times = _interleave(ready, settings, threads)
    finally:
        torch.set_num_threads(before)
    del ready
    # Memory does not depend on who else is running, so two processes may measure it at a time.
    with ThreadPoolExecutor(2) as pool:
        builds = [contender.build for contender in contenders if contender.name in times]
        growth = pool.map(lambda build: peak_growth(build, case, kind, threads), builds)
        for (name, samples), mib in zip(times.items(), growth, strict=True):
            yield Point(case, name, kind, ms=1e3 * statistics.median(samples), mib=mib)


def _interleave(
    ready: dict[str, tuple[Workload, Any]], settings: Settings, threads: int
) -> dict[str, list[float]]:
    """Seconds of each pass, in turns: another program's load then falls on all contenders.

    A single thread is timed by what the processor spends on it, which is what an idle machine
    would take; several by the clock on the wall.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ready}
    begin = time.perf_counter()
    for turn in range(settings.rounds):
        for name, (workload, run) in ready.items():
            workload.clear()
            start = clock()
            run()
            times[name].append(clock() - start)
        if turn > 0 and time.perf_counter() - begin > settings.seconds:
            break
    return times


def _reason(error: Exception) -> str:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
