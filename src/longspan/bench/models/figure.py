"""The figure of whole models, drawn from a results file alone."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedFormatter,
    FuncFormatter,
    LogLocator,
    NullLocator,
)

from longspan.bench import drawing
from longspan.bench.benchmark import OUT_OF_MEMORY, PASSES, Pass
from longspan.bench.labels import End, label_ends
from longspan.bench.models.cases import ModelCase
from longspan.bench.models.claims import in_proportion
from longspan.bench.models.contenders import CONTENDERS
from longspan.bench.store import Results

COLOURS = {
    "longspan": "#0072B2",
    "longspan-lean": "#332288",
    "longspan-patch": "#56B4E9",
    "longformer": "#D55E00",
    "modernbert": "#009E73",
    "roberta": "#555555",
}
_PASS_NAMES = dict(zip(PASSES, ("forward", "training step"), strict=True))

Panel = Callable[[Axes], list[End]]


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw what there is data for; `stem` is the path without its ending."""
    with drawing.look():
        return drawing.save({"": _figure(results)}, stem)


def _figure(results: Results) -> Figure | None:
    """Speed and memory against length, and what the padding of an uneven batch costs."""
    even = [case for case, _, _ in results.points if case.shortest is None]
    panels: list[Panel] = []
    # The size that most was measured of.
    size = Counter(_size(case) for case in even).most_common(1)[0][0] if even else None
    for kind in PASSES:
        chosen = _cases(results, size, kind)
        if len(chosen) > 1:
            panels.append(_length_panel(results, chosen, kind, "speed"))
    for kind in reversed(PASSES):
        chosen = _cases(results, size, kind)
        if len(chosen) > 1:
            panels.append(_length_panel(results, chosen, kind, "memory"))
            break
    uneven = {case: None for case, name, _ in results.points if name == "longspan-unpadded"}
    panels += [_uneven_panel(results, case, size) for case in uneven]
    if not panels:
        return None
    columns = 3 if len(panels) == 3 else 2
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.8 * columns, 3.5 * rows))
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(len(panels))]
    ends = [draw_on(panel) for draw_on, panel in zip(panels, axes, strict=True)]
    figure.tight_layout(w_pad=3.0, h_pad=2.5)
    for panel, its_ends in zip(axes, ends, strict=True):
        label_ends(panel, its_ends)
    case = size or next(iter(uneven))
    drawing.footer(
        figure,
        results,
        f"{case.layers} layers x {case.hidden}, window {case.window}, {case.globals} global",
    )
    return figure


def _size(case: ModelCase) -> ModelCase:
    """The model of a case, without its batch."""
    return replace(case, tokens=0, batch=0, shortest=None)


def _cases(results: Results, size: ModelCase | None, kind: Pass) -> list[ModelCase]:
    """The even batches that models of one size were measured on, by length."""
    found = {c for c, _, k in results.points if k == kind and c.shortest is None}
    return sorted((c for c in found if _size(c) == size), key=lambda c: c.tokens)


def _length_panel(results: Results, cases: Sequence[ModelCase], kind: Pass, quantity: str) -> Panel:
    def value(case: ModelCase, name: str) -> float | None:
        ms, mib = (results.value(case, name, kind, unit) for unit in ("ms", "mib"))
        if quantity == "memory":
            return mib
        return None if ms is None else case.tokens_per_second(ms)

    def draw_on(axes: Axes) -> list[End]:
        ends, crossed = [], False
        for name, colour in COLOURS.items():
            ours = name == "longspan"
            line = [(case.tokens, y) for case in cases if (y := value(case, name)) is not None]
            if not line:
                continue
            failed = [c.tokens for c in cases if _failed(results, c, name, kind)]
            crossed = crossed or bool(failed)
            end = drawing.plot_line(axes, line, failed, colour, front=ours)
            ends.append(drawing.name_end(end, CONTENDERS[name].label, colour, bold=ours))
        what = "Tokens per second" if quantity == "speed" else "Peak memory"
        axes.set_title(f"{what}, {_PASS_NAMES[kind]}")
        axes.set_xlabel("tokens x documents")
        _value_axis(axes, quantity)
        drawing.length_axis(axes, [case.tokens for case in cases])
        batches = [f"{drawing.count(case.tokens)} x {case.batch}" for case in cases]
        axes.xaxis.set_major_formatter(FixedFormatter(batches))
        if crossed:
            cross = Line2D([], [], color="#444444", linestyle="", **drawing.CROSS)
            axes.legend([cross], ["out of memory"], frameon=False, loc="lower left")
        return ends

    return draw_on


def _value_axis(axes: Axes, quantity: str) -> None:
    low, high = axes.get_ylim()
    if quantity == "memory" and low > 0 and high < 4 * low:
        # Powers of two would leave a single tick; from zero, lengths can be compared.
        axes.set_ylim(0, high * 1.1)
        drawing.memory_from_zero(axes)
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / (high / low) ** 0.08, high * (high / low) ** 0.08)
    if quantity == "memory":
        drawing.memory_axis(axes)
    else:
        few = high / low < 30
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0, 3.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: drawing.amount(y)))
    axes.yaxis.set_minor_locator(NullLocator())


def _failed(results: Results, case: ModelCase, name: str, kind: Pass) -> bool:
    point = results.get(case, name, kind)
    return point is not None and point.error == OUT_OF_MEMORY


def _uneven_panel(results: Results, case: ModelCase, size: ModelCase | None) -> Panel:
    """Time of the batch padded and unpadded, and what its tokens take in an even batch."""

    def draw_on(axes: Axes) -> list[End]:
        rows: list[tuple[str, float, str]] = []
        share = case.real_tokens / case.places
        marks: list[tuple[int, float]] = []
        for kind in PASSES:
            padded = results.value(case, "longspan", kind)
            unpadded = results.value(case, "longspan-unpadded", kind)
            if padded is None or unpadded is None:
                continue
            rows.append((f"{_PASS_NAMES[kind]},\npadded", padded, "#B9CFDD"))
            fair = in_proportion(results, case, kind)
            marks += [] if fair is None else [(len(rows), fair)]
            rows.append((f"{_PASS_NAMES[kind]},\nunpadded", unpadded, COLOURS["longspan"]))
        for at, (_, ms, colour) in enumerate(rows):
            axes.barh(at, ms, color=colour, height=0.66)
        for at, ms in marks:
            axes.plot([ms, ms], [at - 0.42, at + 0.42], color="#D55E00", linewidth=2)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: drawing.duration(x)))
        of_size = "" if size is None or case.layers == size.layers else f", {case.layers} layers"
        axes.set_title(f"{case.batch} documents of uneven length{of_size}")
        axes.set_xlabel(
            f"{case.shortest:,} to {case.tokens:,} tokens, {share:.0%} of the padded batch is text"
        )
        mark = Line2D([], [], color="#D55E00", linewidth=2, label="as many tokens, even")
        axes.legend(handles=[mark], frameon=False, loc="upper right")
        return []

    return draw_on
