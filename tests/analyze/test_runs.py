"""Runs side by side: the numbers are those of the runs, and all of them get drawn."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from longspan.analyze import runs as side_by_side
from longspan.analyze.run_figures import _interesting, _looks, draw, markdown, rows
from longspan.analyze.runs import Probe, measure, read_results
from longspan.recipes import find
from longspan.recipes.shrink import shrink
from longspan.tasks.charlm import CharLM
from longspan.tasks.runs import carry_out, load_model, open_run
from longspan.train.recipe import change

QUIET = Console(quiet=True)
PROBE = Probe(limit=200, rows=3, longest=32, tokens=20, start=8, step=8)
NAMES = ("rival-longformer", "rival-xl")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "novels.jsonl"
    words = np.random.default_rng(0).choice(["a", "fox", "and", "the", "dog", "sees"], 12_000)
    lines = [json.dumps({"text": " ".join(part)}) for part in np.split(words, 40)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recipes = [
        change(shrink(find(name), steps=4), {"data.path": str(text), "evaluation.every": 2})
        for name in NAMES
    ]
    assert carry_out(recipes, folder, QUIET) == {}
    return [folder / name for name in NAMES]


@pytest.fixture(scope="module")
def found(runs):
    return measure(runs, PROBE)


def test_numbers_are_those_of_the_runs(found, runs):
    assert [run["name"] for run in found["runs"]] == list(NAMES)
    for of_run, folder in zip(found["runs"], runs, strict=True):
        run = open_run(folder)
        model = load_model(run.checkpoint)
        scores = CharLM(run.recipe).evaluate(model, "test", 200)
        assert of_run["bits_per_character"]["test"] == scores["bits_per_character"]
        assert of_run["parameters"] == sum(p.numel() for p in model.parameters())
        assert of_run["step"] == 4
        assert of_run["characters"] == 4 * 2 * 12
        assert [entry["step"] for entry in of_run["curve"]["valid"]] == [2, 4]
        assert [entry["step"] for entry in of_run["curve"]["train"]] == [1, 2, 3, 4]
        assert [context for context, _ in of_run["bits_by_context"]] == [8, 16, 24, 32]
        assert set(of_run["recl"]) == {"0.1", "0.5", "1.0"}
        assert set(of_run["recl"].values()) <= {8, 16, 24, 32}
        assert of_run["characters_per_second"] > 0
    json.dumps(found)


def test_runs_measured_apart_are_joined(found, runs, tmp_path):
    """By what was written into their folders; checkpoints and text may be elsewhere by then."""
    copies = [tmp_path / folder.name for folder in runs]
    for folder, copy in zip(runs, copies, strict=True):
        copy.mkdir()
        (copy / "measured.json").write_bytes((folder / "measured.json").read_bytes())
    said = []
    assert measure(copies, Probe(), say=said.append) == found
    assert said == [f"{name}: measured before" for name in NAMES]
    known = json.loads((copies[1] / "measured.json").read_text())
    for commit, whole in (("abc", "abc"), (None, None)):
        for copy in copies:
            own = json.loads((copy / "measured.json").read_text()) | {"commit": commit}
            (copy / "measured.json").write_text(json.dumps(own))
        assert measure(copies, Probe())["commit"] == whole
    known["probe"]["limit"] += 1
    (copies[1] / "measured.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match="rival-xl was measured by"):
        measure(copies, Probe())


def test_a_run_is_measured_again_by_another_probe(runs):
    said = []
    other = replace(PROBE, limit=100)
    for _ in range(2):
        assert measure(runs[:1], other, say=said.append)["probe"]["limit"] == 100
    measure(runs[:1], PROBE)
    *stages, last = said
    assert last == f"{NAMES[0]}: measured before"
    assert stages[0] == f"{NAMES[0]}: bits per character, valid"
    assert f"{NAMES[0]}: the loss of 20 bytes, 16 of 32 before each" in stages


def test_positions_are_averaged_in_doubling_bins(monkeypatch):
    class Model:
        pass

    # As if byte i of a row cost i nats.
    monkeypatch.setattr(
        side_by_side,
        "row_nats",
        lambda model, rows, segment: torch.arange(rows.shape[1] - 1.0).expand(len(rows), -1),
    )
    model: object = Model()
    points = side_by_side._by_position(model, [np.zeros(11, np.uint8)] * 3, None)  # pyright: ignore
    means = [bits * np.log(2) for _, bits in points]
    assert means == pytest.approx([0.0, 1.0, 2.5, 5.5, 8.5])
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert side_by_side._by_position(model, [], None) == []  # pyright: ignore


def test_a_memory_is_read_in_segments(runs):
    """What stands further back than memory and segment of the only layers is not known."""
    run = open_run(runs[1])
    found = measure([runs[1]], replace(PROBE, tokens=0))["runs"][0]
    assert run.recipe.evaluation.kind == "streamed"
    assert found["recl"] == {}
    assert found["bits_by_context"] == []
    assert found["bits_by"]["position"]


def test_it_is_drawn_and_tabulated(found, tmp_path):
    written = draw(found, tmp_path / "a")
    names = {path.name for path in written if path.suffix == ".svg"}
    assert names == {"a-curves.svg", "a-positions.svg", "a-context.svg"}
    assert "RECL" in (tmp_path / "a-context.svg").read_text()
    table = rows(found)
    scores = [float(row[2]) for row in table]
    assert scores == sorted(scores)
    assert markdown(found).count("\n") == 2 + len(NAMES)


def test_many_runs_look_different(found):
    many = [{**found["runs"][0], "name": f"run-{place}"} for place in range(30)]
    assert len(set(_looks({"runs": many}).values())) == 30


def test_the_first_context_tried_is_a_bound(found, tmp_path):
    ends = zip(found["runs"], (8, 16), strict=True)
    runs = [{**run, "recl": {"0.1": length}} for run, length in ends]
    made = {**found, "runs": runs}
    assert {row[5] for row in rows(made)} == {"≤ 8", "16"}
    draw(made, tmp_path / "a")
    assert ">≤ 8<" in (tmp_path / "a-context.svg").read_text()
    assert all(row[1].endswith("K") for row in rows(made))  # toys, which have no millions


def test_toys_have_axes_of_whole_numbers(found, tmp_path):
    draw(found, tmp_path / "a")
    drawn = (tmp_path / "a-curves.svg").read_text()
    assert "seconds of training" in drawn
    ticks = drawn.split('id="axes_2"')[1].split('id="matplotlib.axis_4"')[0]
    shown = [text.split("<")[0] for text in re.findall(r">([^<>]+)</text>", ticks)]
    assert shown[-1] == "characters read"
    assert all(text.isdecimal() for text in shown[:-1])


def test_what_was_not_measured_is_not_drawn(runs, tmp_path):
    found = measure(runs, replace(PROBE, tokens=0, longest=100_000))
    written = draw(found, tmp_path / "a")
    assert {path.name for path in written} == {"a-curves.png", "a-curves.svg"}
    assert rows(found)[0][5] == ""
    assert "RECL" not in markdown(found)


@pytest.mark.parametrize(
    ("name", "pictures", "columns"),
    [
        ("books", {"curves"}, "test | characters/s | peak GiB | steps | minutes |"),
        ("windows", {"curves"}, "paper | peak GiB | steps |"),
        ("rivals", {"curves", "positions", "context"}, "test | RECL | characters/s |"),
    ],
)
def test_committed_results_are_drawn_from_their_files(name, pictures, columns, tmp_path):
    results = Path(__file__).parents[2] / "bench" / "results"
    found = read_results(results / f"{name}.json")
    written = draw(found, tmp_path / name)
    endings = (".png", ".svg")
    assert {p.name for p in written} == {f"{name}-{one}{e}" for one in pictures for e in endings}
    assert {p.name for p in written} == {p.name for p in results.glob(f"{name}-*")}
    table = markdown(found)
    assert f"| bits/char, valid | {columns}" in table
    for run in found["runs"]:
        shown = (run["name"], f"{run['parameters'] / 1e6:.2f}M", run["bits_per_character"]["valid"])
        assert "| {} | {} | {:.4f} |".format(*shown) in table


def test_evaluations_are_within_the_picture(found):
    early = [{**run, "step": 100} for run in found["runs"]]
    for run in early:
        losses = np.linspace(2.0, 1.0, 100)
        train = [{"step": i + 1, "bits_per_character": b} for i, b in enumerate(losses)]
        valid = [{"step": step, "bits_per_character": b} for step, b in ((2, 9.0), (20, 3.0))]
        run["curve"] = {"train": train, "valid": valid}
    low, high = _interesting({"runs": early})
    assert low < 1.0
    assert 3.0 < high < 4.0  # all but what lies in the first tenth
    for run in early:
        run["curve"]["valid"] = []
    assert _interesting({"runs": early})[1] < 2.2


def test_what_cannot_be_compared_is_named(runs, text, tmp_path):
    with pytest.raises(ValueError, match="names, which repeat"):
        measure([runs[0], runs[0]], PROBE)
    said = []  # nothing is measured before all are known to be runs
    fresh = Probe(limit=100, rows=1, longest=16, tokens=0, start=8, step=8)
    with pytest.raises(ValueError, match="holds no run"):
        measure([runs[0], tmp_path], fresh, say=said.append)
    assert not said
    with pytest.raises(ValueError, match="rows=0"):
        Probe(rows=0)
    other = tmp_path / "other.jsonl"
    other.write_text(text.read_text().replace("fox", "cat"))
    recipe = change(shrink(find("rival-dense")), {"data.path": str(other)})
    carry_out([recipe], tmp_path, QUIET)
    with pytest.raises(ValueError, match="not trained on the text of rival-longformer"):
        measure([runs[0], tmp_path / "rival-dense"], PROBE)
