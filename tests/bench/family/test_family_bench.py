"""The benchmark of the family: every mechanism is there, runs, and is judged by its growth, and
beside others; and those that approximate softmax attention come close to it."""

import pickle
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.made_up import make_results, pick
from rich.console import Console

from longspan.bench.benchmark import PASSES, Contender, Pass, Point, find
from longspan.bench.family.cases import (
    BESIDE_DECODERS,
    BESIDE_ENCODERS,
    DECODERS,
    ENCODERS,
    MATCHED,
    QUADRATIC,
    FamilyCase,
)
from longspan.bench.family.claims import claims
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.family.errors import APPROXIMATE, DOCUMENTS, measure_errors, relative_error
from longspan.bench.family.figure import draw
from longspan.bench.family.rivals import RIVALS
from longspan.bench.labels import _spread
from longspan.bench.report import show
from longspan.bench.store import Results
from longspan.layers.registry import ATTENTION, CAUSAL_ATTENTION

CASE = FamilyCase(tokens=40, hidden=32, heads=2, reach=16, dtype="float32")


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_runs(name: str, kind: Pass) -> None:
    if not CONTENDERS[name].installed:
        pytest.skip(f"{CONTENDERS[name].package} is not installed")
    case = replace(
        CASE, tokens=64 if name in RIVALS else 40, causal=name in DECODERS + BESIDE_DECODERS
    )
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
    assert {*BESIDE_ENCODERS, *BESIDE_DECODERS} == {*RIVALS, *MATCHED}
    assert {rival.ours for rival in RIVALS.values()} <= {*ENCODERS, *DECODERS, *MATCHED}


def test_what_is_not_installed_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(CONTENDERS["transformers-bigbird"], package="no_such_package")
    assert not absent.installed
    assert Contender("a", "a", absent.build).installed
    monkeypatch.setitem(CONTENDERS, "transformers-bigbird", absent)
    jobs = find("family").jobs(device="cpu", dtype="float32")
    named = {name for job in jobs for name in job.contenders}
    assert "bigbird" in named
    assert "transformers-reformer" in named
    assert "transformers-bigbird" not in named


def test_long_documents_on_a_cpu_are_for_what_can_read_them() -> None:
    named = {"cpu": set(), "cuda": set()}
    for device, names in named.items():
        for job in find("family").jobs(device=device, dtype="float32"):
            if job.case.tokens == 262_144:
                names.update(job.contenders)
    ours = {*ENCODERS, *DECODERS}
    assert named["cpu"] == ours - {*QUADRATIC}
    assert named["cuda"] > ours


_JUDGED = ("time", "memory")


def made_up(power: float) -> Results:
    def point(case: FamilyCase, name: str, kind: Pass) -> Point:
        return Point(case, name, kind, ms=(case.tokens / 1000) ** power, mib=float(case.tokens))

    return make_results("family", "cuda", point)


@pytest.mark.parametrize(("power", "met"), [(1.0, True), (2.0, False)])
def test_growth_is_judged(power: float, met: bool) -> None:
    judged = [claim for claim in claims(made_up(power)) if not claim.text.startswith("our")]
    by_what = [{claim.met for claim in judged if f": {w} at" in claim.text} for w in _JUDGED]
    assert by_what == [{met}, {True}]


def test_the_worst_length_beside_a_rival_counts() -> None:
    def point(case: FamilyCase, name: str, kind: Pass) -> Point:
        slow = name == "bigbird" and case.tokens == 4096
        return Point(case, name, kind, ms=1.5 if slow else 1.0, mib=1.0)

    made = claims(make_results("family", "cuda", point))
    worst = pick(made, "our BigBird", "transformers BigBird", "backward")
    assert worst.measured == 1.5
    assert "4,096 tokens" in worst.text
    assert not worst.met


def test_names_are_moved_apart() -> None:
    given = np.array([0.0, 1.0, 1.5, 40.0])
    moved = _spread(given, 10.0)
    assert np.diff(moved).min() >= 10.0 - 1e-9
    assert moved[-1] == 40.0
    assert moved[:3].mean() == pytest.approx(given[:3].mean())


def test_names_stay_within_the_frame() -> None:
    assert _spread(np.array([0.0, 1.0, 2.0]), 10.0, 0.0, 50.0).tolist() == [0.0, 10.0, 20.0]
    assert _spread(np.array([48.0, 49.0]), 10.0, 0.0, 50.0).tolist() == [40.0, 50.0]
    crowded = _spread(np.arange(9.0), 10.0, 0.0, 50.0)
    assert np.diff(crowded).min() >= 10.0


def test_errors_vanish_where_nothing_is_left_out() -> None:
    """A window over all, a key for each token: that is softmax attention itself."""
    whole = {"window": 128, "linformer": 64, "blockwise": 64, "bp": 128}
    whole |= {"clusterformer": 64, "reformer": 512, "routing": 64}
    assert {*whole, "performer", "bigbird"} == set(APPROXIMATE)
    for name, budget in whole.items():
        for documents in DOCUMENTS.values():
            assert relative_error(APPROXIMATE[name](budget, 64), 64, documents, 0) < 1e-12, name
    few, many = (
        relative_error(APPROXIMATE["performer"](m, 64), 64, DOCUMENTS["alike"], 0)
        for m in (8, 4096)
    )
    assert many < few / 3


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    return measure_errors(quick=True)


def test_errors_by_budget(errors: dict[str, Any]) -> None:
    found = errors["errors"]
    assert {one["mechanism"] for one in found} == set(APPROXIMATE)
    assert set(APPROXIMATE) <= set(CONTENDERS)
    for name in APPROXIMATE:
        # Features do not estimate large scores.
        documents = "weakly scored" if name == "performer" else "unrelated"
        own = [e["error"] for e in found if (e["mechanism"], e["documents"]) == (name, documents)]
        assert len(own) == 5
        assert own[-1] < own[0] * (0.5 if name == "performer" else 1.0)


def test_tables_and_figure(tmp_path: Path, errors: dict[str, Any]) -> None:
    results = made_up(1.0)
    results.header |= errors
    console = Console(width=160, file=StringIO())
    show(results, console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "Encoder layer, forward + backward" in text
    assert "BigBird" in text
    assert "Error against softmax attention, 256 alike tokens" in " ".join(text.split())
    assert "transformers BigBird" in text
    assert [path.name for path in draw(results, tmp_path / "family")] == [
        *("family.png", "family.svg"),
        *("family-errors.png", "family-errors.svg"),
    ]
