"""The benchmark of encoder-decoders: who is measured, what memory follows, what is made of it."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.made_up import make_results, pick
from rich.console import Console

from longspan.bench.benchmark import OUT_OF_MEMORY, Pass, Point
from longspan.bench.led import BENCHMARK, contenders
from longspan.bench.led.cases import STEP, LEDCase
from longspan.bench.led.claims import claims
from longspan.bench.led.contenders import CONTENDERS
from longspan.bench.led.figure import draw
from longspan.bench.led.memory import TERMS, fit
from longspan.bench.report import show
from longspan.bench.store import Results

CPU = torch.device("cpu")
CASE = LEDCase(
    tokens=64, target=12, layers=2, hidden=32, heads=2, vocab=50, window=16, dtype="float32"
)


def outcome(name: str, case: LEDCase) -> Any:
    return CONTENDERS[name].build(case, CPU).ready("forward")()


def test_all_are_the_same_model() -> None:
    case = replace(CASE, globals=3, batch=2)
    losses = {name: float(outcome(name, case)) for name in CONTENDERS}
    for loss in losses.values():
        assert loss == pytest.approx(losses["led"], rel=1e-5)
    texts = [outcome(name, replace(case, beams=3)) for name in CONTENDERS]
    assert texts[0].shape == (2, 13)
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_step_gives_gradients(name: str) -> None:
    workload = CONTENDERS[name].build(CASE, CPU)
    assert workload.waits == (name != "longspan")
    assert CONTENDERS[name].build(replace(CASE, beams=2), CPU).waits
    workload.ready("forward+backward")()
    assert all(leaf.grad is not None for leaf in workload.leaves)
    assert workload.resident == 4 * sum(leaf.numel() for leaf in workload.leaves)


def test_few_texts_are_clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    for name, value in (("memory_allocated", 4 * mib), ("max_memory_allocated", 6 * mib)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    asked: list[Any] = []
    ms, memory = contenders._clock(lambda *tokens: asked.append(tokens), mib)
    assert asked == [(1,), (), (), ()]
    assert ms >= 0
    assert memory == 3
    monkeypatch.setattr(contenders, "_ENOUGH", 1e-9)
    contenders._clock(lambda *tokens: asked.append(tokens), mib)
    assert asked[4:] == [(1,), ()]


def test_what_the_targets_need_comes_first() -> None:
    results = made_up()
    few = Results(results.header)
    for case, name, kind in list(results.points)[:5]:
        few.add(results.points[case, name, kind])
    judged = claims(few)
    assert len(judged) == 3
    assert all(claim.met is not None for claim in judged)
    # Then what memory follows.
    for key in list(results.points)[:14]:
        few.add(results.points[key])
    assert len(claims(few)) == 4


def test_the_model_is_led_base() -> None:
    """As many weights as allenai/led-base-16384 is published with: 162M."""
    from longspan.bench.led.contenders import _theirs

    model = _theirs(replace(LEDCase(tokens=16_384), target=1023), torch.device("meta"))
    assert 160e6 < model.num_parameters() < 163e6


def memory(case: LEDCase, name: str) -> float:
    """MiB: of ours without the scores, which are never formed."""
    scores = case.window * case.tokens + case.tokens * case.target + case.target**2
    return 500 + (case.tokens + case.target) / 20 + (scores / 2000 if name != "longspan" else 0)


def made_up(device: str = "cuda", *, quick: bool = False) -> Results:
    def point(case: LEDCase, name: str, kind: Pass) -> Point:
        if name == "led" and case.tokens > 16_384:
            return Point(case, name, kind, error=OUT_OF_MEMORY)
        factor = {"longspan": 1.0, "longspan-captured": 1.0, "led": 7.0}.get(name, 2.0)
        ms = case.tokens / 100 * factor
        mib = memory(case, name) / (1 if name == "longspan" else 0.5)
        return Point(case, name, kind, ms=ms / 2, mib=mib, eager_ms=ms)

    return make_results("led", device, point, quick=quick)


def test_what_memory_follows_is_found() -> None:
    base = LEDCase(tokens=16_384)
    cases = [case for case, _, kind in made_up().points if kind == STEP[0]]
    cases = list(dict.fromkeys(cases))
    assert base in cases
    found = fit({case: memory(case, "led") for case in cases})
    assert found is not None
    assert found.error < 1e-6
    assert found.factors["w n_s"] == pytest.approx(1 / 2000)
    assert found.factors["n_s n_t"] == pytest.approx(1 / 2000)
    assert found.factors["n_t^2"] == pytest.approx(1 / 2000)
    lean = fit({case: memory(case, "longspan") for case in cases})
    assert lean is not None
    assert lean(base) == pytest.approx(memory(base, "longspan"))
    assert lean.parts(base).get("n_s n_t", 0.0) == pytest.approx(0.0, abs=1e-3)
    assert fit(dict.fromkeys(cases[: len(TERMS)], 1.0)) is None
    noisy = fit({case: memory(case, "led") * (1.2 if case == base else 1) for case in cases})
    assert noisy is not None
    assert 0.05 < noisy.error < 0.2
    assert min(noisy.factors.values()) >= 0


def test_cuda_claims() -> None:
    made = claims(made_up())
    assert all(claim.measured is not None for claim in made), "the suite measures every target"
    speed = pick(made, "training step, captured: speed-up")
    assert speed.measured == pytest.approx(7.0)
    assert speed.met
    share = pick(made, "memory over")
    base = LEDCase(tokens=16_384)
    ours = memory(base, "longspan-captured")
    assert share.measured == pytest.approx(ours / memory(base, "led"))
    assert pick(made, "4 beams").measured == pytest.approx(7.0)
    assert pick(made, "error of the fit").met
    assert all(claim.met is None for claim in claims(Results(made_up().header)))


def test_cpu_claims() -> None:
    made = claims(made_up("cpu"))
    assert pick(made, "4,096 to 256, forward").measured == pytest.approx(7.0)
    assert pick(made, "2 layers x 256", "error of the fit").met


def test_tables_show_failures_and_what_memory_is_made_of() -> None:
    console = Console(width=160, file=StringIO())
    show(made_up(), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "6 + 6 layers x 768" in text
    assert "no memory" in text
    assert "generation" in text
    assert "by what they grow with" in text
    assert ">= 6x" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_the_figure(device: str, quick: bool, tmp_path: Path) -> None:
    written = draw(made_up(device, quick=quick), tmp_path / "a")
    assert [path.name for path in written] == ["a.png", "a.svg"]
    text = written[1].read_text()
    for title in ("Time of a training step", "peak memory, and the fit", "Generation"):
        assert title in text
    for term in ("What it grows with", "w n_s", "g n_s", "n_s n_t", "n_t²", "within 0%"):
        assert term in text
    assert draw(Results(made_up().header), tmp_path / "b") == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_suites_name_each_point_once(device: str, quick: bool) -> None:
    jobs = BENCHMARK.jobs(device=device, dtype="float32", quick=quick)
    points = [(j.case, name, kind) for j in jobs for name in j.contenders for kind in j.passes]
    assert len(set(points)) == len(points) > 0
