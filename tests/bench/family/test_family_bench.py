"""The benchmark of the family: every mechanism is there, runs, and is judged by its growth."""

import pickle
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from bench.made_up import make_results
from rich.console import Console

from longspan.bench.benchmark import PASSES, Pass, Point
from longspan.bench.family.cases import DECODERS, ENCODERS, FamilyCase
from longspan.bench.family.claims import claims
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.family.figure import draw
from longspan.bench.report import show
from longspan.bench.store import Results
from longspan.layers.registry import ATTENTION, CAUSAL_ATTENTION

CASE = FamilyCase(tokens=40, hidden=32, heads=2, reach=16, dtype="float32")


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_runs(name: str, kind: Pass) -> None:
    case = replace(CASE, causal=name in DECODERS)
    workload = CONTENDERS[name].build(case, torch.device("cpu"))
    workload.ready(kind)()
    if kind == "forward+backward":
        assert all(leaf.grad is not None for leaf in workload.leaves)
    assert workload.forward().shape == workload.output.shape


def test_contenders_travel_to_another_process() -> None:
    for contender in CONTENDERS.values():
        pickle.loads(pickle.dumps(contender.build))


def test_no_mechanism_is_left_out() -> None:
    assert set(ATTENTION) <= set(ENCODERS)
    spoken = " ".join(DECODERS).replace("-", "_")
    missing = [kind for kind in CAUSAL_ATTENTION if kind not in spoken]
    assert missing == ["full", "xl", "compressive"]  # dense; and those of bench lm's studies


def made_up(power: float) -> Results:
    def point(case: FamilyCase, name: str, kind: Pass) -> Point:
        return Point(case, name, kind, ms=(case.tokens / 1000) ** power, mib=float(case.tokens))

    return make_results("family", "cuda", point)


@pytest.mark.parametrize(("power", "met"), [(1.0, {True}), (2.0, {False})])
def test_growth_is_judged(power: float, met: set[bool]) -> None:
    assert {claim.met for claim in claims(made_up(power))} == met


def test_tables_and_figure(tmp_path: Path) -> None:
    results = made_up(1.0)
    console = Console(width=160, file=StringIO())
    show(results, console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "Encoder layer, forward + backward" in text
    assert "BigBird" in text
    assert [path.name for path in draw(results, tmp_path / "family")] == [
        "family.png",
        "family.svg",
    ]
