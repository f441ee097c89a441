"""The page of the family says what the results files say."""

from pathlib import Path

import pytest
from bench.made_up import make_results

from longspan.analyze.family import BEGIN, END, ROWS, render, write
from longspan.bench.benchmark import OUT_OF_MEMORY, Pass, Point
from longspan.bench.family.cases import DECODERS, ENCODERS, FamilyCase
from longspan.train.checkpoint import write_json

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    page = ROOT / "docs" / "results" / "family.md"
    copy = tmp_path / "family.md"
    copy.write_text(page.read_text(encoding="utf8"), encoding="utf8")
    write(copy, ROOT / "bench" / "results")
    assert copy.read_text(encoding="utf8") == page.read_text(encoding="utf8"), (
        "run: python -m longspan.analyze.family docs/results/family.md bench/results"
    )


def test_every_kind_has_its_row() -> None:
    assert {*ENCODERS, *DECODERS} <= set(ROWS)


def test_what_was_measured_comes_in_by_itself(tmp_path: Path) -> None:
    def point(case: FamilyCase, name: str, kind: Pass) -> Point:
        if name == "dense" and case.tokens > 100_000:
            return Point(case, name, kind, error=OUT_OF_MEMORY)
        if name == "transformers-bigbird":
            return Point(case, name, kind, ms=1.0, mib=2.0, eager_ms=8.0)
        return Point(case, name, kind, ms=4.0, mib=2.0)

    make_results("family", "cuda", point).save(tmp_path / "family-cuda.json")
    text = {"examples": 2000, "arms": [{"kind": "bigbird", "test": 0.625}]}
    write_json(tmp_path / "lra-text.json", text)
    run = {"name": "causal-bp", "bits_per_character": {"valid": 1.75}}
    write_json(tmp_path / "causal.json", {"runs": [run]})
    made = render(tmp_path).splitlines()
    (big, beside) = (line for line in made if line.startswith("| BigBird |  |"))
    assert "| 62.5 |" in big
    assert "|  | 36.05 | 62.5 ± 2.1 | 64.02 |" in beside
    assert "| Synthesizer |  | 36.99 |  | 61.68 |" in made
    assert "| 4 / 2 |" in big
    assert any(line.startswith("| BP, causal |") and "| 1.750 |" in line for line in made)
    assert any(line.startswith("| dense, SDPA |") and "out of memory" in line for line in made)
    # Called from Python, as ours is; no graph's time.
    assert any("transformers BigBird | 0.50" in line for line in made)


def test_a_folder_without_results_leaves_the_page_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nmeasured\n{END}\n")
    with pytest.raises(ValueError, match=r"has none of family-cpu\.json"):
        write(page, tmp_path / "elsewhere")
    assert "measured" in page.read_text()


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n")
    with pytest.raises(ValueError, match=END):
        write(page, tmp_path)
