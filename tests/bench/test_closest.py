"""bench/tasks/closest.py orders HotpotQA's paragraphs, and says what is wrong with its input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tasks.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parents[2] / "bench" / "tasks" / "closest.py"
ROW = {
    "question": "who laughs",
    "context": [["a", ["the cat"]], ["b", ["the dog"]], ["c", ["who laughs"]]],
    "supporting_facts": [["c", 0]],
}


def closest(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_some_paragraphs_are_kept(tmp_path: Path) -> None:
    given, target = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    given.write_text(json.dumps(ROW) + "\n")
    source = tiny_checkpoint(tmp_path / "checkpoint", masked=False)
    done = closest(source, given, target, "--keep", 2)
    assert done.returncode == 0, done.stderr
    kept = json.loads(target.read_text())["context"]
    assert len(kept) == 2
    assert all(one in ROW["context"] for one in kept)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "does not exist"),
        ("", [], "no rows"),
        ('{"text": "a"}\n', [], "row 1: there is no 'question'"),
        (json.dumps(ROW), ["--keep", 0], "at least one paragraph"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str | None, options: list, message: str) -> None:
    given = tmp_path / "rows.jsonl"
    if text is not None:
        given.write_text(text)
    done = closest("nowhere", given, tmp_path / "kept.jsonl", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
