"""Results files, the targets computed from them, and the suites that fill them."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from longspan.bench.cases import PASSES, Case, suite
from longspan.bench.claims import Claim, claims
from longspan.bench.contenders import CONTENDERS
from longspan.bench.figure import draw

from longspan.bench.measure import OUT_OF_MEMORY, Point, Settings
from longspan.bench.store import Results, load, resume


def make_header(device: str = "cuda", **changes: object) -> dict[str, object]:
    return {
        "machine": "1x Imaginary",
        "versions": {"torch": "0.0"},
        "source": "abc",
        "settings": Settings(device, threads=1).as_dict(),
        **changes,
    }


def linear_results() -> Results:
    """Times linear in n, where every rival takes twice as long as longspan."""
    results = Results(make_header())
    for job in suite(device="cuda", dtype="bfloat16"):
        for name in job.contenders:
            for kind in PASSES:
                if name == "eager" and job.case.tokens > 16_384:
                    point = Point(job.case, name, kind, error=OUT_OF_MEMORY)
                else:
                    cost = job.case.tokens * (1 if name.startswith("longspan") else 2)
                    point = Point(job.case, name, kind, ms=cost / 1e3, mib=cost / 1e2)
                results.add(point)
    return results


def find(made: list[Claim], *words: str) -> Claim:
    (claim,) = [c for c in made if all(word in c.text for word in words)]
    return claim


def test_cuda_claims() -> None:
    made = claims(linear_results())
    assert all(claim.measured is not None for claim in made), "the suite measures every target"
    window = find(made, "window, n=65,536, forward:", "FlexAttention")
    assert window.measured == pytest.approx(2.0)
    assert window.met
    assert find(made, "16 global, n=16,384, forward+backward", "Flex").met is False
    assert find(made, "time per token", "forward+backward").measured == pytest.approx(1.0)
    assert find(made, "layer", " 0 global, forward:").target == 25


def test_worst_of_a_sweep_counts() -> None:
    results = linear_results()
    slow = Case(tokens=16_384, window=128)
    results.add(Point(slow, "longspan", "forward", ms=1e3, mib=1.0))
    assert find(claims(results), "windows", "forward:").met is False
    del results.points[slow, "longspan", "forward"]
    assert find(claims(results), "windows", "forward:").met is None


def test_cpu_claims() -> None:
    results = Results(make_header("cpu"))
    case = Case(tokens=4096, level="layer", dtype="float32")
    for name, ms, mib in (("longspan-layer", 10, 30), ("longformer-layer", 29, 100)):
        for kind in PASSES:
            results.add(Point(case, name, kind, ms=ms, mib=mib))
    made = claims(results)
    assert [claim.met for claim in made] == [True, False, True, True]


def test_save_and_load(tmp_path: Path) -> None:
    results, path = linear_results(), tmp_path / "deep" / "attention-cuda.json"
    results.save(path)
    again = load(path)
    assert again.points == results.points
    assert again.header["machine"] == "1x Imaginary"


def test_save_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while writing leaves the earlier file whole, and nothing beside it."""
    path = tmp_path / "attention-cuda.json"
    results = linear_results()
    results.save(path)
    before = path.read_bytes()

    def crash(*arguments: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="full"):
        results.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_resume_only_what_is_comparable(tmp_path: Path) -> None:
    path = tmp_path / "attention-cuda.json"
    linear_results().save(path)
    same, why = resume(path, make_header())
    assert same.points
    assert why is None
    other, why = resume(path, make_header(source="changed"))
    assert not other.points
    assert why is not None
    assert "source" in why
    # What cannot be gone on from is kept.
    assert load(tmp_path / "attention-cuda.1.json").points.keys() == same.points.keys()
    path.write_text("{")
    broken, why = resume(path, make_header())
    assert not broken.points
    assert why is not None
    assert "damaged" in why
    assert (tmp_path / "attention-cuda.2.json").read_text() == "{"


def test_failures_are_tried_again() -> None:
    results, case = Results(make_header()), Case(tokens=512)
    results.add(Point(case, "flex", "forward", error="RuntimeError: no"))
    results.add(Point(case, "eager", "forward", error=OUT_OF_MEMORY))
    assert not results.done(case, "flex", "forward")
    assert results.done(case, "eager", "forward")


def test_figures_with_and_without_sweeps(tmp_path: Path) -> None:
    names = [path.name for path in draw(linear_results(), tmp_path / "a")]
    assert names == ["a.png", "a.svg", "a-sweeps.png", "a-sweeps.svg"]
    single = Results(make_header())
    single.add(Point(Case(tokens=512), "longspan", "forward", ms=1.0, mib=1.0))
    assert [path.name for path in draw(single, tmp_path / "b")] == ["b.png", "b.svg"]
    assert draw(Results(make_header()), tmp_path / "c") == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_suites_name_each_case_once(device: str, quick: bool) -> None:
    jobs = suite(device=device, dtype="float32", quick=quick)
    assert len({job.case for job in jobs}) == len(jobs)
    for job in jobs:
        assert set(job.contenders) <= set(CONTENDERS)


def test_suite_can_be_narrowed() -> None:
    jobs = suite(device="cuda", dtype="float16", lengths=[4096], only=["flex"])
    assert {job.contenders for job in jobs} == {("flex",)}
    assert jobs[0].case == replace(Case(tokens=4096), dtype="float16")
