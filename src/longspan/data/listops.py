"""Long Range Arena's ListOps: nested lists of digits, each with what it comes to.

    [MAX 4 [MED 1 9 6 ] 2 0 ]  ->  6

Written from the benchmark's specification, so that examples have the same distribution: a node is
an operator with probability 1/4, and a digit otherwise or in the tenth level; an operator has 2 to
10 arguments, all numbers alike; and only lists of more than 500 and fewer than 2,000 symbols are
kept. Examples follow from their split and number alone.
"""

import gzip
import json
import os
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import track

SPLITS = {"train": 96_000, "valid": 2_000, "test": 2_000}
DEPTH, ARGUMENTS = 10, 10
SHORTEST, LONGEST = 501, 1999  # symbols
_NESTED = 0.25
_SEED = 0

OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),  # a half is left out
    "[SM": lambda values: sum(values) % 10,
}
# Of the training lists that begin with it. Modular sums are all alike.
_MOST_OFTEN = {"[MIN": 0, "[MAX": 9, "[MED": 4, "[SM": 0}
END = "]"
SYMBOLS = (*OPERATORS, END, *map(str, range(10)))


class Example(NamedTuple):
    text: str  # symbols with spaces between them
    value: int


def examples(split: str, count: int | None = None) -> Iterator[Example]:
    """The first `count` of a split, or all of it: the same ones each time."""
    if split not in SPLITS:
        raise ValueError(f"ListOps has no split {split!r}; choose from {', '.join(SPLITS)}")
    random = np.random.default_rng((_SEED, list(SPLITS).index(split)))
    for _ in range(SPLITS[split] if count is None else count):
        while (levels := _shape(random)) is None:
            pass
        yield _fill(levels, random)


def evaluate(text: str) -> int:
    """What a list comes to."""
    open_lists: list[tuple[str, list[int]]] = [("", [])]
    for symbol in text.split():
        if symbol in OPERATORS:
            open_lists.append((symbol, []))
        elif symbol == END and len(open_lists) > 1:
            operator, values = open_lists.pop()
            open_lists[-1][1].append(OPERATORS[operator](values))
        elif symbol.isdigit():
            open_lists[-1][1].append(int(symbol))
        else:
            raise ValueError(f"{symbol!r} has no place in a list of {', '.join(SYMBOLS)}")
    if len(open_lists) > 1 or len(open_lists[0][1]) != 1:
        raise ValueError(f"expected one whole list or digit, got {text!r:.60}")
    return open_lists[0][1][0]


def by_operator(made: Iterable[Example]) -> float:
    """The share of lists that come to what their outermost operator comes to most often: what a
    model reaches that reads the first symbol and nothing else."""
    hits = [_MOST_OFTEN[text.split(maxsplit=1)[0]] == value for text, value in made]
    return sum(hits) / len(hits)


def _shape(random: np.random.Generator) -> list[np.ndarray] | None:
    """The number of arguments of each node, level by level, 0 for a digit; None if the list has
    not the wanted length. The arguments of a level's nodes are the next level, in order."""
    levels: list[np.ndarray] = []
    nodes, length = 1, 0
    while nodes:
        arguments = np.zeros(nodes, dtype=np.int64)
        if len(levels) < DEPTH - 1:
            nested = random.random(nodes) < _NESTED
            arguments[nested] = random.integers(2, ARGUMENTS + 1, int(nested.sum()))
        levels.append(arguments)
        length += nodes + int((arguments > 0).sum())  # an operator also has its END
        nodes = int(arguments.sum())
        if length + nodes > LONGEST:
            return None
    return levels if length >= SHORTEST else None


def _fill(levels: list[np.ndarray], random: np.random.Generator) -> Example:
    """A list of this shape with operators and digits, from its deepest level up."""
    below: Iterator[Example] = iter(())
    for arguments in reversed(levels):
        chosen = random.integers(0, 10, len(arguments))
        operators = random.integers(0, len(OPERATORS), len(arguments))
        made = []
        for count, digit, number in zip(
            arguments.tolist(), chosen.tolist(), operators.tolist(), strict=True
        ):
            if count == 0:
                made.append(Example(str(digit), digit))
                continue
            operator = SYMBOLS[number]
            texts, values = zip(*(next(below) for _ in range(count)), strict=True)
            text = " ".join((operator, *texts, END))
            made.append(Example(text, OPERATORS[operator](values)))
        below = iter(made)
    return next(below)


def find(split: str) -> Path:
    """The file of a split, written if there is none yet: JSON lines with "text" and "label", in
    the folder that LONGSPAN_CACHE names, ~/.cache/longspan by default."""
    folder = Path(os.environ.get("LONGSPAN_CACHE") or Path.home() / ".cache" / "longspan")
    path = folder / "listops" / f"{split}.jsonl.gz"
    if not path.exists():
        made = track(examples(split), f"ListOps, {split}, into {path.parent}", SPLITS[split])
        write(path, made)
    return path


def write(path: Path, made: Iterable[Example]) -> None:
    """The whole file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with gzip.open(unfinished, "wt", compresslevel=1, encoding="utf8") as file:
            for text, value in made:
                file.write(json.dumps({"text": text, "label": str(value)}) + "\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
