"""What a run shows on a terminal."""

import io

from rich.console import Console

from longspan.recipes.finetuning import classify
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
