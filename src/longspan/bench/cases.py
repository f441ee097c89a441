"""What is measured: single cases, and the suites made of them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Level = Literal["op", "layer"]
Pass = Literal["forward", "forward+backward"]
PASSES: tuple[Pass, ...] = ("forward", "forward+backward")


@dataclass(frozen=True)
class Case:
    """One attention problem. An "op" case starts from q, k, v; a "layer" includes projections."""

    tokens: int
    level: Level = "op"
    batch: int = 1
    heads: int = 12
    head_dim: int = 64
    window: int = 512
    dilation: int = 1
    globals: int = 0
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """The length, and what else differs from the paper's usual setting."""
        extras = [f"head size {self.head_dim}"] if self.head_dim != 64 else []
        extras += [f"window {self.window}"] if self.window != 512 else []
        extras += [f"dilation {self.dilation}"] if self.dilation != 1 else []
        extras += [f"{self.globals} global"] if self.globals else []
        return ", ".join([f"n={self.tokens:,}", *extras])

    def small(self) -> "Case":
        """The same at a size that costs nothing, to warm up with."""
        return replace(self, tokens=64, window=min(self.window, 64), globals=min(self.globals, 1))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """A case and the contenders that are measured on it, side by side, in both passes."""

    case: Case
    contenders: tuple[str, ...]


def _jobs(cases: Iterable[Case], *contenders: str) -> list[Job]:
    return [Job(case, contenders) for case in cases]


def gpu_suite(dtype: str, lengths: Sequence[int]) -> list[Job]:
    """Every target on a GPU. What the targets need comes first, in case the time runs out."""
    base = Case(tokens=16_384, dtype=dtype)
    layer = replace(base, level="layer")

    def at(case: Case, n: int, **changes: Any) -> Case:
        return replace(case, tokens=n, **changes)

    def by_length(n: int) -> list[Job]:
        flex = ["flex"] if n <= 262_144 else []
        dense = ["sdpa", "eager"] if n <= 65_536 else []
        jobs = _jobs([at(base, n)], "longspan", *flex, *dense)
        jobs += _jobs([at(base, n, globals=16)], "longspan", "longspan-unprepared", *flex)
        if n <= 65_536:
            jobs += _jobs([at(layer, n)], "longspan-layer", "longformer-layer", "sdpa-layer")
            jobs += _jobs([at(layer, n, globals=16)], "longspan-layer", "longformer-layer")
        return jobs

    jobs = [job for n in lengths[:2] for job in by_length(n)]
    jobs += _jobs((replace(base, dilation=d) for d in (2, 4)), "longspan")
    jobs += _jobs((replace(base, head_dim=d) for d in (32, 96, 128)), "longspan", "flex")
    windows = (64, 128, 256, 1024, 2048, 4096)
    jobs += _jobs((replace(base, window=w) for w in windows), "longspan", "flex")
    jobs += [job for n in lengths[2:] for job in by_length(n)]
    jobs += _jobs((replace(base, globals=g) for g in (1, 64, 256)), "longspan", "flex")
    return _merge(jobs)


def cpu_suite(dtype: str, lengths: Sequence[int]) -> list[Job]:
    """Whole layers and the bare op on a CPU, against transformers and dense attention."""
    layers = [Case(tokens=n, level="layer", dtype=dtype) for n in lengths]
    jobs = _jobs(layers, "longspan-layer", "longformer-layer", "sdpa-layer")
    with_globals = [replace(case, globals=16) for case in layers if case.tokens <= 4096]
    jobs += _jobs(with_globals, "longspan-layer", "longformer-layer")
    ops = [replace(case, level="op") for case in layers if case.tokens <= 4096]
    jobs += _jobs(ops, "longspan", "sdpa")
    dilated = [replace(case, dilation=d) for case in ops[-1:] for d in (2, 4)]
    return jobs + _jobs(dilated, "longspan")


def quick_suite(dtype: str, lengths: Sequence[int]) -> list[Job]:
    """The demo: one layer against transformers' and dense attention's, at a few lengths."""
    cases = [Case(tokens=n, level="layer", dtype=dtype) for n in lengths]
    return _jobs(cases, "longspan-layer", "longformer-layer", "sdpa-layer")


def _merge(jobs: Iterable[Job]) -> list[Job]:
    """One job per case, with the contenders of all jobs that named it."""
    merged: dict[Case, dict[str, None]] = {}
    for job in jobs:
        merged.setdefault(job.case, {}).update(dict.fromkeys(job.contenders))
    return [Job(case, tuple(names)) for case, names in merged.items()]


LENGTHS = {
    "gpu": (16_384, 65_536, 1_048_576, 4096, 262_144),
    "cpu": (4096, 1024, 2048, 8192, 16_384),
    "quick": (512, 1024, 2048, 4096),
}


def suite(
    *,
    device: str,
    dtype: str,
    quick: bool = False,
    lengths: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> list[Job]:
    """The jobs of one run, narrowed to `lengths` and to the contenders in `only` where given."""
    kind = "quick" if quick else ("gpu" if device == "cuda" else "cpu")
    make = {"quick": quick_suite, "gpu": gpu_suite, "cpu": cpu_suite}[kind]
    jobs = make(dtype, lengths or LENGTHS[kind])
    if only:
        jobs = [Job(job.case, tuple(c for c in job.contenders if c in only)) for job in jobs]
    return [job for job in jobs if job.contenders]
