"""What the figures of all benchmarks share: their look, axes, and how they are written."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from longspan.bench.benchmark import PASSES
from longspan.bench.labels import End
from longspan.bench.store import Results

STYLES = dict(zip(PASSES, ("-", (0, (4, 1.8))), strict=True))
CROSS: dict[str, Any] = {"marker": "x", "markersize": 8, "markeredgewidth": 2}
LOOK: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": "longspan",  # the same results give the same file
}


def look() -> AbstractContextManager[None]:
    """Within it, figures are drawn in our style."""
    return matplotlib.rc_context(LOOK)


def save(figures: Mapping[str, Figure | None], stem: Path) -> list[Path]:
    """Write each figure that is one, as PNG and SVG, under `stem` and its suffix."""
    written = []
    for suffix, figure in figures.items():
        if figure is None:
            continue
        for ending in (".png", ".svg"):
            path = stem.with_name(stem.name + suffix + ending)
            metadata = {"Date": None} if ending == ".svg" else None
            figure.savefig(path, dpi=160, bbox_inches="tight", metadata=metadata)
            written.append(path)
    return written


def dtype(results: Results) -> str:
    return next(case.dtype for case, _, _ in results.points)


def legend(axes: Axes, out_of_memory: bool) -> None:
    """Say which line is which pass, and what a cross means."""
    handles = [Line2D([], [], color="#444444", linestyle=style) for style in STYLES.values()]
    names = [spoken(kind) for kind in PASSES]
    if out_of_memory:
        handles.append(Line2D([], [], color="#444444", linestyle="", **CROSS))
        names.append("out of memory")
    axes.legend(handles, names, loc="lower right", frameon=False, handlelength=2.6)


def plot_line(
    axes: Axes,
    line: Sequence[tuple[float, float]],
    failed: Sequence[float],
    colour: str,
    style: Any = "-",
    *,
    front: bool = False,
) -> tuple[float, float]:
    """Points joined by a line, up to a cross where the first `failed` one would be; its end."""
    x, y = zip(*line, strict=True)
    axes.plot(x, y, marker="o", color=colour, linestyle=style, zorder=3 if front else 2)
    if not failed:
        return line[-1]
    end = failed[0], extrapolate(line, failed[0])
    axes.plot([x[-1], end[0]], [y[-1], end[1]], ":", color=colour, linewidth=1)
    axes.plot(*end, color=colour, **CROSS)
    return end


def name_end(end: tuple[float, float], name: str, colour: str, *, bold: bool = False) -> End:
    """The name to be written at the end of a line."""
    if len(name) > 16:  # two short lines stay clear of axes and panels
        name = name.replace(" ", "\n", 1)
    return End(*end, name, colour, bold=bold)


def memory_axis(axes: Axes) -> None:
    """MiB, at powers of two, as memory comes, and at no more of them than can be read."""
    low, high = axes.get_ylim()
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    ticks = range(first, last + 1, max(1, round((last - first) / 5)))
    axes.yaxis.set_major_locator(FixedLocator([2.0**tick for tick in ticks]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: memory(y)))


def memory_from_zero(axes: Axes) -> None:
    """MiB from zero, so that lengths can be compared, in steps of a power of two."""
    high = axes.get_ylim()[1]
    axes.set_ylim(0, high)
    axes.yaxis.set_major_locator(MultipleLocator(2.0 ** round(math.log2(high / 4))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: memory(y) if y else "0"))


def extrapolate(line: Sequence[tuple[float, float]], x: float) -> float:
    """Where the straight log-log continuation of the last two points meets `x`."""
    if len(line) < 2:
        return line[-1][1]
    (x0, y0), (x1, y1) = line[-2:]
    power = math.log(y1 / y0) / math.log(x1 / x0)
    return y1 * (x / x1) ** power


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: count(n)))
    axes.xaxis.set_minor_locator(NullLocator())
    # Room on the right for the names at the ends of the lines.
    low, high = min(lengths), max(lengths)
    room = max(high / low, 4)
    axes.set_xlim(low / room**0.04, high * room**0.4)


def count(n: float) -> str:
    n = round(n)
    if n >= 2**20 and n % 2**20 == 0:
        return f"{n // 2**20}M"
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)


def amount(y: float) -> str:
    if y >= 1e6:
        return f"{y / 1e6:g}M"
    return f"{y / 1e3:g}k" if y >= 1e3 else f"{y:g}"


def duration(ms: float) -> str:
    if ms == 0:
        return "0"
    if ms >= 1000:
        return f"{ms / 1000:g} s"
    return f"{ms:g} ms" if ms >= 0.099 else f"{round(ms * 1000, 1):g} µs"


def time_unit(longest: float) -> tuple[str, float]:
    """In which to show seconds up to `longest`, and how many of them it has."""
    return ("minutes", 60.0) if longest >= 120 else ("seconds", 1.0)


def memory(mib: float) -> str:
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB"


def spoken(kind: str) -> str:
    return kind.replace("+", " + ")


def footer(figure: Figure, results: Results, what: str) -> None:
    head = results.header
    text = f"{head['machine']}, {dtype(results)}, {what}; torch {head['versions']['torch']}"
    figure.text(0.01, -0.01, text, fontsize=7.5, color="#777777", ha="left", va="top")
