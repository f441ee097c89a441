"""Results that nobody measured, to judge the judging by."""

import os
import signal
from collections.abc import Callable
from typing import Any

from longspan.bench.benchmark import Claim, Pass, Point, Settings, find
from longspan.bench.store import Results


def make_header(device: str = "cuda", benchmark: str = "attention", **changes: Any) -> Any:
    return {
        "benchmark": benchmark,
        "machine": "1x Imaginary",
        "versions": {"torch": "0.0"},
        "source": "abc",
        "settings": Settings(device, threads=1).as_dict(),
        **changes,
    }


def make_results(
    benchmark: str, device: str, point: Callable[[Any, str, Pass], Point], *, quick: bool = False
) -> Results:
    """Every point of a suite, as `point` has it."""
    results = Results(make_header(device, benchmark))
    dtype = "bfloat16" if device == "cuda" else "float32"
    for job in find(benchmark).jobs(device=device, dtype=dtype, quick=quick):
        for name in job.contenders:
            for kind in job.passes:
                results.add(point(job.case, name, kind))
    return results


def pick(made: list[Claim], *words: str) -> Claim:
    """The one claim with all these words."""
    (claim,) = [c for c in made if all(word in c.text for word in words)]
    return claim


def interrupted(*_: Any) -> Any:
    """A workload during whose making somebody presses Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
