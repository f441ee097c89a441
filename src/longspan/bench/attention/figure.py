"""Figures drawn from a results file alone: scaling with length, and the sweeps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullLocator

from longspan.bench import drawing
from longspan.bench.attention.cases import AttentionCase, Level
from longspan.bench.attention.contenders import CONTENDERS
from longspan.bench.benchmark import OUT_OF_MEMORY, PASSES, Point
from longspan.bench.labels import End, label_ends
from longspan.bench.store import Results

# Okabe and Ito's palette, which colour-blind readers can tell apart; dense attention in greys.
COLOURS = {
    "longspan": "#0072B2",
    "longspan-layer": "#0072B2",
    "flex": "#009E73",
    "longformer-layer": "#D55E00",
    "sdpa": "#555555",
    "sdpa-layer": "#555555",
    "eager": "#A0A0A0",
}
_LEVELS: dict[Level, str] = {"op": "attention alone", "layer": "self-attention layer"}


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw every figure there is data for; `stem` is the path without its ending."""
    with drawing.look():
        return drawing.save({"": _scaling(results), "-sweeps": _sweeps(results)}, stem)


def _plain(results: Results, **changes: Any) -> AttentionCase:
    return replace(AttentionCase(tokens=16_384, dtype=drawing.dtype(results)), **changes)


def _line(
    results: Results, cases: Sequence[AttentionCase], name: str, kind: Any
) -> list[tuple[AttentionCase, Point]]:
    found = [(case, results.get(case, name, kind)) for case in cases]
    return [(case, point) for case, point in found if point is not None]


def _points(results: Results, case: AttentionCase) -> list[Point]:
    return [point for key, point in results.points.items() if key[0] == case]


def _scaling(results: Results) -> Figure | None:
    """Time and memory against length, log-log: the Longformer paper's Figure 1, today."""
    if not results.points:
        return None
    rows: list[tuple[Level, list[AttentionCase]]] = []
    for level in _LEVELS:
        plain = _plain(results, level=level)
        lengths = sorted({c.tokens for c, _, _ in results.points if c.level == level})
        cases = [replace(plain, tokens=n) for n in lengths]
        cases = [c for c in cases if any(key[0] == c for key in results.points)]
        if cases:
            rows.append((level, cases))
    figure = Figure(figsize=(9.6, 3.7 * len(rows)))
    axes = figure.subplots(len(rows), 2, squeeze=False)
    ends = []
    for (level, cases), (left, right) in zip(rows, axes, strict=True):
        ends.append((left, _panel(left, results, cases, "ms", f"Time, {_LEVELS[level]}")))
        ends.append((right, _panel(right, results, cases, "mib", f"Peak memory, {_LEVELS[level]}")))
        failed = any(p.error == OUT_OF_MEMORY for c in cases for p in _points(results, c))
        drawing.legend(left, failed)
    case = rows[0][1][0]
    figure.tight_layout(w_pad=3.5, h_pad=2.5)
    for panel, its_ends in ends:
        label_ends(panel, its_ends)
    drawing.footer(
        figure, results, f"batch 1, {case.heads} heads x {case.head_dim}, window {case.window}"
    )
    return figure


def _panel(
    axes: Axes, results: Results, cases: Sequence[AttentionCase], quantity: str, title: str
) -> list[End]:
    """Draw one quantity of all contenders; return the ends of the lines, to be named."""
    ends = []
    for name, colour in COLOURS.items():
        ours = name.startswith("longspan")
        for kind in PASSES:
            points = _line(results, cases, name, kind)
            line = [(c.tokens, getattr(p, quantity)) for c, p in points if getattr(p, quantity)]
            if not line:
                continue
            failed = [c.tokens for c, p in points if p.error == OUT_OF_MEMORY]
            end = drawing.plot_line(axes, line, failed, colour, drawing.STYLES[kind], front=ours)
            if kind == PASSES[-1]:
                ends.append(drawing.name_end(end, CONTENDERS[name].label, colour, bold=ours))
    axes.set_title(title)
    axes.set_xlabel("tokens")
    drawing.length_axis(axes, [case.tokens for case in cases])
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if quantity == "ms":
        if high / low < 1000:
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: drawing.duration(y)))
    else:
        drawing.memory_axis(axes)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low, high * (high / low) ** 0.08)
    return ends


def _sweeps(results: Results) -> Figure | None:
    """What window, head size, dilation and global tokens change, at one length."""
    if not results.points:
        return None
    plain = _plain(results)
    panels: list[Callable[[Axes], list[End]]] = []

    def values(field: str) -> list[int]:
        swept = {
            getattr(case, field)
            for case, name, _ in results.points
            if name == "longspan" and replace(case, **{field: getattr(plain, field)}) == plain
        }
        return sorted(swept)

    for field, label in (("window", "window"), ("head_dim", "head size")):
        if len(values(field)) > 1:
            panels.append(_speedup_panel(results, plain, field, values(field), label))
    for field, label in (("dilation", "dilation"), ("globals", "number of global tokens")):
        if len(values(field)) > 1:
            panels.append(_time_panel(results, plain, field, values(field), label))
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.8 * columns, 3.2 * rows))
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(len(panels))]
    ends = [draw_on(panel) for draw_on, panel in zip(panels, axes, strict=True)]
    figure.tight_layout(w_pad=2.5, h_pad=2.0)
    for panel, its_ends in zip(axes, ends, strict=True):
        label_ends(panel, its_ends)
    what = f"batch 1, {plain.tokens:,} tokens, {plain.heads} heads, attention alone"
    drawing.footer(figure, results, what)
    return figure


def _speedup_panel(
    results: Results, plain: AttentionCase, field: str, values: Sequence[int], label: str
) -> Callable[[Axes], list[End]]:
    def draw_on(axes: Axes) -> list[End]:
        highest = 2.0
        for kind in PASSES:
            line = []
            for at, value in enumerate(values):
                case = replace(plain, **{field: value})
                ours, flex = (results.get(case, name, kind) for name in ("longspan", "flex"))
                if ours and flex and ours.ms and flex.ms:
                    line.append((at, flex.ms / ours.ms))
            if line:
                x, y = zip(*line, strict=True)
                highest = max(highest, *y)
                style: dict[str, Any] = {
                    "color": COLOURS["longspan"],
                    "linestyle": drawing.STYLES[kind],
                }
                axes.plot(x, y, label=drawing.spoken(kind), **style)
                axes.plot(x, y, "o", color=COLOURS["longspan"])
        axes.axhline(1, color=COLOURS["flex"], linewidth=1.4)
        axes.set_ylim(0, highest * 1.3)
        axes.yaxis.set_major_locator(MultipleLocator(0.5 if highest < 3 else 1.0))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
        axes.set_title(f"Speed-up over FlexAttention, by {label}")
        _category_axis(axes, values, label)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="upper right", handlelength=2.6)
        return [End(0, 0.93, "FlexAttention = 1", COLOURS["flex"])]

    return draw_on


def _time_panel(
    results: Results, plain: AttentionCase, field: str, values: Sequence[int], label: str
) -> Callable[[Axes], list[End]]:
    def draw_on(axes: Axes) -> list[End]:
        ends, cases = [], [replace(plain, **{field: value}) for value in values]
        for name in ("longspan", "flex"):
            for kind in PASSES:
                points = _line(results, cases, name, kind)
                line = [(values.index(getattr(c, field)), p.ms) for c, p in points if p.ms]
                if len(line) < 2:
                    continue
                x, y = zip(*line, strict=True)
                style: dict[str, Any] = {"color": COLOURS[name], "linestyle": drawing.STYLES[kind]}
                axes.plot(x, y, marker="o", **style)
                if kind == PASSES[-1]:
                    title = CONTENDERS[name].label
                    ends.append(End(x[-1], y[-1], title, COLOURS[name], name == "longspan"))
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} ms"))
        axes.set_title(f"Time, by {label}")
        _category_axis(axes, values, label)
        axes.set_xlim(-0.2, (len(values) - 1) * 1.35)
        return ends

    return draw_on


def _category_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    axes.set_xticks(range(len(values)), [f"{value:,}" for value in values])
    axes.set_xlabel(label)
    axes.grid(visible=False, axis="x")
