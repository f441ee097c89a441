"""The benchmark of training steps: who is measured, and what is made of it."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.made_up import make_results, pick
from rich.console import Console

from longspan.bench.benchmark import OUT_OF_MEMORY, Pass, Point
from longspan.bench.lm import BENCHMARK
from longspan.bench.lm.cases import LMCase
from longspan.bench.lm.claims import claims
from longspan.bench.lm.contenders import CONTENDERS
from longspan.bench.lm.figure import draw
from longspan.bench.report import show
from longspan.bench.store import Results

CPU = torch.device("cpu")
CASE = LMCase(
    tokens=96, batch=2, layers=2, hidden=32, heads=2, feed_forward=64, window=32, dtype="float32"
)


def loss(name: str, case: LMCase) -> float:
    found: Any = CONTENDERS[name].build(case, CPU).ready("forward")()
    return float(found)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_the_same_model() -> None:
    assert loss("flex", CASE) == pytest.approx(loss("longspan", CASE), rel=1e-5)
    wide = replace(CASE, window=16 * CASE.tokens)  # every layer sees everything
    assert loss("longspan", wide) == pytest.approx(loss("dense", wide), rel=1e-5)
    assert loss("longspan", CASE) != pytest.approx(loss("dense", CASE), rel=1e-5)
    with pytest.raises(ValueError, match="no dilation"):
        CONTENDERS["flex"].build(replace(CASE, dilated=1), CPU)


@pytest.mark.parametrize("name", ["longspan", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_updates_the_weights(name: str, dtype: str) -> None:
    workload = CONTENDERS[name].build(replace(CASE, dtype=dtype, dilated=1), CPU)
    before = [weight.detach().clone() for weight in workload.leaves]
    step = workload.ready("forward+backward")
    step()
    changed = [not torch.equal(a, b) for a, b in zip(before, workload.leaves, strict=True)]
    assert all(changed)
    assert all(weight.dtype == torch.float32 for weight in workload.leaves)
    assert all(weight.grad is None for weight in workload.leaves)


def test_the_model_is_of_the_size_that_is_claimed() -> None:
    from longspan.bench.lm.contenders import _decoder, _windows

    case = LMCase(tokens=8192)
    assert (min(case.windows), max(case.windows)) == (64, 1024)
    with torch.device("meta"):
        size = _decoder(case, _windows(case)).num_parameters()
    assert 40e6 < size <= 41e6


def made_up(device: str = "cuda", *, quick: bool = False) -> Results:
    """Steps that take as long as they have characters; dense attention fails at 32,768."""

    def point(case: LMCase, name: str, kind: Pass) -> Point:
        if name == "dense" and case.tokens >= 32_768:
            return Point(case, name, kind, error=OUT_OF_MEMORY)
        slow = {"longspan": 1.0, "flex": 1.6}.get(name, 3.0)
        ms = slow * case.tokens * case.batch / 1300 * (1.05 if case.tokens > 8192 else 1.0)
        return Point(case, name, kind, ms=ms, mib=slow * 10_000)

    return make_results("lm", device, point, quick=quick)


def test_claims() -> None:
    made = claims(made_up())
    assert [claim.met for claim in made] == [True, True, True]
    assert pick(made, "characters/s").measured == pytest.approx(1.3)
    assert pick(made, "speed over that").measured == pytest.approx(1 / 1.05)
    assert pick(made, "FlexAttention").measured == pytest.approx(1.6)
    empty = Results(made_up().header)
    assert [claim.met for claim in claims(empty)] == [None, None, None]
    assert claims(made_up("cpu")) == []


def test_the_table() -> None:
    console = Console(width=140, file=StringIO())
    show(made_up(), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "1,300,000" in text
    assert "no memory" in text
    assert "2 heads dilated" in text
    assert ">= 1.2M" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_figure(device: str, tmp_path: Path) -> None:
    written = draw(made_up(device), tmp_path / "a")
    assert [path.name for path in written] == ["a.png", "a.svg"]
    text = written[1].read_text()
    assert "Characters per second" in text
    assert "Peak memory" in text
    assert draw(Results(made_up().header), tmp_path / "b") == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_suites_name_each_point_once(device: str, quick: bool) -> None:
    jobs = BENCHMARK.jobs(device=device, dtype="float32", quick=quick)
    points = [(j.case, name, kind) for j in jobs for name in j.contenders for kind in j.passes]
    assert len(set(points)) == len(points) > 0
