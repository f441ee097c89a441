"""A line of JSON for each row of a table, in its order: streamed, and resumed after a kill."""

import json
import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from longspan.data.tables import HUB, LISTOPS, Row, read_rows, unpacked


def name_of(source: str | Path) -> str:
    """What to call something made of a source: the file's name without its ending, but with what
    else is between full stops, so that sales.2024.csv and sales.2025.csv stay apart."""
    path = Path(source)
    return path.name if str(source).startswith((HUB, LISTOPS)) else unpacked(path).stem


def write_lines(
    source: str | Path,
    output: Path,
    answer: Callable[[list[Row]], Iterable[dict[str, Any]]],
    *,
    unfold: Callable[[Row], Iterable[Row]] = lambda row: (row,),
    id_column: str = "id",
    resume: bool = False,
    batch: int = 8,
    progress: Callable[[int], object] | None = None,
) -> int:
    """What `answer` says of every row of a table, as JSON lines; returns how many.

    Each line has the row's number from 0, its id if it has one, and the answer. Rows are read as
    they are needed. A file that a kill cut short is gone on with by `resume`.
    """
    done, last = _done(output, resume)
    rows = (one for row in read_rows(source) for one in unfold(row))
    passed, known = 0, None
    for row in islice(rows, done):
        passed, known = passed + 1, _identity(row, id_column)
    if passed < done:
        raise ValueError(
            f"{output} has {done} lines, {source} only {passed} rows: is it another's?"
        )
    if known is not None and not _is_of(known, last):
        raise ValueError(
            f"line {done} of {output} is not of row {done - 1} of {source}, whose id is "
            f"{known.get('id')!r}: is it another's?"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf8") as file:
        while group := list(islice(rows, batch)):
            for row, found in zip(group, answer(group), strict=True):
                line = {"row": done, **_identity(row, id_column), **found}
                file.write(_json(line) + "\n")
                done += 1
            file.flush()
            if progress is not None:
                progress(done)
    return done


def remarks(lines: Path) -> list[str]:
    """How many rows of such a file were not read, or not to their end."""
    known = {"skipped": "skipped", "unread": "read in part only", "pieces": "read in pieces"}
    counts = dict.fromkeys(known, 0)
    with lines.open(encoding="utf8") as file:
        for line in file:
            for name in known.keys() & json.loads(line).keys():
                counts[name] += 1
    return [f'{counts[name]:,} {what} ("{name}")' for name, what in known.items() if counts[name]]


def _identity(row: Row, name: str) -> dict[str, Any]:
    return {"id": row.values[name]} if row.values.get(name) is not None else {}


def _json(line: dict[str, Any]) -> str:
    """An id may be of a kind that JSON lacks, a date for example."""
    return json.dumps(line, ensure_ascii=False, default=str)


def _is_of(known: dict[str, Any], line: bytes) -> bool:
    """Whether a line was predicted of a row that is known by this."""
    try:
        found = json.loads(line)
    except ValueError:
        return False
    own = {"id": found["id"]} if isinstance(found, dict) and "id" in found else {}
    return _json(own) == _json(known)


def _done(output: Path, resume: bool) -> tuple[int, bytes]:
    """How many whole lines there are already, and the last; half a line is taken away."""
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name a file to write")
    if not output.exists() or not output.stat().st_size:
        return 0, b""  # or the first row was refused
    if not resume:
        raise ValueError(
            f"{output} exists already: --resume goes on with it, --output names another"
        )
    whole, lines, last = 0, 0, b""
    with output.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            whole, lines, last = whole + len(line), lines + 1, line
        file.truncate(whole)
        os.fsync(file.fileno())
    return lines, last
