"""What `longspan compare` found, as a table and as a picture."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from longspan.analyze.figures import BLUE, GREY, ORANGE
from longspan.bench.drawing import look, save
from longspan.tasks.compare import SHORT_ONES, Comparison, Interval


def table(result: Comparison) -> Table:
    name = result.measure.replace("_", " ")
    beyond = f"beyond {result.short:,} tokens"
    made = Table("", f"{name} (95%)", beyond, "training", "examples/s", box=None)
    known = any(one.memory_mib is not None for one in result.contenders)
    if known:  # on a GPU alone
        made.add_column("memory")
    for one in result.contenders:
        memory = "" if one.memory_mib is None else f"{one.memory_mib / 1024:.1f} GiB"
        made.add_row(
            one.name,
            _shown(one.score),
            "" if one.on_long is None else _shown(one.on_long),
            f"{one.train_seconds:,.0f} s",
            f"{one.documents_per_second:,.1f}",
            *([memory] if known else []),
        )
    return made


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def draw(result: Comparison, stem: Path) -> list[Path]:
    """Writes PNG and SVG: how good each contender is, and what it costs to train."""
    with look():
        figure = Figure(figsize=(8.6, 2.9))
        scores, costs = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        _draw_scores(scores, result)
        _draw_costs(costs, result)
        figure.suptitle(_title(result), x=0.02, ha="left", fontsize=10)
        figure.tight_layout()
        return save({"": figure}, stem)


def _title(result: Comparison) -> str:
    return (
        f"{result.examples:,} test examples, {result.long_share:.0%} of them beyond "
        f"{result.short:,} tokens; long means {result.length:,}"
    )


def _draw_scores(axes: Axes, result: Comparison) -> None:
    axes.set_title(f"{result.measure.replace('_', ' ')}, 95% intervals")
    two = 0 < result.long_share < 1  # all documents, and the long ones among them
    for place, one in enumerate(result.contenders):
        colour = GREY if one.name in SHORT_ONES else BLUE
        _draw_interval(axes, one.score, place - 0.12 if two else place, colour, "o")
        if one.on_long is not None and two:
            _draw_interval(axes, one.on_long, place + 0.18, ORANGE, "s")
    if two:
        axes.plot([], [], "s", color=ORANGE, label=f"documents beyond {result.short:,} tokens")
        axes.plot([], [], "o", color=BLUE, label="all documents")
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2)
    axes.set_yticks(range(len(result.contenders)), [one.name for one in result.contenders])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _draw_interval(axes: Axes, own: Interval, place: float, colour: str, marker: str) -> None:
    axes.plot([own.low, own.high], [place, place], "-", color=colour)
    axes.plot([own.value], [place], marker, color=colour, markersize=6)


def _draw_costs(axes: Axes, result: Comparison) -> None:
    axes.set_title("seconds to train")
    for place, one in enumerate(result.contenders):
        colour = GREY if one.name in SHORT_ONES else BLUE
        axes.barh(place, one.train_seconds, height=0.5, color=colour)
        memory = "" if one.memory_mib is None else f", {one.memory_mib / 1024:.1f} GiB"
        axes.annotate(
            f"{one.train_seconds:,.0f} s{memory}",
            (one.train_seconds, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
