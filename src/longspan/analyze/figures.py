"""Pictures of patterns and of costs, each drawn from data that `pattern` or a measurement gives."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from longspan.analyze.pattern import receptive_field, seen_by_layer
from longspan.bench.drawing import LOOK
from longspan.bench.labels import End, label_ends
from longspan.models import LongspanConfig

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
_LOOK: Any = LOOK | {"axes.grid": False}
_NO_METADATA: Any = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element to stand in a page."""
    file = io.StringIO()
    with matplotlib.rc_context(_LOOK):
        figure.savefig(file, format="svg", bbox_inches="tight", metadata=_NO_METADATA)
    return file.getvalue()[file.getvalue().index("<svg") :]


@matplotlib.rc_context(_LOOK)
def attention_pattern(config: LongspanConfig, tokens: int, piece: int) -> Figure:
    """Who sees whom in the first layer: a whole pass to scale, and its beginning enlarged.

    Squares are pieces of `piece` tokens that a short model would read one by one.
    """
    part = min(tokens, 4 * piece)
    figure = Figure(figsize=(8.4, 4.1))
    whole, zoom = figure.subplots(1, 2)
    for axes, shown in ((whole, tokens), (zoom, part)):
        if axes is zoom:
            _draw_seen(axes, config, shown)
        else:
            _draw_band(axes, config, shown)
        for start in range(0, shown, piece):
            size = min(piece, shown - start)
            square = Rectangle((start, start), size, size, fill=False, ec=ORANGE, lw=1.0)
            axes.add_patch(square)
        axes.set(xlim=(0, shown), ylim=(shown, 0), aspect="equal")
        axes.set_xlabel("token that is seen")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([0, shown // 2, shown]))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    whole.set_ylabel("token that looks")
    whole.set_title(f"A pass of {tokens:,} tokens, to scale")
    zoom.set_title(f"Its first {part:,} tokens")
    handles = [
        Rectangle((0, 0), 1, 1, color=BLUE, alpha=0.75),
        Rectangle((0, 0), 1, 1, fill=False, ec=ORANGE),
    ]
    names = ["seen in one layer", f"pieces of {piece:,} tokens"]
    figure.tight_layout(w_pad=2.5, rect=(0, 0.06, 1, 1))
    figure.legend(handles, names, loc="lower center", ncols=2, frameon=False)
    return figure


def _draw_band(axes: Axes, config: LongspanConfig, tokens: int) -> None:
    """The window as an outline: at this scale dilation and single tokens cannot be seen."""
    reach = receptive_field(config)[0]
    ends = [0, tokens]
    axes.fill_betweenx(
        ends,
        [end - reach.left for end in ends],
        [end + reach.right for end in ends],
        color=BLUE,
        alpha=0.75,
        lw=0,
    )


def _draw_seen(axes: Axes, config: LongspanConfig, tokens: int) -> None:
    seen = seen_by_layer(config, tokens)[0]
    axes.imshow(
        seen.numpy(),
        cmap=ListedColormap(["white", BLUE]),
        alpha=0.75,
        extent=(0, tokens, tokens, 0),
        interpolation="nearest",
    )


@matplotlib.rc_context(_LOOK)
def receptive_fields(config: LongspanConfig, piece: int) -> Figure:
    """How many tokens around it a token's state is informed of, layer by layer."""
    reaches = receptive_field(config)
    figure = Figure(figsize=(8.4, 0.36 * len(reaches) + 1.3))
    axes = figure.subplots()
    layers = range(1, len(reaches) + 1)
    axes.barh(
        layers,
        [reach.left + reach.right for reach in reaches],
        left=[-reach.left for reach in reaches],
        color=BLUE,
        height=0.62,
    )
    for layer, reach in zip(layers, reaches, strict=True):
        axes.annotate(
            f"{reach.tokens:,} tokens",
            (reach.right, layer),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color="#444444",
        )
    for side in (-piece / 2, piece / 2):
        axes.axvline(side, color=ORANGE, lw=1.4, ls=(0, (4, 2)))
    axes.annotate(
        f"a piece of {piece:,}",
        (-piece / 2, 0.45),
        xytext=(-5, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=ORANGE,
    )
    furthest = max(reaches[-1].left, piece)
    axes.set(xlim=(-1.08 * furthest, 1.45 * max(reaches[-1].right, piece)), ylim=(0, None))
    axes.set_yticks(list(layers), [f"layer {layer}" for layer in layers])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:+,.0f}" if value else "0")
    )
    axes.set_xlabel("tokens before and behind")
    axes.set_title("Receptive field of a token in the middle of a document")
    figure.tight_layout()
    return figure


@matplotlib.rc_context(_LOOK)
def scaling(lines: Mapping[str, Sequence[tuple[int, float, float]]], colours: Mapping[str, str]):
    """Time and memory against length. Lines hold (tokens, seconds, MiB) by name."""
    figure = Figure(figsize=(8.4, 3.4))
    panels = figure.subplots(1, 2)
    titles = ("Time of one pass, seconds", "Memory it needs, MiB")
    ends: list[list[End]] = [[], []]
    for index, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        for name, points in lines.items():
            x = [point[0] for point in points]
            y = [point[1 + index] for point in points]
            first = name == next(iter(lines))
            axes.plot(x, y, "o-", color=colours[name], zorder=3 if first else 2)
            label = name.replace(" ", "\n", 1) if len(name) > 15 else name
            ends[index].append(End(x[-1], y[-1], label, colours[name], bold=first))
        lengths = sorted({point[0] for points in lines.values() for point in points})
        axes.set(xscale="log", yscale="log", title=title, xlabel="tokens")
        axes.set_xlim(lengths[0] * 0.8, lengths[-1] * (lengths[-1] / lengths[0]) ** 0.42 * 1.1)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.grid(visible=True)
    figure.tight_layout(w_pad=2.5)
    for axes, its_ends in zip(panels, ends, strict=True):
        label_ends(axes, its_ends)
    return figure
