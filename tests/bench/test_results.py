"""Results files: written whole, read back, continued where they can be."""

import os
from pathlib import Path

import pytest
from bench.made_up import make_header

from longspan.bench.attention.cases import AttentionCase
from longspan.bench.benchmark import OUT_OF_MEMORY, PASSES, Case, Point, find
from longspan.bench.models.cases import ModelCase
from longspan.bench.store import Results, load, resume


def make_results(benchmark: str = "attention") -> Results:
    results = Results(make_header(benchmark=benchmark))
    cases: list[Case] = [AttentionCase(512), AttentionCase(1024, window=64)]
    if benchmark == "models":
        cases = [ModelCase(512), ModelCase(1024, shortest=64, checkpointing=True)]
    for case in cases:
        for kind in PASSES:
            results.add(Point(case, "longspan", kind, ms=1.25, mib=2.5, eager_ms=2.0, busy_ms=1.5))
    results.add(Point(cases[0], "sdpa", "forward", error=OUT_OF_MEMORY))
    return results


@pytest.mark.parametrize("name", ["attention", "models"])
def test_save_and_load(tmp_path: Path, name: str) -> None:
    results, path = make_results(name), tmp_path / "deep" / f"{name}-cuda.json"
    results.save(path)
    again = load(path)
    assert again.points == results.points
    assert again.header["machine"] == "1x Imaginary"
    assert again.benchmark is find(name)


def test_save_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while writing leaves the earlier file whole, and nothing beside it."""
    path = tmp_path / "attention-cuda.json"
    results = make_results()
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
    make_results().save(path)
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
    results, case = Results(make_header()), AttentionCase(tokens=512)
    results.add(Point(case, "flex", "forward", error="RuntimeError: no"))
    results.add(Point(case, "eager", "forward", error=OUT_OF_MEMORY))
    assert not results.done(case, "flex", "forward")
    assert results.done(case, "eager", "forward")


def test_an_unknown_benchmark_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    Results(make_header(benchmark="others")).save(path)
    with pytest.raises(ValueError, match="no benchmark is called 'others'"):
        load(path)


def test_a_file_without_points_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text('{"runs": []}')
    with pytest.raises(ValueError, match="it has no 'points'"):
        load(path)
