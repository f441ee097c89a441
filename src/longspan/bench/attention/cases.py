"""What is measured of attention: single cases, and the suites made of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from longspan.bench.benchmark import Case, Job

Level = Literal["op", "layer"]

# The lengths for which targets on a CPU are set.
TARGETED = (4096, 16_384)


@dataclass(frozen=True)
class AttentionCase(Case):
    """One attention problem. An "op" case starts from q, k, v; a "layer" includes projections."""

    level: Level = "op"
    heads: int = 12
    head_dim: int = 64
    window: int = 512
    dilation: int = 1
    globals: int = 0

    def __str__(self) -> str:
        """The length, and what else differs from the paper's usual setting."""
        extras = [f"head size {self.head_dim}"] if self.head_dim != 64 else []
        extras += [f"window {self.window}"] if self.window != 512 else []
        extras += [f"dilation {self.dilation}"] if self.dilation != 1 else []
        extras += [f"{self.globals} global"] if self.globals else []
        extras += [f"{self.threads} threads"] if self.threads else []
        return ", ".join([f"n={self.tokens:,}", *extras])

    def small(self) -> "AttentionCase":
        return replace(self, tokens=64, window=min(self.window, 64), globals=min(self.globals, 1))


def _jobs(cases: Iterable[AttentionCase], *contenders: str) -> list[Job]:
    return [Job(case, contenders) for case in cases]


def gpu_suite(dtype: str, lengths: Sequence[int]) -> list[Job]:
    """Every target on a GPU. What the targets need comes first, in case the time runs out."""
    base = AttentionCase(tokens=16_384, dtype=dtype)
    layer = replace(base, level="layer")

    def at(case: AttentionCase, n: int, **changes: Any) -> AttentionCase:
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
    """Whole layers and the bare op on a CPU, against transformers and dense attention. What the
    targets need comes first; they are set for float32 and bfloat16, so a run in the former
    measures the latter too."""
    layers = [AttentionCase(tokens=n, level="layer", dtype=dtype) for n in lengths]
    jobs = []
    for kind in ("float32", "bfloat16") if dtype == "float32" else (dtype,):
        wanted = [replace(case, dtype=kind) for case in layers if case.tokens in TARGETED]
        with_globals = [replace(case, globals=16) for case in wanted]
        jobs += _jobs([*wanted, *with_globals], "longspan-layer", "longformer-layer")
        jobs += _jobs((replace(case, threads=2) for case in wanted), "longspan-layer")
    jobs += _jobs(layers, "longspan-layer", "longformer-layer", "sdpa-layer")
    jobs += _jobs(layers[:1], "longspan-blocked-layer")
    with_globals = [replace(case, globals=16) for case in layers if case.tokens <= 4096]
    jobs += _jobs(with_globals, "longspan-layer", "longformer-layer")
    ops = [replace(case, level="op") for case in layers if case.tokens <= 4096]
    jobs += _jobs(ops, "longspan", "sdpa")
    dilated = [replace(case, dilation=d) for case in ops[-1:] for d in (2, 4)]
    return _merge(jobs + _jobs(dilated, "longspan"))


def quick_suite(dtype: str, lengths: Sequence[int]) -> list[Job]:
    """The demo: one layer against transformers' and dense attention's, at a few lengths."""
    cases = [AttentionCase(tokens=n, level="layer", dtype=dtype) for n in lengths]
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
    *, device: str, dtype: str, quick: bool = False, lengths: Sequence[int] | None = None
) -> list[Job]:
    """The jobs of one run, at `lengths` where given."""
    kind = "quick" if quick else ("gpu" if device == "cuda" else "cpu")
    make = {"quick": quick_suite, "gpu": gpu_suite, "cpu": cpu_suite}[kind]
    return make(dtype, lengths or LENGTHS[kind])
