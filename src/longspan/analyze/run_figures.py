"""Runs side by side, as a table and as pictures, from their data alone."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from rich.table import Table

from longspan.bench import drawing
from longspan.bench.labels import End, label_column
from longspan.bench.report import make_table, parameter_count

# Okabe and Ito's palette and more, the ones easiest to tell apart first; further runs have the
# same ones with other dashes.
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#555555", "#332288", "#882255", "#B5A642", "#8B5A2B", "#000000"),
)
_DASHES = ("-", (0, (3, 1)), (0, (1, 1)))
_COLUMNS = (
    "run",
    "parameters",
    "bits/char, valid",
    "test",
    "paper",
    "RECL",
    "characters/s",
    "peak GiB",
    "steps",
    "minutes",
)


def rows(found: dict[str, Any]) -> list[list[str]]:
    """One row per run, the best first. Of runs that shared a device no time is told."""
    made, apart = [], not found.get("shared", False)
    for run in sorted(found["runs"], key=lambda run: run["bits_per_character"]["valid"]):
        scores = run["bits_per_character"]
        made.append(
            [
                run["name"],
                parameter_count(run["parameters"]),
                f"{scores['valid']:.4f}",
                f"{scores['test']:.4f}" if "test" in scores else "",
                f"{run['paper']:.2f}" if "paper" in run else "",
                _recl(found, run) if run.get("recl") else "",
                _speed(run["characters_per_second"]) if apart else "",
                f"{run['peak_mib'] / 1024:.3g}",
                f"{run['step']:,}",
                f"{run['training_seconds'] / 60:.1f}" if apart else "",
            ]
        )
    return made


def _speed(exact: float) -> str:
    return f"{float(f'{exact:.3g}'):,.0f}"


def _recl(found: dict[str, Any], run: dict[str, Any]) -> str:
    """At the first context tried, it may be any shorter one too."""
    length = run["recl"]["0.1"]
    return f"≤ {length:,}" if length == found["probe"]["start"] else f"{length:,}"


def _lines_of_table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Names of the columns, then the rows, without columns that have nothing in any of them."""
    columns = zip(_COLUMNS, *rows(found), strict=True)
    return list(zip(*(column for column in columns if any(column[1:])), strict=True))


def table(found: dict[str, Any]) -> Table:
    made = make_table("Runs, the best first")
    names, *lines = _lines_of_table(found)
    for name in names:
        made.add_column(name, justify="left" if name == "run" else "right")
    for line in lines:
        made.add_row(*line)
    return made


def markdown(found: dict[str, Any]) -> str:
    names, *lines = _lines_of_table(found)
    lines = [names, ("---", *["---:"] * (len(names) - 1)), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(found: dict[str, Any], stem: Path) -> list[Path]:
    """Draw what there is data for, as PNG and SVG; `stem` is the path without its ending."""
    with drawing.look():
        figures = {
            "-curves": _curves(found),
            "-positions": _positions(found),
            "-context": _context(found),
        }
        return drawing.save(figures, stem)


def _looks(found: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Colour and dashes by name, no two alike."""
    every = [(colour, dashes) for dashes in _DASHES for colour in _COLOURS]
    return {run["name"]: look for run, look in zip(found["runs"], cycle(every), strict=False)}


def _labels(found: dict[str, Any]) -> dict[str, str]:
    """Names without the words that all of them begin with."""
    words = [run["name"].split("-") for run in found["runs"]]
    shared = 0
    while all(len(own) > shared + 1 and own[shared] == words[0][shared] for own in words[1:]):
        if len(words[0]) == shared + 1 or len(words) == 1:
            break
        shared += 1
    return {"-".join(own): "-".join(own[shared:]) for own in words}


def _curves(found: dict[str, Any]) -> Figure:
    """Bits per character while training: valid as a line, train as a shadow of it."""
    quantities = [("tokens", "characters read", 1.0), ("step", "steps", 1.0)]
    if not found.get("shared", False):
        spent, seconds = drawing.time_unit(max(run["training_seconds"] for run in found["runs"]))
        quantities.insert(0, ("training_seconds", f"{spent} of training", seconds))
    figure = Figure(figsize=(4.2 * len(quantities), 3.9))
    panels = figure.subplots(1, len(quantities))
    looks, labels, ends = _looks(found), _labels(found), []
    for axes, (name, label, unit) in zip(panels, quantities, strict=True):
        its_ends = []
        for run in found["runs"]:
            colour, dashes = looks[run["name"]]
            train, valid = run["curve"]["train"], run["curve"]["valid"]
            x = [entry[name] / unit for entry in train]
            axes.plot(x, _smooth(train), color=colour, alpha=0.35, linewidth=1, zorder=1)
            if valid:
                line = [(e[name] / unit, e["bits_per_character"]) for e in valid]
                end = drawing.plot_line(axes, line, [], colour, dashes)
                its_ends.append(End(*end, labels[run["name"]], colour))
        last = axes.dataLim.x1
        axes.set(xlabel=label, xlim=(0, last * 1.5), ylim=_interesting(found))
        ticks = MaxNLocator(5, steps=[1, 2, 5, 10], integer=name != "training_seconds")
        axes.xaxis.set_major_locator(
            FixedLocator([tick for tick in ticks.tick_values(0, last) if tick <= last])
        )
        shown = drawing.amount if name == "tokens" else "{:,g}".format
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _, shown=shown: shown(x)))
        ends.append(its_ends)
    panels[0].set(title="Loss while training", ylabel="bits per character")
    grey: Any = {"color": "#444444"}
    handles = [
        Line2D([], [], marker="o", label="validation text", **grey),
        Line2D([], [], linewidth=1, alpha=0.35, label="training text", **grey),
    ]
    _finish(figure, panels, ends, found)
    where: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1.01), "borderaxespad": 0}
    panels[-1].legend(handles=handles, ncols=2, frameon=False, borderpad=0, **where)
    return figure


def _smooth(entries: Sequence[dict[str, Any]]) -> np.ndarray:
    """Means over a fortieth of the run to either side."""
    values = np.array([entry["bits_per_character"] for entry in entries])
    reach = len(values) // 40
    padded = np.pad(values, reach, mode="edge")
    return np.convolve(padded, np.full(2 * reach + 1, 1 / (2 * reach + 1)), mode="valid")


def _interesting(found: dict[str, Any]) -> tuple[float, float]:
    """The range of the last nine tenths: beginnings would flatten all that matters."""
    values: dict[str, list[float]] = {"train": [], "valid": []}
    for run in found["runs"]:
        for kind, entries in run["curve"].items():
            late = [e for e in entries if e["step"] > run["step"] / 10]
            values[kind] += [e["bits_per_character"] for e in late]
    low, high = np.quantile(values["train"] + values["valid"], (0.0, 0.95))
    high = max([high, *values["valid"]])  # no dot is cut in half
    return float(low - 0.04 * (high - low)), float(high + 0.1 * (high - low))


def _positions(found: dict[str, Any]) -> Figure | None:
    """Loss by how much text stands before a byte: in a row from anywhere, and in its document."""
    kinds = {
        "position": ("Rows that begin anywhere", "bytes before, in the row"),
        "document": ("Documents from their beginning", "bytes before, in the document"),
    }
    known = [run.get("bits_by", {}) for run in found["runs"]]
    kinds = {kind: shown for kind, shown in kinds.items() if all(own.get(kind) for own in known)}
    if not kinds:
        return None
    figure = Figure(figsize=(5.2 * len(kinds), 3.9))
    panels = list(figure.subplots(1, len(kinds), squeeze=False)[0])
    ends = [
        _lines(axes, found, {run["name"]: run["bits_by"][kind] for run in found["runs"]})
        for axes, kind in zip(panels, kinds, strict=True)
    ]
    for axes, (title, label) in zip(panels, kinds.values(), strict=True):
        axes.set(title=title, xlabel=label)
    panels[0].set_ylabel("bits per character")
    _finish(figure, panels, ends, found)
    return figure


def _context(found: dict[str, Any]) -> Figure | None:
    """Loss of the same bytes with more and more before them, and where that ceases to help."""
    runs = found["runs"]
    if not all(run.get("recl") for run in runs):
        return None
    figure = Figure(figsize=(10.4, 3.9))
    panels = list(figure.subplots(1, 2))
    ends = [_lines(panels[0], found, {run["name"]: run["bits_by_context"] for run in runs}), []]
    panels[0].set(
        title=f"The same {found['probe']['tokens']:,} bytes with more before them",
        xlabel="bytes before each",
        ylabel="bits per character",
    )
    looks = _looks(found)
    for place, run in enumerate(runs):
        length = run["recl"]["0.1"]
        panels[1].barh(place, length, color=looks[run["name"]][0], height=0.62)
        panels[1].annotate(
            _recl(found, run),
            (length, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color="#444444",
        )
    panels[1].set_yticks(range(len(runs)), _labels(found).values())
    panels[1].invert_yaxis()
    panels[1].grid(visible=False, axis="y")
    panels[1].margins(x=0.14)
    panels[1].xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panels[1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    panels[1].set(title="RECL, hardest tenth of them", xlabel="bytes of context that still help")
    _finish(figure, panels, ends, found)
    return figure


def _lines(axes: Axes, found: dict[str, Any], lines: dict[str, Any]) -> list[End]:
    """One line per run against a number of bytes, to be labelled at its end."""
    looks, labels, ends = _looks(found), _labels(found), []
    for name, points in lines.items():
        colour, dashes = looks[name]
        end = drawing.plot_line(axes, [tuple(point) for point in points], [], colour, dashes)
        ends.append(End(*end, labels[name], colour))
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.45)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: drawing.count(n)))
    axes.xaxis.set_minor_locator(NullLocator())
    return ends


def _finish(figure: Figure, panels: Any, ends: list[list[End]], found: dict[str, Any]) -> None:
    figure.tight_layout(w_pad=4.0)  # names reach beyond the axes
    for axes, its_ends in zip(panels, ends, strict=True):
        label_column(axes, its_ends)
    text = f"{found['machine']}; torch {found['versions']['torch']}"
    figure.text(0.01, -0.01, text, fontsize=7.5, color="#777777", ha="left", va="top")
