"""The figures of the family, drawn from a results file alone."""

from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from longspan.bench import drawing
from longspan.bench.benchmark import OUT_OF_MEMORY, PASSES, Pass
from longspan.bench.family.cases import DECODERS, ENCODERS
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.labels import End, label_column, label_ends
from longspan.bench.store import Results

# By label, so that what is for encoders and for decoders looks the same in both.
COLOURS = {
    "window": "#0072B2",
    "Performer": "#D55E00",
    "Linformer": "#009E73",
    "BigBird": "#CC79A7",
    "Poolingformer": "#E69F00",
    "sparse, strided": "#009E73",
    "sparse, fixed": "#7FBF7B",
    "adaptive span": "#B2182B",
    "blockwise": "#56B4E9",
    "BP": "#B5A642",
    "Funnel": "#9AA0A6",
    "Shortformer": "#F28E8E",
    "Cluster-Former": "#B2182B",
    "Reformer": "#8B5A2B",
    "Routing": "#7A4FBF",
    "dense, SDPA": "#555555",
}
_FRONT = "window"  # where lines coincide, ours is the one to see


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw what there is data for; `stem` is the path without its ending."""
    with drawing.look():
        return drawing.save({"": _figure(results), "-errors": _errors(results)}, stem)


def _errors(results: Results) -> Figure | None:
    """How far mechanisms are from softmax attention, by what they may look at."""
    found = results.header.get("errors", [])
    kinds = list(dict.fromkeys(one["documents"] for one in found))
    if not kinds:
        return None
    figure = Figure(figsize=(4.8 * len(kinds), 3.8))
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    all_ends = []
    for axes, documents in zip(panels, kinds, strict=True):
        own = [one for one in found if one["documents"] == documents]
        axes.set_yscale("log")
        ends = []
        for name in dict.fromkeys(one["mechanism"] for one in own):
            line = sorted((one["budget"], one["error"]) for one in own if one["mechanism"] == name)
            label = CONTENDERS[name].label
            end = drawing.plot_line(axes, line, [], COLOURS[label], front=label == _FRONT)
            ends.append(drawing.name_end(end, label, COLOURS[label], bold=label == _FRONT))
        all_ends.append(ends)
        axes.set(
            title=f"Error against softmax: {own[0]['tokens']:,} {documents} tokens",
            xlabel="keys or features per token",
        )
        drawing.length_axis(axes, sorted({one["budget"] for one in own}))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g}%"))
    figure.tight_layout(w_pad=3.0)
    for axes, ends in zip(panels, all_ends, strict=True):
        label_column(axes, ends)
    return figure


def _figure(results: Results) -> Figure | None:
    """Time and memory against length: encoders, then decoders, forward and training."""
    lengths = sorted({case.tokens for case, _, _ in results.points})
    if len(lengths) < 2:
        return None
    rows = list(product((False, True), PASSES))
    figure = Figure(figsize=(9.6, 3.5 * len(rows)))
    panels = figure.subplots(len(rows), 2)
    ends: list[list[End]] = []
    for both, (causal, kind) in zip(panels, rows, strict=True):
        for axes, quantity in zip(both, ("ms", "mib"), strict=True):
            ends.append(_lines(axes, results, causal, kind, quantity))
            whose = "Decoder" if causal else "Encoder"
            when = "forward" if kind == "forward" else "training"
            what = "time" if quantity == "ms" else "peak memory"
            axes.set(title=f"{whose} layer, {when}: {what}", xlabel="tokens")
            drawing.length_axis(axes, lengths)
            axes.yaxis.set_minor_locator(NullLocator())
            if quantity == "ms":
                axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: drawing.duration(y)))
            else:
                drawing.memory_axis(axes)
    figure.tight_layout(w_pad=3.0, h_pad=2.0)
    for axes, its_ends in zip(panels.flatten(), ends, strict=True):
        label_column(axes, [end for end in its_ends if end.x == lengths[-1]])
        label_ends(axes, [end for end in its_ends if end.x < lengths[-1]])
    size = next(case for case, _, _ in results.points)
    drawing.footer(figure, results, f"{size.heads} heads of {size.hidden // size.heads}")
    return figure


def _lines(axes: Axes, results: Results, causal: bool, kind: Pass, quantity: str) -> list[End]:
    """A line for each mechanism; where their names are to be written."""
    axes.set_yscale("log")
    cases = {case for case, _, _ in results.points if case.causal == causal}
    cases = sorted(cases, key=lambda case: case.tokens)
    ends = []
    for name in DECODERS if causal else ENCODERS:
        label = CONTENDERS[name].label
        colour = COLOURS[label]
        values = [(c.tokens, results.value(c, name, kind, quantity)) for c in cases]
        line = [(n, value) for n, value in values if value is not None]
        if not line:
            continue
        points = [(case.tokens, results.get(case, name, kind)) for case in cases]
        failed = [n for n, point in points if point and point.error == OUT_OF_MEMORY]
        end = drawing.plot_line(axes, line, failed, colour, front=label == _FRONT)
        ends.append(drawing.name_end(end, label, colour, bold=label == _FRONT))
    return ends
