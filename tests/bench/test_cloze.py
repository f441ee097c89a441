"""bench/tasks/cloze.py makes questions whose answers stand where it says."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "tasks" / "cloze.py"
CONTEXT = [
    ["Anna Smith (singer)", ["Anna Smith was born in Rome.", " She left in 1971 for New York."]],
    ["Old Songs", ["Old Songs is a record by Anna Smith.", " It came out on May 3, 1990."]],
    ["Rivers", ["rivers flow."]],
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_answers_stand_in_their_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, target = tmp_path / "rows.jsonl", tmp_path / "made.jsonl"
    given.write_text(json.dumps({"question": "not read", "context": CONTEXT}) + "\n")
    run(monkeypatch, given, target, "--count", 60, "--keep", 3)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(rows) == 60
    for row in rows:
        assert sorted(row["context"]) == sorted(CONTEXT)
        title, number = row["supporting_facts"][-1]
        assert row["answer"] in dict(CONTEXT)[title][number]
        assert row["answer"] not in row["question"]
    assert {row["answer"] for row in rows} == {
        *("Rome", "1971", "New York", "Anna Smith", "May 3, 1990")
    }
    # What is said of Anna Smith stands for her name.
    two = [row for row in rows if len(row["supporting_facts"]) == 2]
    assert two
    assert all(row["supporting_facts"][0] == ["Old Songs", 0] for row in two)
    assert all("Anna Smith" not in row["question"] for row in two)


def test_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "rows.jsonl"
    given.write_text(json.dumps({"context": CONTEXT[2:]}) + "\n")
    for options, message in (((), "names anything"), (("--keep", 1), "--keep at least 2")):
        with pytest.raises(SystemExit):
            run(monkeypatch, given, tmp_path / "made.jsonl", *options)
        assert message in capsys.readouterr().err
