"""The figure of encoder-decoders, drawn from a results file alone."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from longspan.bench import drawing
from longspan.bench.benchmark import OUT_OF_MEMORY
from longspan.bench.labels import End, label_ends
from longspan.bench.led.cases import FORWARD, STEP, LEDCase
from longspan.bench.led.contenders import CONTENDERS
from longspan.bench.led.memory import TERMS, Fit, fit, measured, model_of
from longspan.bench.store import Results

_PALE = "#777777"
# Of the terms of a fit: what everything has in grey, scores of attention in colour.
_TERM_COLOURS = ("#555555", "#888888", "#BBBBBB", "#D55E00", "#E69F00", "#0072B2", "#56B4E9")
COLOURS = {"longspan": "#0072B2", "longspan-patch": "#56B4E9", "led": "#D55E00"}

Panel = Callable[[Axes], list[End]]


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw what there is data for; `stem` is the path without its ending."""
    with drawing.look():
        return drawing.save({"": _figure(results)}, stem)


def _figure(results: Results) -> Figure | None:
    """A step's time and memory against both lengths, with what memory follows, and generation."""
    steps = [case for case, _, kind in results.points if kind == STEP[0]]
    writing = [case for case, _, _ in results.points if case.beams]
    panels: list[Panel] = []
    base = None
    if steps:
        # Cases lie around one that most of them share most with.
        base = LEDCase(
            **{
                name: Counter(getattr(case, name) for case in steps).most_common(1)[0][0]
                for name in steps[0].as_dict()
            }
        )
        fits = {
            name: made
            for name in COLOURS
            if (made := fit(measured(results, name, model_of(base)))) is not None
        }
        for quantity, varied in (("ms", "tokens"), ("mib", "tokens"), ("mib", "target")):
            cases = _along(steps, base, varied)
            if len(cases) > 1:
                panels.append(_panel(results, cases, quantity, varied, fits))
        if fits:
            alike = [case for case in steps if model_of(case) == model_of(base)]
            panels.append(_consists(max(alike, key=lambda case: case.tokens * case.target), fits))
    if writing:
        panels.append(_writing(results, max(writing, key=lambda case: case.tokens * case.layers)))
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.8 * columns, 3.5 * rows))
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(len(panels))]
    ends = [draw_on(panel) for draw_on, panel in zip(panels, axes, strict=True)]
    figure.tight_layout(w_pad=3.0, h_pad=2.5)
    for panel, its_ends in zip(axes, ends, strict=True):
        label_ends(panel, its_ends)
    case = base or writing[0]
    what = f"{case.layers} + {case.layers} layers x {case.hidden}, window {case.window}, "
    drawing.footer(figure, results, what + f"{case.globals} global")
    return figure


def _along(cases: Sequence[LEDCase], base: LEDCase, varied: str) -> list[LEDCase]:
    """The cases that differ from `base` in one respect, or not at all, in its order."""
    found = {c for c in cases if replace(c, **{varied: getattr(base, varied)}) == base}
    return sorted(found, key=lambda case: getattr(case, varied))


def _panel(
    results: Results,
    cases: Sequence[LEDCase],
    quantity: str,
    varied: str,
    fits: dict[str, Fit],
) -> Panel:
    """Points; for time joined by lines, for memory beside what the fit says of them."""
    sizes = [getattr(case, varied) for case in cases]

    def draw_on(axes: Axes) -> list[End]:
        ends = []
        for name, colour in COLOURS.items():
            points = [(case, results.get(case, name, STEP[0])) for case in cases]
            line = [
                (getattr(case, varied), value)
                for case, point in points
                if point and (value := getattr(point, quantity)) is not None
            ]
            if len(line) < 2:
                continue
            failed = [getattr(c, varied) for c, p in points if p and p.error == OUT_OF_MEMORY]
            ours, end = name == "longspan", line[-1]
            if quantity == "mib" and name in fits:
                axes.plot(*zip(*line, strict=True), "o", color=colour, zorder=3)
                low, high = min(sizes), max(sizes)
                dense = [low + (high - low) * i // 64 for i in range(65)]
                curve = [fits[name](replace(cases[0], **{varied: n})) for n in dense]
                axes.plot(dense, curve, color=colour, linewidth=1.2)
            else:
                end = drawing.plot_line(axes, line, failed, colour, front=ours)
            ends.append(drawing.name_end(end, CONTENDERS[name].label, colour, bold=ours))
        axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
        other = cases[0].target if varied == "tokens" else cases[0].tokens
        if quantity == "ms":
            axes.set_title("Time of a training step")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: drawing.duration(y)))
        else:
            axes.set_title("Its peak memory, and the fit" if fits else "Its peak memory")
            drawing.memory_from_zero(axes)
        what = "tokens read, {:,} written" if varied == "tokens" else "tokens written, {:,} read"
        axes.set_xlabel(what.format(other))
        # Of those too near to one another to be read, the larger is named.
        axes.set_xticks([n for n in sizes if not any(n < m < n + max(sizes) / 12 for m in sizes)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: drawing.count(n)))
        axes.set_xlim(0, max(sizes) * 1.35)
        return ends

    return draw_on


def _consists(case: LEDCase, fits: dict[str, Fit]) -> Panel:
    """What the memory of a step grows with, by the fit."""

    def draw_on(axes: Axes) -> list[End]:
        for at, made in enumerate(fits.values()):
            parts, left = made.parts(case), 0.0
            for term, colour in zip(TERMS, _TERM_COLOURS, strict=True):
                label = term.replace("^2", "²") if at == 0 else None
                mib = parts.get(term, 0.0)
                axes.barh(at, mib, left=left, color=colour, height=0.6, label=label)
                left += mib
            error = f"within {100 * made.error:.0f}%"
            axes.annotate(
                error, (left, at), (3, 0), textcoords="offset points", va="center", color=_PALE
            )
        axes.set_yticks(range(len(fits)), [CONTENDERS[name].label for name in fits])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        high = axes.get_xlim()[1] * 1.15
        axes.set_xlim(0, high)
        axes.xaxis.set_major_locator(MultipleLocator(2.0 ** round(math.log2(high / 4))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: drawing.memory(x) if x else "0"))
        axes.set_title("What it grows with")
        axes.set_xlabel(f"{case}, by the fit")
        axes.legend(loc="upper right", frameon=False, fontsize=7, handlelength=1, ncols=2)
        return []

    return draw_on


def _writing(results: Results, case: LEDCase) -> Panel:
    def draw_on(axes: Axes) -> list[End]:
        names = [name for name in COLOURS if results.value(case, name, FORWARD[0]) is not None]
        for at, name in enumerate(names):
            ms = results.value(case, name, FORWARD[0])
            assert ms is not None
            axes.barh(at, ms, color=COLOURS[name], height=0.6)
        axes.set_yticks(range(len(names)), [CONTENDERS[name].label for name in names])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: drawing.duration(x)))
        axes.set_title("Generation")
        axes.set_xlabel(f"{case}; {case.layers} + {case.layers} layers x {case.hidden}")
        return []

    return draw_on
