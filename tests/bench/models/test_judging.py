"""What is made of the models' points: targets, tables, figures; and the suites behind them."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from bench.made_up import make_results, pick
from rich.console import Console

from longspan.bench.benchmark import OUT_OF_MEMORY, Pass, Point
from longspan.bench.models import BENCHMARK
from longspan.bench.models.cases import ModelCase
from longspan.bench.models.claims import claims
from longspan.bench.models.figure import draw
from longspan.bench.report import show
from longspan.bench.store import Results

TOKENS_PER_MS = {
    "longspan": 2000.0,
    "longspan-captured": 2000.0,
    "longspan-unpadded": 1900.0,
    "longspan-patch": 1200.0,
}


def steady_results(device: str = "cuda", *, quick: bool = False) -> Results:
    """Time and memory in proportion to the tokens that are looked at, a step taking three times
    as long; dense attention runs out of memory at 65,536."""

    def point(case: ModelCase, name: str, kind: Pass) -> Point:
        if name in ("roberta", "modernbert") and case.tokens >= 65_536:
            return Point(case, name, kind, error=OUT_OF_MEMORY)
        tokens = case.real_tokens if name == "longspan-unpadded" else case.places
        ms = tokens / TOKENS_PER_MS.get(name, 200.0) * (1 if kind == "forward" else 3)
        return Point(case, name, kind, ms=ms, mib=tokens / 10, eager_ms=2 * ms)

    return make_results("models", device, point, quick=quick)


def test_cuda_claims() -> None:
    made = claims(steady_results())
    assert all(claim.measured is not None for claim in made), "the suite measures every target"
    speed = pick(made, "16,384 x 2, forward:")
    assert speed.measured == pytest.approx(2.0)
    assert speed.met
    # The lean one is not among the fast here, and is judged by itself.
    assert pick(made, "lean, 4,096 x 8", "tokens/s").met is False
    memory = [claim for claim in made if "peak memory" in claim.text]
    assert [claim.target for claim in memory] == [14, 14, 100]
    assert memory[0].measured == pytest.approx(6553.6 * 2**20 / 1e9)
    assert memory[2].met is False
    assert pick(made, "512 x 64, forward, captured:").measured == pytest.approx(0.1)
    assert pick(made, "patched", "forward+backward").measured == pytest.approx(6.0)


def test_cpu_claims() -> None:
    made = claims(steady_results("cpu"))
    assert pick(made, "speed-up over transformers Longformer").measured == pytest.approx(10.0)
    assert pick(made, "speed-up of bfloat16").measured == pytest.approx(0.1)
    assert pick(made, "speed-up of int8").met is False


def test_an_uneven_batch_is_judged_by_its_tokens() -> None:
    results = steady_results()
    (case,) = {case for case, name, _ in results.points if name == "longspan-unpadded"}
    claim = pick(claims(results), "unpadded", "forward:")
    assert claim.measured == pytest.approx(2000 / 1900)
    assert claim.met
    padded = results.get(case, "longspan", "forward")
    assert padded is not None
    results.add(replace(padded, contender="longspan-unpadded"))
    claim = pick(claims(results), "unpadded", "forward:")
    assert claim.measured == pytest.approx(case.places / case.real_tokens)
    assert not claim.met


def test_tables_show_tokens_per_second_and_failures() -> None:
    console = Console(width=160, file=StringIO())
    show(steady_results(), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "2,000,000" in text
    assert "no memory" in text
    assert ">= 1.8M" in text
    assert "<= 14 GB" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_figures(device: str, quick: bool, tmp_path: Path) -> None:
    written = draw(steady_results(device, quick=quick), tmp_path / "a")
    assert [path.name for path in written] == ["a.png", "a.svg"]
    text = written[1].read_text()
    assert "Tokens per second, forward" in text
    assert "uneven length" in text
    assert ("out of memory" in text) == (device == "cuda" and not quick)


def test_no_figure_of_nothing(tmp_path: Path) -> None:
    assert draw(Results(steady_results().header), tmp_path / "a") == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_suites_name_each_point_once(device: str, quick: bool) -> None:
    jobs = BENCHMARK.jobs(device=device, dtype="float32", quick=quick)
    points = [
        (job.case, name, kind) for job in jobs for name in job.contenders for kind in job.passes
    ]
    assert len(set(points)) == len(points)
    assert {name for _, name, _ in points} <= set(BENCHMARK.contenders)


def test_suite_can_be_narrowed() -> None:
    jobs = BENCHMARK.jobs(device="cuda", dtype="bfloat16", lengths=[65_536], only=["roberta"])
    assert [job.case.tokens for job in jobs] == [65_536]
    assert jobs[0].contenders == ("roberta",)
    assert not BENCHMARK.jobs(device="cpu", dtype="float32", only=["longspan-lean"])
