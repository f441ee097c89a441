"""Whether long context is needed: found where it is, not claimed where it is not."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tasks.finetuned import QUIET, all_splits, recipe, sentence

from longspan.analyze.comparison import draw, table
from longspan.models import presets
from longspan.tasks import compare as comparing
from longspan.tasks.compare import (
    CHUNKS,
    FIRST,
    GLOBAL,
    WINDOW,
    Contender,
    Interval,
    advise,
    compare,
    contenders,
    interval,
)
from longspan.tasks.finetune import make_task
from longspan.tasks.predict import Pipeline
from longspan.train.recipe import change


def animals(path, first, last, count=120):
    """Texts of 40 words whose label is the animal in one of the places from first to last."""
    random = np.random.default_rng(1)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["body", "animal"])
        for index in range(count):
            animal, made = ["cat", "dog"][index % 2], sentence(random, 40)
            made[random.integers(first, last)] = animal
            rows.writerow([" ".join(made), animal])
    return str(path)


def toy(tmp_path, first, last, **changes):
    settings = {"epochs": 10.0, "too_long": "split", "evaluation__every": 0, "measure": "accuracy"}
    settings |= {"model__length": 64, "data__test_share": 0.3} | changes
    return recipe(
        "classify", tmp_path, data__train=animals(tmp_path / "t.csv", first, last), **settings
    )


def test_what_stands_at_the_end_needs_long_context(tmp_path, monkeypatch):
    made, said = toy(tmp_path, 20, 40), []
    monkeypatch.setattr(presets.logger, "warning_once", said.append)
    result = compare(made, tmp_path / "out", short=16, console=QUIET)
    assert not said  # one of them has no global tokens, and is meant to; elsewhere it is warned of
    Pipeline(tmp_path / "out" / "long-window-only" / "seed-0")("the cat")
    assert ["no token is global" in one for one in said] == [True]
    scores = {one.name: one.score for one in result.contenders}
    assert scores[GLOBAL].value == 1.0
    assert scores[FIRST].value < 0.75
    assert result.gain.low > 0
    assert result.advice.startswith("Long context helps")
    assert result.long_share == 1.0
    kept = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [one["name"] for one in kept["contenders"]] == [FIRST, CHUNKS, WINDOW, GLOBAL]
    written = draw(result, tmp_path / "figure")
    assert [path.suffix for path in written] == [".png", ".svg"]
    assert "beyond 16 tokens" in written[1].read_text()
    assert table(result).row_count == 4
    measured = any(one.memory_mib is not None for one in result.contenders)
    assert ("memory" in [column.header for column in table(result).columns]) == measured

    def never(*_, **__):
        raise AssertionError("it trained again")

    monkeypatch.setattr(comparing, "finetune", never)
    assert compare(made, tmp_path / "out", short=16, console=QUIET) == result
    other = replace(made, data=replace(made.data, train=animals(tmp_path / "u.csv", 0, 10)))
    with pytest.raises(ValueError, match=r"was done with other settings \(data"):
        compare(other, tmp_path / "out", short=16, console=QUIET)


def test_contenders_differ_in_reading_alone(tmp_path):
    made = toy(tmp_path, 0, 5, overlap=10)
    found = contenders(made, 16)
    alike = {"model": made.model, "too_long": made.too_long, "overlap": made.overlap}
    assert all(replace(one, **alike) == made for one in found.values())
    short = found[CHUNKS]
    assert (short.model.length, short.model.window, short.too_long) == (16, 32, "split")
    assert short.overlap == 4
    assert (found[FIRST].too_long, found[FIRST].overlap) == ("head", 4)  # it must leave room
    assert (found[WINDOW].model.global_tokens, found[WINDOW].model.pooling) == ("none", "mean")
    assert found[GLOBAL] == made
    with pytest.raises(ValueError, match=r"short=64 must be .* below model\.length=64"):
        compare(made, tmp_path / "out", short=64, console=QUIET)


def test_answers_are_judged_at_the_threshold_of_validation(tmp_path):
    made = recipe("spans", tmp_path, too_long="split", epochs=1.0, model__length=64)
    result = compare(made, tmp_path / "out", short=24, console=QUIET)
    assert (made.measure, result.measure) == ("best_f1", "f1")
    for one in result.contenders:
        run = tmp_path / "out" / one.name.replace(", ", "-").replace(" ", "-") / "seed-0"
        results = json.loads((run / "results.json").read_text())
        assert one.by_seed == [pytest.approx(results["test"]["f1"])]


def test_what_cannot_be_read_is_said_before_training(tmp_path, monkeypatch):
    made = replace(toy(tmp_path, 0, 5, model__length=24), too_long="refuse")
    monkeypatch.setattr(comparing, "finetune", lambda *_, **__: pytest.fail("it trained"))
    with pytest.raises(ValueError, match="more than 22 tokens"):
        compare(made, tmp_path / "out", short=16, console=QUIET)


def mean(sheet):
    return float(sheet.mean())


def test_intervals_hold_what_they_say():
    """Of a mean, that of the normal approximation; of the same sheets, no difference at all."""
    random = np.random.default_rng(0)
    sheet = (random.random((400, 1)) < 0.8).astype(float)
    found = interval(mean, [sheet])
    assert found.value == sheet.mean()
    expected = 1.96 * np.sqrt(found.value * (1 - found.value) / 400)
    assert (found.high - found.low) / 2 == pytest.approx(expected, rel=0.1)
    assert interval(mean, [sheet], [sheet]) == Interval(0.0, 0.0, 0.0)
    better = sheet.copy()
    better[np.flatnonzero(sheet == 0)[:20]] = 1.0
    paired = interval(mean, [better], [sheet])
    assert paired.value == pytest.approx(0.05)
    assert 0 < paired.low < 0.05 < paired.high < 0.1


def test_questions_about_one_text_are_not_as_many_texts():
    """Ten questions with the same answer tell no more than one."""
    sheet = (np.random.default_rng(0).random((40, 1)) < 0.8).astype(float)
    tenfold = np.repeat(sheet, 10, axis=0)
    once = interval(mean, [sheet])
    assert interval(mean, [tenfold], about=np.repeat(np.arange(40), 10).tolist()) == once
    assert interval(mean, [tenfold]).high < once.high
    assert interval(mean, [sheet], about=["a contract"] * 40) == once  # all there is


@pytest.mark.parametrize("task", ["spans", "choice"])
def test_tasks_know_which_questions_share_a_text(task, tmp_path):
    made = recipe(task, tmp_path)
    assert made.data.train is not None
    rows = [json.loads(line) for line in Path(made.data.train).read_text().splitlines()]
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows for _ in range(2)))
    about = make_task(
        change(made, {key.replace("__", "."): value for key, value in all_splits(path).items()})
    ).about("test")
    assert (len(about), len(set(about))) == (2 * len(rows), len(rows))


def contender(name, value, seconds):
    own = Interval(value, value - 0.05, value + 0.05)
    return Contender(name, value, own, None, [value], seconds, 1.0, None)


@pytest.mark.parametrize(
    ("gain", "advice"),
    [
        (Interval(0.05, 0.01, 0.09), "Long context helps: take 'long, global', +0.050"),
        (Interval(-0.05, -0.09, -0.01), "Long context hurts: take 'chunk and pool'"),
        (Interval(0.01, -0.02, 0.04), "no difference: 'long, global' is +0.010"),
    ],
)
def test_advice(gain, advice):
    short, long = contender(CHUNKS, 0.80, 1.0), contender(GLOBAL, 0.81, 5.0)
    found = [contender(FIRST, 0.5, 0.5), short, long]
    said = advise(found, short, long, gain, 0.5, 512)
    assert advice in said
    assert "50% of the test examples have more than 512 tokens" in said
    if "no difference" in said:
        assert "'chunk and pool' is the cheapest" in said
        # Also where its own interval ends below the best score: the difference decides.
        low = replace(short, score=Interval(0.7, 0.6, 0.75))
        said = advise([found[0], low, long], low, long, gain, 0.5, 512)
        assert "'chunk and pool' is the cheapest" in said
