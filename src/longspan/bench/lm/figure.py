"""The figure of training steps, drawn from a results file alone."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FuncFormatter

from longspan.bench import drawing
from longspan.bench.benchmark import OUT_OF_MEMORY
from longspan.bench.labels import End, label_ends
from longspan.bench.lm.cases import STEP
from longspan.bench.lm.contenders import CONTENDERS
from longspan.bench.store import Results

COLOURS = {"longspan": "#0072B2", "flex": "#D55E00", "dense": "#555555"}


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw what there is data for; `stem` is the path without its ending."""
    with drawing.look():
        return drawing.save({"": _figure(results)}, stem)


def _figure(results: Results) -> Figure | None:
    """Speed and memory of a step against the length of its rows."""
    cases = sorted({c for c, _, _ in results.points if not c.dilated}, key=lambda c: c.tokens)
    if len(cases) < 2:
        return None
    figure = Figure(figsize=(9.6, 3.5))
    panels = figure.subplots(1, 2)
    ends: list[list[End]] = []
    for axes, quantity in zip(panels, ("ms", "mib"), strict=True):
        its_ends = []
        for name, colour in COLOURS.items():
            line = []
            for case in cases:
                value = results.value(case, name, STEP[0], quantity)
                if value is not None:
                    y = case.characters_per_second(value) if quantity == "ms" else value
                    line.append((case.tokens, y))
            if not line:
                continue
            points = [(case.tokens, results.get(case, name, STEP[0])) for case in cases]
            failed = [n for n, point in points if point and point.error == OUT_OF_MEMORY]
            ours = name == "longspan"
            end = drawing.plot_line(axes, line, failed, colour, front=ours)
            its_ends.append(drawing.name_end(end, CONTENDERS[name].label, colour, bold=ours))
        ends.append(its_ends)
        title = "Characters per second, training step" if quantity == "ms" else "Peak memory"
        axes.set(title=title, xlabel="characters x rows", ylim=(0, axes.get_ylim()[1] * 1.1))
        drawing.length_axis(axes, [case.tokens for case in cases])
        rows = [f"{drawing.count(case.tokens)} x {case.batch}" for case in cases]
        axes.xaxis.set_major_formatter(FixedFormatter(rows))
        if quantity == "ms":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: drawing.amount(y)))
        else:
            drawing.memory_from_zero(axes)
    figure.tight_layout(w_pad=3.0)
    for axes, its_ends in zip(panels, ends, strict=True):
        label_ends(axes, its_ends)
    size = cases[0]
    what = f"{size.layers} layers x {size.hidden}, windows to {size.window}, Muon + AdamW"
    drawing.footer(figure, results, what)
    return figure
