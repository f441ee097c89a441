"""What a run shows and writes while it goes on."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from longspan.train.checkpoint import write_text
from longspan.train.recipe import Plan

_SLOW = 5.0  # seconds of a first step: then a log that says nothing yet would look like a hang


class Metrics:
    """JSON lines, and TensorBoard where it is installed.

    What an interrupted run wrote beyond the step it goes on from is dropped first.
    """

    def __init__(self, run: Path, begin: int) -> None:
        self._metrics, self._samples = run / "metrics.jsonl", run / "samples.jsonl"
        for path in (self._metrics, self._samples):
            kept = [line for line in _lines(path) if json.loads(line)["step"] <= begin]
            write_text(path, "".join(line + "\n" for line in kept))
        self._board = _tensorboard(run, begin)

    def add(self, entry: dict[str, Any]) -> None:
        _append(self._metrics, entry)
        if self._board is not None:
            split = entry.get("split", "train")
            for name, value in entry.items():
                if name not in ("step", "split") and value is not None:
                    self._board.add_scalar(f"{split}/{name}", value, entry["step"])

    def add_sample(self, step: int, text: str) -> None:
        _append(self._samples, {"step": step, "text": text})
        if self._board is not None:
            self._board.add_text("sample", text, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


class Bar:
    """Steps done, loss, bits per character, tokens per second and the time left."""

    def __init__(
        self, console: Console, recipe: Plan, begin: float, shown: bool, bits: bool = True
    ) -> None:
        self._name, self._phases, self._bits = recipe.name, len(recipe.phases), bits
        self._console, self._shown, self._every = console, shown, recipe.log_every
        self._begun: float | None = None  # until the first step is done
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[steps]:,} steps"),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not shown or not console.is_terminal,
        )
        self._task = self._progress.add_task(recipe.name, total=recipe.steps, numbers="", steps=0)
        self._progress.update(self._task, completed=begin)

    def __enter__(self) -> "Bar":
        self._begun = time.monotonic()
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(
        self,
        place: float,
        phase: int,
        done: int,
        nats: float | None = None,
        speed: float | None = None,
    ) -> None:
        fields: dict[str, Any] = {"steps": done}
        if nats is not None and speed is not None:
            where = f"phase {phase + 1}/{self._phases}  " if self._phases > 1 else ""
            bits = f"  {nats / math.log(2):.4f} bpc" if self._bits else ""
            numbers = f"{where}loss {nats:.4f}{bits}  {_short(speed)} tokens/s"
            fields["numbers"] = numbers
            if self._shown and not self._console.is_terminal:
                self._console.print(f"step {done}  {numbers}", highlight=False)
        elif self._begun is not None and self._shown and not self._console.is_terminal:
            seconds = time.monotonic() - self._begun
            if seconds > _SLOW:
                told = f"the loss of every {self._every} steps follows"
                self._console.print(f"step {done} after {seconds:.0f} s; {told}", highlight=False)
        self._begun = None
        self._progress.update(self._task, completed=place, **fields)

    @contextmanager
    def saying(self, doing: str) -> Iterator[None]:
        """Say what holds the steps up: a validation file may take minutes."""
        self._progress.update(self._task, description=f"{self._name}, {doing}", refresh=True)
        yield
        self._progress.update(self._task, description=self._name)

    def say(self, text: str) -> None:
        if self._shown:
            self._progress.console.print(escape(text), highlight=False)


def _short(number: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:.0f}"


def _lines(path: Path) -> list[str]:
    """Complete lines of a file: a kill may have cut the last one short."""
    text = path.read_text(encoding="utf8") if path.exists() else ""
    return text.split("\n")[:-1]


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a", encoding="utf8") as file:
        file.write(json.dumps(entry) + "\n")


def _tensorboard(run: Path, begin: int) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run / "tensorboard"), purge_step=begin + 1)
