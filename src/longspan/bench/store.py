"""One JSON file per device: read to resume, written after every point."""

import itertools
import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longspan.bench.benchmark import OUT_OF_MEMORY, Benchmark, Case, Pass, Point, find, ratio

# What must agree for two points to stand in one file.
_IDENTITY = ("machine", "versions", "source", "settings")

# Times of a point besides its `ms`, where it has them.
_CLOCKS = ("eager_ms", "busy_ms")

Key = tuple[Any, str, Pass]  # a case of the benchmark, a contender, a pass


@dataclass
class Results:
    """Where, when and with what the points were measured, and the points."""

    header: dict[str, Any]
    points: dict[Key, Point] = field(default_factory=dict)

    def add(self, point: Point) -> None:
        self.points[point.case, point.contender, point.kind] = point

    def done(self, case: Case, contender: str, kind: Pass) -> bool:
        """Whether the point need not be measured again. Failures are tried again."""
        point = self.points.get((case, contender, kind))
        return point is not None and point.error in (None, OUT_OF_MEMORY)

    def get(self, case: Case, contender: str, kind: Pass) -> Point | None:
        return self.points.get((case, contender, kind))

    def value(self, case: Case, contender: str, kind: Pass, quantity: str = "ms") -> float | None:
        """Milliseconds, or another quantity of a point; None where it was not measured."""
        point = self.get(case, contender, kind)
        return None if point is None else getattr(point, quantity)

    def speedup(self, case: Case, ours: str, other: str, kind: Pass) -> float | None:
        """How many times as long as `ours` the `other` contender takes."""
        return ratio(self.value(case, other, kind), self.value(case, ours, kind))

    @property
    def benchmark(self) -> Benchmark:
        return find(self.header["benchmark"])

    def save(self, path: Path) -> None:
        """Write to a temporary name, then rename: a reader never sees half a file."""
        points = [
            {
                "case": p.case.as_dict(),
                "contender": p.contender,
                "pass": p.kind,
                "ms": None if p.ms is None else round(p.ms, 5),
                "mib": None if p.mib is None else round(p.mib, 2),
                **{name: round(ms, 5) for name in _CLOCKS if (ms := getattr(p, name)) is not None},
                **({"error": p.error} if p.error else {}),
            }
            for p in self.points.values()
        ]
        self.header["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        head = json.dumps(self.header, indent=2)[:-2]
        # One line per point keeps the file easy to read and to compare.
        body = ",\n    ".join(json.dumps(point) for point in points)
        text = f'{head},\n  "points": [\n    {body}\n  ]\n}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def load(path: Path) -> Results:
    """Read a results file; an error says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise KeyError("points")
        points = content.pop("points")
        results = Results(header=content)
        make_case = results.benchmark.case
        for p in points:
            results.add(
                Point(
                    case=make_case(**p["case"]),
                    contender=p["contender"],
                    kind=p["pass"],
                    ms=p["ms"],
                    mib=p["mib"],
                    **{name: p.get(name) for name in _CLOCKS},
                    error=p.get("error"),
                )
            )
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; `longspan bench` writes it") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; give a .json file in it") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        # Decoding errors carry the whole file along.
        no_json = isinstance(error, UnicodeDecodeError | json.JSONDecodeError)
        why = "not JSON" if no_json else repr(error)
        if isinstance(error, KeyError):
            why = f"it has no {error}"
        raise ValueError(f"{path} is damaged, or not written by `longspan bench` ({why})") from None
    return results


def resume(path: Path, header: dict[str, Any]) -> tuple[Results, str | None]:
    """The results to go on from: those at `path` if they agree with `header`, else none.

    Earlier results that cannot be gone on from are kept under another name; also returns where,
    and why.
    """
    if not path.exists():
        return Results(header), None
    try:
        earlier = load(path)
        changed = [name for name in _IDENTITY if earlier.header.get(name) != header[name]]
        if not changed:
            return Results(header, earlier.points), None
        reason = f"other {', '.join(changed)}"
    except ValueError:
        reason = "the file is damaged"
    kept = set_aside(path)
    return Results(header), f"{path} cannot be continued ({reason}); it is now {kept}"


def set_aside(path: Path) -> Path:
    """Rename a results file to the first free name beside it: nothing measured is lost."""
    numbers = itertools.count(1)
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in numbers)
    kept = next(name for name in names if not name.exists())
    os.replace(path, kept)
    return kept
