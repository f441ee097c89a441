"""What a benchmark is: cases, contenders that solve them, points, and what is made of these.

`attention`, `models`, `led`, `lm`, `family` and `finetuning` beside this file are those there are;
measuring, storing and reporting know none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.table import Table

    from longspan.bench.store import Results

Pass = Literal["forward", "forward+backward"]
PASSES: tuple[Pass, ...] = ("forward", "forward+backward")
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Case:
    """One problem to be solved; each benchmark adds what else describes its own."""

    tokens: int
    batch: int = 1
    dtype: str = "bfloat16"
    threads: int | None = None  # of a CPU; None: as many as the run has

    def small(self) -> Case:
        """The same at a size that costs nothing, to warm up with."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Workload:
    """`forward()` is what is timed; `leaves` are the tensors that gradients are wanted for.

    `output` is shaped like what forward returns. `resident` bytes are there before the pass and
    count as its memory all the same: the weights of a model. One that `waits` for the device
    cannot be captured as a CUDA graph, and trying it would leave torch's generator unusable.
    """

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    output: Tensor
    resident: int = 0
    waits: bool = False

    def ready(self, kind: Pass) -> Callable[[], object]:
        """The pass to be timed. It allocates nothing but what the pass itself needs."""
        for leaf in self.leaves:
            leaf.requires_grad_(kind != "forward")
        if kind == "forward":
            return torch.no_grad()(self.forward)
        cotangent = torch.randn_like(self.output, requires_grad=False)
        return lambda: self.forward().backward(cotangent)

    def clear(self) -> None:
        """Forget gradients, so that the next backward does not spend time on adding to them."""
        for leaf in self.leaves:
            leaf.grad = None


class Clocked(Workload):
    """In place of a pass: what has a clock of its own, as a training loop has. `measure()` returns
    the milliseconds and the MiB of a point."""

    def __init__(self, measure: Callable[[], tuple[float, float]]) -> None:
        super().__init__(lambda: torch.empty(0), [], torch.empty(0))
        self.measure = measure

    def ready(self, kind: Pass) -> Callable[[], object]:
        return self.measure


# The case is the benchmark's own kind of case.
Build = Callable[[Any, torch.device], Workload]


@dataclass(frozen=True)
class Contender:
    """A name, how it is called in tables and figures, and how to build it.

    `package` is what it cannot do without; where it is not installed, it is skipped.
    """

    name: str
    label: str
    build: Build
    devices: tuple[str, ...] = ("cpu", "cuda")
    package: str | None = None

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


class Contenders(dict[str, Contender]):
    """A registry, filled by decorating builders."""

    def register(
        self,
        name: str,
        label: str,
        devices: tuple[str, ...] = ("cpu", "cuda"),
        package: str | None = None,
    ) -> Callable[[Build], Build]:
        def register(build: Build) -> Build:
            self[name] = Contender(name, label, build, devices, package)
            return build

        return register


@dataclass(frozen=True)
class Job:
    """A case and the contenders that are measured on it, side by side, in each pass."""

    case: Case
    contenders: tuple[str, ...]
    passes: tuple[Pass, ...] = PASSES


@dataclass(frozen=True)
class Settings:
    """How measuring is done. Points are comparable only under the same settings."""

    device: str
    threads: int
    # CPU: contenders take turns, round by round, until `seconds` have passed or `rounds` are done,
    # but at least twice.
    rounds: int = 7
    seconds: float = 60.0
    # CUDA: milliseconds spent on warming up and on measuring, per point.
    warmup_ms: int = 25
    rep_ms: int = 60

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Point:
    """One measurement. `error` stands in place of the numbers where there are none.

    `ms` is the time of the pass. Where it was captured as a CUDA graph that is the device's own,
    each sample after a rest; `busy_ms` is that without rests, at whatever clock the chip keeps
    then, and `eager_ms` that of the same call made from Python.
    """

    case: Any
    contender: str
    kind: Pass
    ms: float | None = None
    mib: float | None = None
    eager_ms: float | None = None
    busy_ms: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Claim:
    """A number, what it should be, and what was measured (None: not measured yet)."""

    text: str
    target: float
    measured: float | None
    at_least: bool = True
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def our_backend(device: torch.device) -> str:
    """Named, not "auto", so that a missing kernel is an error and never a slow number. Only on a
    CPU without a compiler `blocked` is all there can be."""
    from longspan.ops.window import native

    if device.type == "cuda":
        return "triton"
    return "native" if native.unavailable() is None else "blocked"


def ratio(over: float | None, under: float | None) -> float | None:
    """None unless both were measured."""
    return None if over is None or not under else over / under


class Suite(Protocol):
    """The jobs of a run, what the targets need first; `lengths` narrows it where given."""

    def __call__(
        self, *, device: str, dtype: str, quick: bool, lengths: Sequence[int] | None
    ) -> list[Job]: ...


@dataclass(frozen=True)
class Benchmark:
    """Everything that one benchmark has of its own."""

    name: str
    case: type[Case]
    contenders: Mapping[str, Contender]
    suite: Suite
    settings: Mapping[str, Any]  # where they differ from the defaults of `Settings`
    quick_settings: Mapping[str, Any]
    source: tuple[str, ...]  # the code whose change makes earlier points worthless
    claims: Callable[[Results], Iterable[Claim]]  # the targets, judged from a results file alone
    tables: Callable[[Results], Iterable[Table]]
    draw: Callable[[Results, Path], list[Path]]
    # What is computed on the CPU rather than timed, kept in that device's file beside the points;
    # told whether quick.
    findings: Callable[[bool], dict[str, Any]] | None = None

    def jobs(
        self,
        *,
        device: str,
        dtype: str,
        quick: bool = False,
        lengths: Sequence[int] | None = None,
        only: Sequence[str] = (),
    ) -> list[Job]:
        """The suite, narrowed to what this device can run and to `only`, where given."""

        def wanted(name: str) -> bool:
            one = self.contenders[name]
            return device in one.devices and one.installed and (not only or name in only)

        jobs = self.suite(device=device, dtype=dtype, quick=quick, lengths=lengths)
        jobs = [replace(job, contenders=tuple(filter(wanted, job.contenders))) for job in jobs]
        return [job for job in jobs if job.contenders]


BENCHMARKS = ("attention", "models", "led", "lm", "family", "finetuning")


def find(name: str) -> Benchmark:
    """The benchmark of that name, imported only now: it builds on all that is beside this."""
    if name not in BENCHMARKS:
        raise ValueError(f"no benchmark is called {name!r}; there are {', '.join(BENCHMARKS)}")
    return import_module(f"longspan.bench.{name}").BENCHMARK
