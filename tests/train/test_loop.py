"""The loop: it learns, and a run that was killed goes on to the same losses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from train.small import CORPUS, QUIET, TEXT, Interrupting, StoppedError, losses, weights
from typer.testing import CliRunner

from longspan.cli import app
from longspan.data.text import Source
from longspan.models import LongspanForCausalLM
from longspan.recipes import find
from longspan.recipes.shrink import shrink
from longspan.tasks.charlm import CharLM
from longspan.train import checkpoint, loop
from longspan.train.loop import train
from longspan.train.pace import Pace
from longspan.train.recipe import Recipe, change

# A window model with staged phases, dropout, Muon and parts; one with memories; and those whose
# layers keep centroids, or random vectors that change, beside their weights.
KINDS = {
    "window": "enwik8-small",
    "compressive": "compressive-enwik8",
    "muon": "books",
    "routing": "books",
    "performer": "books",
}
LAYERS = {
    "routing": {"kind": "routing", "clusters": 3, "size": 4, "decay": 0.5},
    "performer": {"kind": "performer", "features": 8, "redraw": 2},
}


def recipe(kind="window", steps=4, **changes) -> Recipe:
    small = shrink(find(KINDS[kind]), steps=steps)
    if kind in LAYERS:
        small = replace(small, model={**small.model, "attention": LAYERS[kind]})
    settings = {
        "model.hidden_dropout_prob": 0.2,
        "save_every": 3,
        "accumulate": 2,
        "data.kind": "python",
    }
    return change(small, settings | changes)


def go(made, run, corpus=CORPUS, **options):
    return train(made, CharLM(made, corpus), run, console=QUIET, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_runs_lose_nothing(kind, tmp_path):
    """Same losses, same weights, in every kind of model, across the borders of phases."""
    made = recipe(kind, steps=6 if KINDS[kind] == "books" else 4)
    go(made, tmp_path / "whole")
    broken = Interrupting(made, CORPUS)
    broken.stop_at = 10  # of two calls per step: in step 5, after the checkpoint of step 3
    with pytest.raises(StoppedError):
        train(made, broken, tmp_path / "broken", console=QUIET)
    assert max(losses(tmp_path / "broken")) == 4
    found = go(made, tmp_path / "broken", resume=True)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    one, two = (weights(tmp_path / name) for name in ("whole", "broken"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert found["bits_per_character"] > 0


def test_memories_are_for_as_many_processes(tmp_path):
    made = recipe("compressive", save_every=1)
    broken = Interrupting(made, CORPUS)
    broken.stop_at = 6
    with pytest.raises(StoppedError):
        train(made, broken, tmp_path, console=QUIET)
    folder = checkpoint.find(tmp_path)
    assert folder is not None
    shutil.copy(folder / "state-0.safetensors", folder / "state-1.safetensors")
    with pytest.raises(ValueError, match="memories of 2 processes: resume it with as many, not 1"):
        go(made, tmp_path, resume=True)


def test_what_a_kill_left_unfinished_is_not_built_upon(tmp_path):
    """A file of an earlier attempt must not end up in a checkpoint."""
    made = recipe("window", steps=1, save_every=1)
    broken = Interrupting(made, CORPUS)
    broken.stop_at = 4
    with pytest.raises(StoppedError):
        train(made, broken, tmp_path, console=QUIET)
    torn = checkpoint.unfinished(checkpoint.folder_of(tmp_path, made.steps))
    torn.mkdir()
    (torn / "state-1.safetensors").write_bytes(b"half of it")
    go(made, tmp_path, resume=True)
    last = checkpoint.folder_of(tmp_path, made.steps)
    assert checkpoint.find(tmp_path) == last
    assert not (last / "state-1.safetensors").exists()


def test_a_file_may_be_written_by_several_processes(tmp_path, monkeypatch):
    """As by the arms of a study that run side by side."""
    path, rename = tmp_path / "found.json", os.replace

    def overtaken(source, target):
        monkeypatch.setattr(os, "replace", rename)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        checkpoint.write_text(target, "the other's")
        rename(source, target)

    monkeypatch.setattr(os, "replace", overtaken)
    checkpoint.write_text(path, "mine")
    assert path.read_text() == "mine"
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_has_one_process_at_a_time(tmp_path):
    """Also where the other was thought to be dead, and is about to write a checkpoint."""
    made = recipe("window", steps=1, save_every=1)
    go(made, tmp_path)
    torn = checkpoint.unfinished(checkpoint.folder_of(tmp_path, 99))
    torn.mkdir()
    script = (
        "import sys; from pathlib import Path; from longspan.train import checkpoint\n"
        "with checkpoint.claim(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == b"mine"
        with pytest.raises(ValueError, match="another process is training in"):
            go(made, tmp_path, resume=True)
        assert torn.exists()
        other.kill()
    go(made, tmp_path, resume=True)
    assert not torn.exists()


def test_a_run_that_is_older_than_a_setting_goes_on(tmp_path):
    made = recipe("window", steps=1)
    go(made, tmp_path)
    known = checkpoint.read_json(tmp_path / "recipe.json")
    del known["minutes"]
    checkpoint.write_json(tmp_path / "recipe.json", known)
    go(made, tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"other settings \(minutes\)"):
        go(replace(made, minutes=5.0), tmp_path, resume=True)


@pytest.mark.slow
def test_killed_it_goes_on(tmp_path):
    """A process that gets no chance to clean up, killed while it trains."""
    data = tmp_path / "text"
    data.write_bytes(TEXT.tobytes())
    asked = ["train", "enwik8-small", "--shrink", "--data", str(data)]
    asked += ["--set", "phases.0.steps=40", "--set", "save_every=5"]
    run = tmp_path / "killed"
    command = [sys.executable, "-m", "longspan", *asked, "--output", str(run)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(_steps(run)) < 7:
        assert time.monotonic() < deadline
        assert child.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert len(_steps(run)) < 48
    for name in (run, tmp_path / "whole"):
        _longspan(*asked, "--output", str(name), *(["--resume"] if name == run else []))
    assert losses(run) == losses(tmp_path / "whole")
    assert sorted(losses(run)) == list(range(1, 49))


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, monkeypatch):
    """Each takes half of every batch, memories included; together they are one run."""
    data = tmp_path / "text"
    data.write_bytes(TEXT.tobytes())
    asked = ["train", "compressive-enwik8", "--shrink", "--data", str(data)]
    asked += ["--set", "model.hidden_dropout_prob=0.0"]
    asked += ["--set", "model.attention_probs_dropout_prob=0.0"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _longspan(*asked, "--output", str(tmp_path / "one"))
    subprocess.run(
        [sys.executable, *launch, "-m", "longspan", *asked, "--output", str(tmp_path / "two")],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one == pytest.approx(two, rel=1e-4)
    folder = checkpoint.find(tmp_path / "two")
    assert folder is not None
    rows = [checkpoint.load_tensors(folder / f"state-{n}.safetensors") for n in range(2)]
    assert rows[0]["0/1"].shape == rows[1]["0/1"].shape
    assert not torch.equal(rows[0]["0/1"], rows[1]["0/1"])


def _longspan(*arguments: str) -> None:
    """The command, in this process."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"


def _steps(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_it_learns(tmp_path):
    made = recipe(
        "muon",
        steps=100,
        **{
            "phases.0.learning_rate": 0.01,
            "phases.0.batch": 8,
            "phases.0.length": 48,
            "model.hidden_dropout_prob": 0.0,
        },
    )
    found = go(made, tmp_path / "run")
    assert losses(tmp_path / "run")[1] > 5.0
    assert found["bits_per_character"] < 2.5


@pytest.mark.parametrize("kind", ["window", "routing"])
def test_parts_add_up_to_the_batch(kind, tmp_path):
    """One step in two parts is the step in one, also in what layers take in."""
    for parts in (1, 2):
        made = recipe(kind, steps=1, **{"accumulate": parts, "model.hidden_dropout_prob": 0.0})
        made = replace(made, phases=made.phases[:1])
        go(made, tmp_path / str(parts))
    one, two = (weights(tmp_path / name) for name in "12")
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert losses(tmp_path / "1")[1] == pytest.approx(losses(tmp_path / "2")[1], rel=1e-5)


def test_phases_set_the_windows(tmp_path):
    made = recipe("window", steps=1)
    go(made, tmp_path / "run")
    folder = checkpoint.find(tmp_path / "run")
    model = LongspanForCausalLM.from_pretrained(folder)
    assert tuple(s["left"] for s in model.config.attention) == made.phases[-1].windows


def test_checkpointing_and_bf16_run(tmp_path):
    made = recipe("window", steps=1, checkpointing=True, precision="bf16")
    assert go(made, tmp_path / "run")["bits_per_character"] < 9
    assert {t.dtype for t in weights(tmp_path / "run").values()} == {torch.float32}


def test_samples_and_metrics_are_written(tmp_path):
    made = recipe("window", steps=2, sample_every=4)
    go(made, tmp_path / "run")
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples] == [4, 8]
    assert json.loads(samples[0])["text"].startswith("the quick brown fox")
    entry = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert entry["bits_per_character"] == pytest.approx(entry["loss"] / np.log(2))
    assert entry["tokens_per_second"] > 0
    assert entry["gradient_norm"] > 0


class Board:
    """Stands in for TensorBoard's writer."""

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step = folder, purge_step
        self.scalars, self.texts, self.closed = [], [], False
        BOARDS.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, float(value), step))

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def close(self):
        self.closed = True


BOARDS: list[Board] = []


def test_tensorboard_gets_what_is_written(tmp_path, monkeypatch):
    writer = ModuleType("writer")
    monkeypatch.setattr(writer, "SummaryWriter", Board, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", writer)
    go(recipe("window", steps=1, sample_every=2), tmp_path / "run")
    board = BOARDS.pop()
    assert board.folder == str(tmp_path / "run" / "tensorboard")
    assert board.purge_step == 1
    assert board.closed
    shown = {(name, step): value for name, value, step in board.scalars}
    for step, loss in losses(tmp_path / "run").items():
        assert shown["train/loss", step] == loss
    assert ("valid/bits_per_character", 5) in shown
    assert [step for _, _, step in board.texts] == [2, 4]


def test_the_real_tensorboard_writes_a_file(tmp_path):
    pytest.importorskip("tensorboard")
    go(recipe("window", steps=1), tmp_path / "run")
    assert [*(tmp_path / "run" / "tensorboard").glob("events.*")]


def test_only_the_last_and_the_best_checkpoint_are_kept(tmp_path):
    made = recipe("window", steps=2, **{"save_every": 1, "evaluation.every": 3})
    go(made, tmp_path / "run")
    last, best = (checkpoint.find(tmp_path / "run", which) for which in ("last", "best"))
    assert last is not None
    assert best is not None
    assert checkpoint.progress(last)["step"] == made.steps
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {last.name, best.name}


def test_an_unfinished_checkpoint_is_ignored(tmp_path):
    made = recipe("window", steps=1)
    go(made, tmp_path / "run")
    last = checkpoint.find(tmp_path / "run")
    torn = checkpoint.unfinished(checkpoint.folder_of(tmp_path / "run", 99))
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half of it")
    assert checkpoint.find(tmp_path / "run") == last
    assert checkpoint.find(tmp_path / "none") is None


def test_nothing_is_pickled(tmp_path):
    go(recipe("compressive", steps=2), tmp_path / "run")
    endings = {path.suffix for path in (tmp_path / "run" / "checkpoints").rglob("*.*")}
    assert endings <= {".json", ".safetensors"}


def test_folders_are_guarded(tmp_path):
    made = recipe("window", steps=1)
    with pytest.raises(ValueError, match="no run to resume"):
        go(made, tmp_path / "run", resume=True)
    go(made, tmp_path / "run")
    with pytest.raises(ValueError, match="--resume goes on"):
        go(made, tmp_path / "run")
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        go(change(made, {"seed": 5}), tmp_path / "run", resume=True)
    (tmp_path / "file").write_text("")
    for taken in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="a file in its place"):
            go(made, taken)


def test_what_the_model_refuses_leaves_no_run(tmp_path, monkeypatch):
    """The same folder serves for the command that is right; a begun run stays one."""
    made, run = recipe("window", steps=4), tmp_path / "run"

    def refused(**options):
        with monkeypatch.context() as broken:
            broken.setattr(CharLM, "build", lambda _: int("an odd window"))
            with pytest.raises(ValueError, match="an odd window"):
                go(made, run, **options)

    refused()
    made = change(made, {"seed": 5})
    broken = Interrupting(made, CORPUS)
    broken.stop_at = 2  # in the first step, before anything is saved
    with pytest.raises(StoppedError):
        train(made, broken, run, console=QUIET)
    refused(resume=True)
    go(made, run, resume=True)


def test_a_run_that_fails_after_its_start_stays_one(tmp_path, monkeypatch):
    made, run = recipe("window", steps=4), tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(CharLM, "loss", lambda *_: int("a damaged file"))
        with pytest.raises(ValueError, match="a damaged file"):
            go(made, run)
    go(made, run, resume=True)


def test_what_cannot_run_is_said_before_it_does(tmp_path):
    made = recipe("window", steps=1)
    with pytest.raises(ValueError, match="cannot be cut into 4 equal parts"):
        go(change(made, {"accumulate": 4}), tmp_path / "run")
    with pytest.raises(ValueError, match=r"model\.hiden_size is unknown; did you mean hidden_size"):
        CharLM(change(made, {"model.hiden_size": 8}), CORPUS)
    with pytest.raises(ValueError, match="too few for segments"):
        CharLM(made, CORPUS._replace(train=TEXT[:20]))
    with pytest.raises(ValueError, match=r"phases\.0\.steps=0"):
        CharLM(change(made, {"phases.0.steps": 0}), CORPUS)
    with pytest.raises(ValueError, match="--data PATH"):
        CharLM(replace(made, data=Source("file")))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model.hidden_size", "abc", "model.hidden_size='abc': expected int"),
        ("model.vocab_size", 10, "there are 256 bytes"),
        ("model.attention.0.lft", 4, "model: layer 0: .* did you mean left"),
        ("phases.1.windows", [1, 2, 3], "phases.1.windows: 3 windows for 2 layers"),
        ("phases.0.warmup", -1, "phases.0.warmup=-1"),
        ("optimizer.betas", [2.0, 0.9], "optimizer: Invalid beta"),
        ("evaluation.attention.memry", 4, "evaluation.attention: layer 0: .* no option 'memry'"),
        ("evaluation.stride", 17, "evaluation.stride=17: from 1 to evaluation.length=16"),
        ("evaluation.length", 0, "evaluation.length=0"),
        ("evaluation.batch", 0, "evaluation.batch=0"),
        ("evaluation.limit", -1, "evaluation.limit=-1"),
        ("save_every", -1, "save_every=-1"),
    ],
)
def test_what_would_fail_late_is_said_at_once(setting, value, message):
    with pytest.raises(ValueError, match=message):
        CharLM(change(recipe("window", steps=1), {setting: value}), CORPUS)


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path):
    made = recipe("muon", steps=8, **{"phases.0.learning_rate": 1e18, "optimizer.clip": 0.0})
    with pytest.raises(FloatingPointError, match="lower learning rate"):
        go(made, tmp_path / "run")


def test_compiling_is_not_training(tmp_path, monkeypatch):
    """After steps in which torch compiled a graph the clock is set back to before them."""
    compiled = iter([0, 0, 0, 0, 1, 1, 1])  # in the third step
    monkeypatch.setattr(loop, "_graphs", lambda: next(compiled))
    set_back, real = [], Pace.go

    def note(self, seconds=None):
        if seconds is not None:
            set_back.append(self.step)
        real(self, seconds)

    monkeypatch.setattr(Pace, "go", note)
    go(recipe("muon", steps=4, accumulate=1, save_every=0), tmp_path)
    assert set_back == [0, 2]  # the first step of a phase may always compile
