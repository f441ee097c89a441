"""A run by the clock: phases, learning rates and endings follow the time, not the steps."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from longspan.data.text import Corpus
from longspan.recipes import find
from longspan.recipes.shrink import shrink
from longspan.tasks.charlm import CharLM
from longspan.train import checkpoint, pace
from longspan.train.loop import train
from longspan.train.pace import Pace, due
from longspan.train.recipe import change
from longspan.train.schedule import learning_rate

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 200, dtype=np.uint8)
STAGED = replace(shrink(find("rival-staged"), steps=10), minutes=1.0)  # three phases of ten steps


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(pace, "time", made)
    return made


def test_the_place_follows_the_clock(clock):
    run = Pace(STAGED, {})
    run.enter(0)
    clock.now += 1000  # compiling
    run.go()
    run.advance(24)
    assert run.place == 0
    clock.now += 15
    assert run.place == 7.5
    run.hold()
    clock.now += 1000  # an evaluation
    assert run.place == 7.5
    run.go()
    clock.now += 10
    assert STAGED.at(run.place) == (1, 2.5)
    again = Pace(STAGED, run.known())
    assert again.place == 12.5
    assert (again.step, again.inside, again.tokens) == (1, 1, 24)


def test_steps_in_a_phase_are_counted_anew(clock):
    run = Pace(STAGED, {})
    run.enter(0)
    run.advance(24)
    run.enter(0)  # gone on with
    assert run.inside == 1
    run.enter(1)
    assert run.inside == 0
    assert run.step == 1


def test_by_steps_the_clock_is_not_asked(clock):
    run = Pace(replace(STAGED, minutes=0.0), {})
    run.go()
    clock.now += 1000
    run.advance(24)
    assert run.place == 1


def test_due():
    assert [due(5, step, step + 1) for step in (3, 4, 5)] == [False, True, False]
    assert due(5, 4.9, 10.2)
    assert not due(0, 4.9, 10.2)


def test_the_learning_rate_between_steps():
    made = change(STAGED, {"phases.0.warmup": 4, "optimizer.over": "phase"})
    rates = [learning_rate(made, place) for place in np.linspace(0, 9.99, 200)]
    top = made.phases[0].learning_rate
    assert max(rates) == pytest.approx(top)
    assert min(rates[-1:]) == pytest.approx(0.0, abs=0.02 * top)
    assert all(0 <= rate <= top for rate in rates)


def test_a_run_ends_with_its_time_and_can_be_interrupted(tmp_path):
    """Real seconds: all phases are visited in order, and a resumed run uses up what was left."""
    made = change(STAGED, {"minutes": 1.5 / 60, "save_every": 5, "evaluation.every": 10})
    run = tmp_path / "run"

    class Interrupting(CharLM):
        def loss(self, model, batch, state):
            if checkpoint.find(run) is not None and not stopped:
                stopped.append(True)
                raise InterruptedError
            return super().loss(model, batch, state)

    stopped = []
    corpus = Corpus(TEXT, TEXT[:100], TEXT[:100])
    quiet = Console(quiet=True)
    with pytest.raises(InterruptedError):
        train(made, Interrupting(made, corpus), run, console=quiet)
    train(made, CharLM(made, corpus), run, console=quiet, resume=True)
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "split" not in entry]
    assert [entry["step"] for entry in steps] == list(range(1, len(steps) + 1))
    phases = [entry["phase"] for entry in steps]
    assert phases == sorted(phases)
    assert set(phases) == {0, 1, 2}
    assert steps[-1]["tokens"] == sum(12 * 2 + 12 * phase for phase in phases)
    assert 1.5 <= steps[-1]["training_seconds"] < 4
    assert steps[-1]["training_seconds"] < steps[-1]["seconds"]
    assert steps[-1]["peak_mib"] > 1
    # Evaluations come by time as well: at a third, at two thirds, at the end.
    assert len(entries) - len(steps) in (2, 3)
    last = checkpoint.find(run)
    assert last is not None
    assert Pace(made, checkpoint.progress(last)).place >= made.steps
