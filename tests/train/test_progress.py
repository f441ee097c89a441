"""What a run shows, on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from longspan.recipes.finetuning import classify
from longspan.train import progress
from longspan.train.finetuning import planned
from longspan.train.progress import Bar


def test_the_bar_says_what_holds_steps_up():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    with Bar(console, planned(classify(), 100), 0, shown=True) as bar:
        with bar.saying("evaluating"):
            assert "evaluating" in shown.getvalue()
        shown.truncate(0)
        bar.show(1.0, 0, 1)
    assert "1 steps" in shown.getvalue()
    assert "evaluating" not in shown.getvalue()


@pytest.mark.parametrize(("slow", "told"), [(-1.0, 1), (3600.0, 0)])
def test_a_log_tells_of_a_slow_first_step(slow, told, monkeypatch):
    monkeypatch.setattr(progress, "_SLOW", slow)
    shown = io.StringIO()
    with Bar(Console(file=shown, width=120), planned(classify(), 100), 0, shown=True) as bar:
        for step in range(1, 4):
            bar.show(float(step), 0, step)
        bar.show(4.0, 0, 4, 0.5, 10.0)
    assert shown.getvalue().count("step 1 after 0 s; the loss of every 10 steps follows") == told
    assert shown.getvalue().count("step") == 2 * told + 1
