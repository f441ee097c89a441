"""bench/tasks/closest.py orders HotpotQA's paragraphs, and says what is wrong with its input."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tasks.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parents[2] / "bench" / "tasks" / "closest.py"
ROW = {
    "question": "who laughs",
    "context": [["a", ["the cat"]], ["b", ["the dog"]], ["c", ["who laughs"]]],
    "supporting_facts": [["c", 0]],
}


@pytest.fixture
def closest(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The script as it would run in a process of its own."""

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return run


def test_some_paragraphs_are_kept(
    tmp_path: Path, closest: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    given, target = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    given.write_text(json.dumps(ROW) + "\n")
    source = tiny_checkpoint(tmp_path / "checkpoint", masked=False)
    closest(source, given, target, "--keep", 2)
    kept = json.loads(target.read_text())["context"]
    assert len(kept) == 2
    assert all(one in ROW["context"] for one in kept)
    assert "joint F1" not in capsys.readouterr().out
    lost = {**ROW, "answer": "the cow"}
    given.write_text("".join(json.dumps(row) + "\n" for row in (ROW | {"answer": "laughs"}, lost)))
    closest(source, given, target, "--keep", 2)
    # No title is an answer; one answer stands in a fact, the other nowhere.
    assert "without training 0.000, of all that is there 0.500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "does not exist"),
        ("", [], "no rows"),
        ('{"text": "a"}\n', [], "row 1: there is no 'question'"),
        (json.dumps(ROW), ["--keep", 0], "at least one paragraph"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path,
    closest: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    options: list,
    message: str,
) -> None:
    given = tmp_path / "rows.jsonl"
    if text is not None:
        given.write_text(text)
    with pytest.raises(SystemExit) as ended:
        closest("nowhere", given, tmp_path / "kept.jsonl", *options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
