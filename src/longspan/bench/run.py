"""Carry out a suite: measure what is missing, save after every point."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from longspan import machine
from longspan.bench.benchmark import Benchmark, Case, Contender, Job, Pass, Point, Settings
from longspan.bench.measure import measure
from longspan.bench.store import Results, resume


def header(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """Everything about a run that is not a point."""
    return {
        "benchmark": benchmark.name,
        "machine": machine.describe(torch.device(settings.device), settings.threads),
        "versions": machine.versions(),
        "source": machine.source_digest(*benchmark.source),
        "commit": machine.commit(),
        "settings": settings.as_dict(),
    }


def run(
    benchmark: Benchmark,
    jobs: Sequence[Job],
    settings: Settings,
    path: Path,
    console: Console,
    *,
    fresh: bool = False,
    quick: bool = False,
) -> Results:
    """Measure every point of `jobs` that `path` does not hold yet; return all it then holds."""
    head = header(benchmark, settings)
    if benchmark.findings is not None and settings.device == "cpu":
        head |= benchmark.findings(quick)
    results, discarded = (Results(head), None) if fresh else resume(path, head)
    if discarded:
        told = Text.assemble(("starting over:", "yellow"), f" {discarded}")
        console.print(told, soft_wrap=True)
    groups = list(_groups(benchmark, jobs, settings.device, results))
    total = sum(len(contenders) for _, _, contenders in groups)
    if results.points:
        console.print(f"{len(results.points)} points measured before, {total} to go")
    with _progress(console, total) as advance:
        for case, kind, contenders in groups:
            advance.announce(f"{case}, {kind}")
            for point in measure(case, kind, contenders, settings):
                results.add(point)
                results.save(path)
                advance(point)
    return results


def _groups(
    benchmark: Benchmark, jobs: Sequence[Job], device: str, results: Results
) -> Iterator[tuple[Case, Pass, list[Contender]]]:
    for job in jobs:
        for kind in job.passes:
            missing = [name for name in job.contenders if not results.done(job.case, name, kind)]
            if missing:
                # On a CPU contenders are timed in turns, so a group is measured as a whole.
                names = job.contenders if device == "cpu" else missing
                yield job.case, kind, [benchmark.contenders[name] for name in names]


class _Advance(Protocol):
    def __call__(self, point: Point) -> None: ...
    def announce(self, what: str) -> None: ...


class _Bar:
    def __init__(self, progress: Progress, total: int) -> None:
        self.progress = progress
        self.task = progress.add_task("", total=total)

    def announce(self, what: str) -> None:
        self.progress.update(self.task, description=what)

    def __call__(self, point: Point) -> None:
        self.progress.advance(self.task)


class _Lines:
    """For logs: one line per point, out at once."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.count = console, total, 0

    def announce(self, what: str) -> None: ...

    def __call__(self, point: Point) -> None:
        self.count += 1
        outcome = point.error or f"{point.ms:.3f} ms, {point.mib:.1f} MiB"
        if point.eager_ms is not None and point.eager_ms != point.ms:
            outcome += f" (from Python {point.eager_ms:.3f} ms)"
        if point.busy_ms is not None:
            outcome += f" (without rests {point.busy_ms:.3f} ms)"
        line = f"[{self.count}/{self.total}] {point.contender}, {point.case}, {point.kind}"
        self.console.print(f"{line}: {outcome}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[_Advance]:
    if not console.is_terminal:
        yield _Lines(console, total)
        return
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, total)
