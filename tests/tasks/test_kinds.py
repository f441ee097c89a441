"""One recipe with every kind of attention: the same but for that, resumable, and put in a table."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from tasks.finetuned import QUIET, labelled, recipe

import longspan
from longspan.analyze.arena import describe, draw, margin, markdown, rows, table
from longspan.bench.family.figure import COLOURS
from longspan.data import listops
from longspan.recipes import FINETUNING
from longspan.recipes.shrink import shrink_finetuning
from longspan.tasks import kinds
from longspan.tasks.finetune import finetune, make_task, read_metrics
from longspan.tasks.kinds import kinds_of, study
from longspan.train.recipe import change


def toy(tmp_path, **changes):
    """Bytes of texts with "cat" or "dog" in them, which any kind can learn."""
    settings = {
        "data.train": str(labelled(tmp_path / "animals.csv", words=4)),
        "data.columns": {"text": "body", "label": "animal"},
        "evaluation.every": 1,
        "log_every": 1,
    }
    made = shrink_finetuning(FINETUNING["lra-text"]())
    return change(made, settings | {k.replace("__", "."): v for k, v in changes.items()})


def test_a_new_model_learns_and_predicts(tmp_path):
    made = toy(
        tmp_path,
        updates=150,
        batch=16,
        warmup=20.0,
        learning_rate=5e-3,
        attention={"kind": "performer", "features": 16},
        model__new__config__hidden_size=32,
        evaluation__every=50,
        data__limit=0,
    )
    results = finetune(make_task(made), tmp_path / "run", console=QUIET)
    assert results["test"]["accuracy"] == 1.0
    use = longspan.pipeline(tmp_path / "run")
    assert use("the house cat was in")["label"] == "cat"
    assert use.model.config.attention[0] == {"kind": "performer", "features": 16}


def test_what_layers_ask_of_the_loss_is_learned_but_not_reported(tmp_path):
    """Routing's commitment: the same first loss, other weights after it."""
    losses, weights = [], []
    for cost in (0.0, 100.0):
        attention = {"kind": "routing", "clusters": 2, "size": 8, "commitment": cost}
        run = tmp_path / str(cost)
        finetune(make_task(toy(tmp_path, attention=attention)), run, console=QUIET)
        losses.append(next(one["loss"] for one in read_metrics(run) if "split" not in one))
        weights.append(longspan.pipeline(run).model.encoder.layers[0].attention.qkv.weight)
    assert losses[0] == losses[1]
    assert not torch.allclose(*weights)


def test_names_settings_and_layers():
    new = FINETUNING["lra-listops"]().model.new
    assert new is not None
    assert new.setting("performer") == {"kind": "performer"}
    assert new.setting("dense") == {"kind": "window", "window": 4000, "global_tokens": False}
    changed = new.setting({"kind": "linformer", "rank": 8})
    assert changed == {"kind": "linformer", "length": 2000, "rank": 8, "sharing": "layers"}
    made = change(FINETUNING["lra-listops"](), {"attention": "performer", "attention.features": 8})
    assert made.attention == {"kind": "performer", "features": 8}
    with pytest.raises(ValueError, match=r"attention\.features: there are 1, numbered from 0"):
        change(made, {"attention": ["window"], "attention.features": 8})
    assert [one["kind"] for one in new.setting(["window", "bigbird"])] == ["window", "bigbird"]


def test_every_kind_is_done_once(tmp_path, monkeypatch):
    made, out = toy(tmp_path), tmp_path / "out"
    result = study(made, out, ["performer", "dense"], QUIET)
    assert [arm.kind for arm in result.arms] == ["performer", "dense"]
    assert result.examples == 6
    for arm in result.arms:
        assert arm.updates == 2
        assert len(arm.curve) == 2
        assert arm.tokens_per_second > 0
        assert arm.peak_mib > 0
    monkeypatch.setattr(kinds, "finetune", None)
    assert study(made, out, ["performer", "dense"], QUIET) == result
    with pytest.raises(ValueError, match=r"other settings \(learning_rate"):
        study(replace(made, learning_rate=1.0), out, ["performer"], QUIET)
    with pytest.raises(ValueError, match="choose from window, linformer"):
        study(made, out, ["lstm"], QUIET)


def test_a_kind_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def sometimes(task, run, **options):
        if task.recipe.attention == "performer":
            raise RuntimeError("out of memory\nand more")
        return finetune(task, run, **options)

    monkeypatch.setattr(kinds, "finetune", sometimes)
    result = study(toy(tmp_path), tmp_path / "out", ["performer", "window"], QUIET)
    assert result.failed == {"performer": "out of memory"}
    found = describe(result)
    assert "- performer failed: out of memory" in markdown(found)
    assert [row[0] for row in rows(found)] == ["window"]


def test_kinds_side_by_side_are_what_they_are_alone(tmp_path):
    made, out = toy(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "bigbird").write_text("in the way")
    told = StringIO()
    console = Console(file=told, width=200)
    result = study(made, out, ["performer", "bigbird", "dense"], console, jobs=2)
    assert list(result.failed) == ["bigbird"]
    assert "there is a file in its place" in result.failed["bigbird"]
    assert told.getvalue().count("done") == 2
    alone = study(made, tmp_path / "alone", ["performer", "dense"], QUIET)
    for one, other in zip(result.arms, alone.arms, strict=True):
        assert (one.kind, one.valid, one.test) == (other.kind, other.valid, other.test)
        assert [at[::2] for at in one.curve] == [at[::2] for at in other.curve]
    assert "step 2" in (out / "dense.log").read_text()
    with pytest.raises(ValueError, match=r"other settings \(learning_rate"):
        study(replace(made, learning_rate=1.0), out, ["performer"], QUIET, jobs=2)


def test_interrupted_side_by_side_nobody_says_a_word(tmp_path):
    """Ctrl-C reaches every process of the terminal, those that have just begun, too."""
    command = ["study", "lra-listops", "--shrink", "--jobs", "2", "--only", "window"]
    command += ["--only", "dense", "--output", str(tmp_path / "out")]
    begun = subprocess.Popen(
        [sys.executable, "-m", "longspan", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "LONGSPAN_CACHE": str(tmp_path)},
    )
    assert begun.stdout is not None
    for line in begun.stdout:
        if "window: training" in line:
            break
    time.sleep(0.2)  # it imports what it needs
    os.killpg(begun.pid, signal.SIGINT)
    said, _ = begun.communicate(timeout=60)
    assert begun.returncode == 130
    assert said.strip() == "stopped; the same command goes on"


def test_tables_and_figure(tmp_path):
    found = describe(study(toy(tmp_path), tmp_path / "out", ["window", "poolingformer"], QUIET))
    for arm, test in zip(found["arms"], (0.5, 0.6432), strict=True):
        arm["test"] = test
    found["examples"] = 2000
    best, second = rows(found)
    assert best[:3] == ["poolingformer", "64.32", "2.10"]
    assert best[4] == ""  # not among those published
    assert second[4] == "62.85"
    assert margin(0.5, 2000) == pytest.approx(0.0219, abs=1e-4)
    text = markdown(found)
    assert "Tay et al." in text
    assert "| poolingformer | 64.32 |" in text
    Console(quiet=True).print(table(found))
    assert best[5].endswith("K")  # a toy, which has no millions
    assert [path.name for path in draw(found, tmp_path / "lra")] == ["lra.png", "lra.svg"]
    drawn = (tmp_path / "lra.svg").read_text().lower()
    assert all(COLOURS[name].lower() in drawn for name in ("window", "Poolingformer"))


def test_runs_that_shared_a_device_tell_no_times(tmp_path):
    result = study(toy(tmp_path), tmp_path / "out", ["window"], QUIET)
    apart, found = describe(result), describe(result, shared=True)
    assert "tokens/s" in markdown(apart)
    assert "tokens/s" not in markdown(found)
    assert "minutes" not in markdown(found)
    assert len(rows(found)[0]) == len(rows(apart)[0]) - 2
    assert "seconds" not in json.dumps(found)
    draw(found, tmp_path / "lra")
    # What the runs themselves say, not what puts them together.
    assert found["made"] == [result.arms[0].made]
    assert found["machine"] == result.arms[0].made["machine"]


def test_lists_are_compared_with_what_needs_no_attention(tmp_path):
    result = study(toy(tmp_path), tmp_path / "out", ["window"], QUIET)
    assert "first operator" not in markdown(describe(result))
    found = describe(replace(result, recipe="lra-listops"))
    made = listops.examples("test", result.examples)
    assert found["by_operator"] == listops.by_operator(made)
    assert f"first operator alone is right for {100 * found['by_operator']:.2f}%" in markdown(found)
    draw(found, tmp_path / "lists")
    assert "first operator" in (tmp_path / "lists.svg").read_text()


def test_what_cannot_be_chosen_is_named(tmp_path):
    with pytest.raises(ValueError, match="a checkpoint has its own"):
        make_task(recipe("classify", tmp_path, attention="performer"))
    with pytest.raises(ValueError, match="starts from nothing"):
        make_task(toy(tmp_path, model__source="somewhere"))
    with pytest.raises(ValueError, match="starts from a checkpoint"):
        kinds_of(FINETUNING["imdb"]())
    made, new = recipe("spans", tmp_path), FINETUNING["lra-text"]().model.new
    made = replace(made, model=replace(made.model, new=new, source=None))
    with pytest.raises(ValueError, match="spans starts from a checkpoint"):
        make_task(made)
    with pytest.raises(ValueError, match=r"layer 0: attention kind 'sparse' is for decoders"):
        make_task(toy(tmp_path, attention="sparse")).build()
