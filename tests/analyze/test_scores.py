"""Finetuned runs in one table."""

import json

import pytest
from typer.testing import CliRunner

from longspan.analyze.scores import collect, markdown
from longspan.cli import app


def finished(folder, seed, f1):
    """What `longspan train` leaves behind, as far as it is read."""
    folder.mkdir(parents=True)
    recipe = {
        "name": "classify",
        "measure": "f1",
        "seed": seed,
        "phases": [],
        "model": {"source": "/somewhere/else/model"},
        "data": {"train": "/somewhere/else/train.csv", "valid": None, "test": None},
    }
    recipe["data"]["split_seed"] = seed
    score = {"f1": f1, "loss": 1.0}
    results = {"checkpoint": "step-1", "valid": score, "test": score}
    results["notes"] = ["skipped: /somewhere/else/train.csv, line 3"]
    steps = [
        {"step": 1, "seconds": 60.0, "tokens": 5_000_000, "peak_mib": 2048.0},
        {"split": "valid"},
    ]
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))


@pytest.fixture
def runs(tmp_path):
    for seed, f1 in ((10, 0.5), (9, 0.7)):
        finished(tmp_path / "long" / f"seed-{seed}", seed, f1)
    finished(tmp_path / "short", 0, 0.4)
    return [tmp_path / "long", tmp_path / "short"]


def test_seeds_are_one_row(runs):
    long, short = collect(runs)
    assert [one["seed"] for one in long["seeds"]] == [9, 10]
    assert [one["split_seed"] for one in long["seeds"]] == [9, 10]
    assert "split_seed" not in long["recipe"]["data"]
    assert long["test"]["f1"]["mean"] == pytest.approx(0.6)
    assert long["test"]["f1"]["deviation"] == pytest.approx(0.2 / 2**0.5)
    assert short["test"]["f1"] == {"mean": 0.4, "deviation": 0.0}
    first, second = markdown([long, short]).splitlines()[2:]
    assert first == "| long | f1 | 0.6000 ± 0.1414 | 0.6000 ± 0.1414 | 2 | 5.0M | 2.0 | 1.0 |"
    assert second == "| short | f1 | 0.4000 | 0.4000 | 1 | 5.0M | 2.0 | 1.0 |"
    assert markdown([short], shared=True).splitlines()[2] == (
        "| short | f1 | 0.4000 | 0.4000 | 1 | 5.0M | 2.0 |"
    )


def test_no_threshold_is_chosen_on_test_examples(tmp_path):
    finished(tmp_path / "spans", 0, 0.4)
    for name, change in (
        ("recipe.json", {"measure": "best_f1"}),
        ("results.json", {"test": {"f1": 0.4, "best_f1": 0.9}}),
    ):
        path = tmp_path / "spans" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "| spans | f1 | 0.4000 |" in markdown(collect([tmp_path / "spans"]))


def test_no_folder_of_the_machine_is_kept(runs):
    assert "somewhere" not in json.dumps(collect(runs))
    assert collect(runs)[0]["recipe"]["data"]["train"] == "train.csv"
    assert collect(runs)[0]["seeds"][0]["notes"] == ["skipped: train.csv, line 3"]


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"empty has no results\.json"):
        collect([tmp_path / "empty"])


def test_command(runs, tmp_path):
    stem = tmp_path / "made" / "scores"
    shown = CliRunner().invoke(app, ["scores", *map(str, runs), "--output", str(stem)])
    assert shown.exit_code == 0, shown.output
    assert "0.6000 ± 0.1414" in shown.output
    for suffix in ("json", "md", "png", "svg"):
        assert (tmp_path / "made" / f"scores.{suffix}").stat().st_size > 0
    assert CliRunner().invoke(app, ["scores", str(tmp_path / "nothing")]).exit_code == 2
