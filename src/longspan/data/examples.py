"""Examples for a task: which file and columns they come from, and how they are split."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from os import environ
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from rich import get_console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from longspan.data.tables import Row, read_rows

Example = TypeVar("Example")
Encode = Callable[[list[Any]], Iterable[Any]]

_AT_ONCE = 256  # examples that are encoded together


@dataclass(frozen=True)
class Examples:
    """Where examples come from.

    Args:
        train, valid, test: files, or data sets on the hub, see `read_rows`. A split without a file
            of its own is taken from the training examples.
        columns: what the task calls a value -> the column it is in.
        several: whether an example may have several labels, or none.
        separator: between the labels of an example with several, where they come as text.
        positive: of two labels, the one whose F1 is measured.
        valid_share, test_share: of the training examples, for splits without a file.
        split_seed: of that choice; it stays when the seed of a run changes.
        limit: examples to keep of each split, of rows drawn at random; 0 = all.
    """

    train: str | None = None
    valid: str | None = None
    test: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    several: bool = False
    separator: str = ","
    positive: str | None = None
    valid_share: float = 0.1
    test_share: float = 0.1
    split_seed: int = 0
    limit: int = 0


class Splits(NamedTuple, Generic[Example]):
    train: list[Example]
    valid: list[Example]
    test: list[Example]


class Skips:
    """What was left out, counted by reason, with the first places."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, reason: str, where: str) -> None:
        self._counts[reason] = self._counts.get(reason, 0) + 1
        places = self._found.setdefault(reason, [])
        if len(places) < 3:
            places.append(where)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def lines(self) -> list[str]:
        """A line for each reason: "skipped 4, the text is empty: a.csv, line 3; ..."."""
        return [
            f"skipped {count:,}, {reason}: {'; '.join(self._found[reason])}"
            + ("; ..." if count > len(self._found[reason]) else "")
            for reason, count in self._counts.items()
        ]


def read_examples(
    source: Examples,
    understand: Callable[[Row], Iterator[Example]],
    skips: Skips | None = None,
    about: Callable[[Example], Hashable] | None = None,
    encode: Encode | None = None,
) -> Splits[Any]:
    """All examples of a source; `understand` makes any number of them of a row, and enters in
    `skips` what it left out. Where there is one at most, `encode` may turn examples into what is
    to be kept of each, if anything, while they are read: a file of texts need not fit in memory.

    A row's examples stay in one split, and so do rows that are `about` the same, as tables have it
    with a row for each question: questions about a document that is trained on would not measure
    anything.
    """
    if source.train is None:
        raise ValueError("there is nothing to train on: give --data FILE")
    early = None if source.limit else encode  # else few are kept
    rows = _read(source.train, understand, early)
    if about is not None:
        rows = _joined(rows, about)
    order = np.random.default_rng(source.split_seed).permutation(len(rows))
    parts = {}
    for name in ("valid", "test"):
        path, share = getattr(source, name), getattr(source, f"{name}_share")
        if path is not None:
            parts[name] = _read(path, understand, early)
            continue
        if not 0.0 < share < 1.0:
            raise ValueError(f"data.{name}_share={share}: a share between 0 and 1, or give a file")
        count = max(1, round(share * len(rows)))
        taken, order = order[:count], order[count:]
        parts[name] = [rows[place] for place in sorted(taken)]
    kept = {"train": [rows[place] for place in sorted(order)], **parts}
    splits = Splits(*(_few(kept[name], source) for name in Splits._fields))
    if encode is not None and early is None:
        splits = Splits(*(list(encode(split)) for split in splits))
    for name, found in splits._asdict().items():
        if not found:
            own = None if name == "train" else getattr(source, name)
            raise ValueError(
                f"{own or source.train} leaves no example for {name}"
                + ("" if own else f": {len(rows)} {'texts' if about else 'rows'} are too few")
                + "".join(f"; {line}" for line in (skips.lines() if skips else ()))
            )
    return splits


def _read(
    path: str, understand: Callable[[Row], Iterator[Any]], encode: Encode | None
) -> list[list[Any]]:
    """The examples of each row that has any."""
    columns = SpinnerColumn(), f"reading {Path(path).name}", "{task.completed:,} rows"
    rows: list[list[Any]] = []
    waiting: list[Any] = []
    with Progress(*columns, TimeElapsedColumn(), transient=True, disable=unwatched()) as progress:
        told = progress.add_task("", total=None)
        for row in read_rows(path):
            found = list(understand(row))
            if encode is None:
                rows += [found] if found else []
            else:
                waiting += found
                if len(waiting) == _AT_ONCE:
                    rows += [[one] for one in encode(waiting)]
                    waiting = []
            progress.advance(told)
        if encode is not None:
            rows += [[one] for one in encode(waiting)]
    return rows


def unwatched() -> bool:
    """Whether progress is not to be shown: nobody looks on, or another process shows it."""
    return environ.get("RANK", "0") != "0" or not get_console().is_terminal


def _joined(rows: list[list[Example]], about: Callable[[Example], Hashable]) -> list[list[Example]]:
    """Rows about the same as one, where the first of them stands."""
    found: dict[Hashable, list[Example]] = {}
    for row in rows:
        found.setdefault(about(row[0]), []).extend(row)
    return list(found.values())


def _few(rows: list[list[Example]], source: Examples) -> list[Example]:
    """The examples that are kept, in the order of the file. Not its first ones: files are often
    sorted by label."""
    if source.limit:
        order = np.random.default_rng(source.split_seed).permutation(len(rows))
        enough = int(np.searchsorted(np.cumsum([len(rows[one]) for one in order]), source.limit))
        rows = [rows[one] for one in sorted(order[: enough + 1])]
    return [one for row in rows for one in row][: source.limit or None]


class Order:
    """Which examples a step takes: a function of the step alone, in another order each pass.

    With `lengths`, batches are made of examples of like length: so many (`alike`) are drawn at a
    time, their examples sorted into them, and the batches taken in any order.
    """

    def __init__(
        self, count: int, batch: int, seed: int, lengths: np.ndarray | None = None, alike: int = 0
    ) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self.lengths, self.alike = lengths, alike
        self._known: tuple[int, np.ndarray] | None = None

    def take(self, step: int, rows: range) -> list[int]:
        return [self._place(step * self.batch + row) for row in rows]

    def _place(self, index: int) -> int:
        epoch, place = divmod(index, self.count)
        if self._known is None or self._known[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            drawn = random.permutation(self.count)
            if self.lengths is not None and self.alike > 1:
                drawn = self._sorted(drawn, -epoch * self.count % self.batch, random)
            self._known = epoch, drawn
        return int(self._known[1][place])

    def _sorted(self, drawn: np.ndarray, begun: int, random: np.random.Generator) -> np.ndarray:
        """The first `begun` examples complete a batch of the pass before."""
        assert self.lengths is not None
        parts = [drawn[:begun]]
        for first in range(begun, len(drawn), self.alike * self.batch):
            some = drawn[first : first + self.alike * self.batch]
            some = some[np.argsort(self.lengths[some], kind="stable")]
            # The last batch of a pass may be short, and must stay the last.
            whole = len(some) // self.batch * self.batch
            batches = random.permutation(some[:whole].reshape(-1, self.batch))
            parts += [batches.reshape(-1), some[whole:]]
        return np.concatenate(parts)
