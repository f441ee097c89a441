"""What is made of attention's points: targets and figures; and the suites that measure them."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from bench.made_up import make_header, make_results, pick
from rich.console import Console

from longspan.bench.attention import BENCHMARK
from longspan.bench.attention.cases import AttentionCase
from longspan.bench.attention.claims import claims
from longspan.bench.attention.figure import draw
from longspan.bench.attention.tables import tables
from longspan.bench.benchmark import OUT_OF_MEMORY, PASSES, Pass, Point
from longspan.bench.store import Results


def linear_results() -> Results:
    """Times linear in n, where every rival takes twice as long as longspan."""

    def point(case: AttentionCase, name: str, kind: Pass) -> Point:
        if name == "eager" and case.tokens > 16_384:
            return Point(case, name, kind, error=OUT_OF_MEMORY)
        cost = case.tokens * (1 if name.startswith("longspan") else 2)
        return Point(case, name, kind, ms=cost / 1e3, mib=cost / 1e2)

    return make_results("attention", "cuda", point)


def test_cuda_claims() -> None:
    made = claims(linear_results())
    assert all(claim.measured is not None for claim in made), "the suite measures every target"
    window = pick(made, "window, n=65,536, forward:", "FlexAttention")
    assert window.measured == pytest.approx(2.0)
    assert window.met
    assert pick(made, "16 global, n=16,384, forward+backward", "Flex").met is False
    assert pick(made, "time per token", "forward+backward").measured == pytest.approx(1.0)
    assert pick(made, "layer", " 0 global, forward:").target == 25


def test_times_without_rests_have_tables_of_their_own() -> None:
    """Where a chip lowers its clock under load, ratios may be others than after rests."""
    results = linear_results()
    assert [str(table.title) for table in tables(results) if "rests" in str(table.title)] == []
    case = AttentionCase(tokens=16_384)
    for name, busy in (("longspan", 20.0), ("flex", 30.0)):
        results.add(Point(case, name, "forward", ms=16.0, mib=1.0, busy_ms=busy))
    (table,) = (table for table in tables(results) if "rests" in str(table.title))
    shown = StringIO()
    Console(width=120, file=shown).print(table)
    assert "1.50x" in shown.getvalue()
    assert table.row_count == 2


def test_worst_of_a_sweep_counts() -> None:
    results = linear_results()
    slow = AttentionCase(tokens=16_384, window=128)
    results.add(Point(slow, "longspan", "forward", ms=1e3, mib=1.0))
    assert pick(claims(results), "windows", "forward:").met is False
    del results.points[slow, "longspan", "forward"]
    assert pick(claims(results), "windows", "forward:").met is None


def test_cpu_claims() -> None:
    results = Results(make_header("cpu"))
    case = AttentionCase(tokens=4096, level="layer", dtype="float32")
    points = (
        ("longspan-blocked-layer", 10, 30),
        ("longspan-layer", 7, 16),
        ("longformer-layer", 29, 100),
    )
    for name, ms, mib in points:
        for kind in PASSES:
            results.add(Point(case, name, kind, ms=ms, mib=mib))
    many = replace(case, globals=16)
    results.add(Point(many, "longspan-layer", "forward", ms=8, mib=1))
    made = claims(results)
    blocked = [claim.met for claim in made if "`blocked`" in claim.text]
    assert blocked == [True, False, True, True]
    results.add(Point(replace(case, threads=2), "longspan-layer", "forward", ms=4, mib=1))
    made = claims(results)
    native = [claim.met for claim in made if "`native`, layer, n=4,096, float32" in claim.text]
    assert native == [True, False, False, False, True, None, False, None]


def test_one_run_on_a_cpu_judges_every_target() -> None:
    def point(case: AttentionCase, name: str, kind: Pass) -> Point:
        return Point(case, name, kind, ms=1.0 / (case.threads or 1), mib=1.0)

    made = claims(make_results("attention", "cpu", point))
    assert all(claim.measured is not None for claim in made)
    for n, dtype in (("4,096", "float32"), ("16,384", "float32"), ("4,096", "bfloat16")):
        claim = pick(made, f"n={n}, {dtype}, forward: two threads")
        assert claim.measured == 2.0
        assert claim.met
    assert pick(made, "`native`", "n=16,384, bfloat16, forward:", "speed-up").target == 4.8


def test_figures_with_and_without_sweeps(tmp_path: Path) -> None:
    names = [path.name for path in draw(linear_results(), tmp_path / "a")]
    assert names == ["a.png", "a.svg", "a-sweeps.png", "a-sweeps.svg"]
    single = Results(make_header())
    single.add(Point(AttentionCase(tokens=512), "longspan", "forward", ms=1.0, mib=1.0))
    assert [path.name for path in draw(single, tmp_path / "b")] == ["b.png", "b.svg"]
    assert draw(Results(make_header()), tmp_path / "c") == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_suites_name_each_case_once(device: str, quick: bool) -> None:
    jobs = BENCHMARK.jobs(device=device, dtype="float32", quick=quick)
    assert len({job.case for job in jobs}) == len(jobs)
    for job in jobs:
        assert set(job.contenders) <= set(BENCHMARK.contenders)


def test_suite_can_be_narrowed() -> None:
    jobs = BENCHMARK.jobs(device="cuda", dtype="float16", lengths=[4096], only=["flex"])
    assert {job.contenders for job in jobs} == {("flex",)}
    assert jobs[0].case == replace(AttentionCase(tokens=4096), dtype="float16")
