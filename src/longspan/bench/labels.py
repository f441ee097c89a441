"""Names written at the ends of lines, where they hide as little as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox


@dataclass(frozen=True)
class End:
    """The last point of a line, and the name to write there."""

    x: float
    y: float
    name: str
    colour: str
    bold: bool = False


# Offset in points and alignment, the preferred place first.
_PLACES = (
    ((7, 0), "left", "center"),
    ((7, 5), "left", "center"),
    ((7, -6), "left", "center"),
    ((7, -12), "left", "center"),
    ((7, -18), "left", "center"),
    ((7, -24), "left", "center"),
    ((7, -30), "left", "center"),
    ((-2, 5), "right", "bottom"),
    ((0, 7), "center", "bottom"),
    ((-7, 12), "right", "bottom"),
    ((4, -6), "left", "top"),
)


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write each name beside the end of its line. The layout must be final by then."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    inked, frame = _inked(axes), axes.get_window_extent(renderer)
    taken: list[Bbox] = []
    for end in sorted(ends, key=lambda end: (-end.x, -end.y)):
        tried = []
        for offset, horizontal, vertical in _PLACES:
            text = axes.annotate(
                end.name,
                (end.x, end.y),
                xytext=offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                color=end.colour,
                weight="bold" if end.bold else "normal",
                annotation_clip=False,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
                zorder=5,
            )
            box = text.get_window_extent(renderer)
            inside = np.all((inked >= box.min) & (inked <= box.max), axis=1).sum()
            outside = max(0.0, frame.x0 - box.x0) + max(0.0, box.y1 - frame.y1)
            tried.append((inside + outside + 1000 * box.count_overlaps(taken), text, box))
        best = min(range(len(tried)), key=lambda i: tried[i][0])
        for i, (_, text, _) in enumerate(tried):
            if i != best:
                text.remove()
        taken.append(tried[best][2])


def label_column(axes: Axes, ends: Sequence[End]) -> None:
    """Write the names below each other at the right, in the order of the ends and joined to them:
    for many lines that end close together. The layout must be final by then."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    if not ends:
        return
    points = 72 / figure.dpi
    ends = sorted(ends, key=lambda end: end.y)
    at = axes.transData.transform([(end.x, end.y) for end in ends]) * points
    column = at[:, 0].max() + 20
    size = 8.0
    frame = axes.get_window_extent()
    # Not over the names of the ticks, nor over the title.
    bounds = frame.y0 * points + size / 2, frame.y1 * points - size / 2
    places = _spread(at[:, 1], 1.25 * size, *bounds)
    for end, (x, y), place in zip(ends, at, places, strict=True):
        axes.annotate(
            end.name,
            (end.x, end.y),
            xytext=(column - x, place - y),
            textcoords="offset points",
            va="center",
            size=size,
            color=end.colour,
            weight="bold" if end.bold else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "linewidth": 0.7,
                "shrinkA": 0,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _spread(
    places: np.ndarray, gap: float, low: float = -np.inf, high: float = np.inf
) -> np.ndarray:
    """Ascending places moved apart by at least `gap`, as little as possible, and to between
    `low` and `high`, or to above `low` where there is no room for all."""
    count = len(places)
    wanted = places - gap * np.arange(count)  # now they need not be apart, only in order
    moved = [
        max(min(wanted[a : b + 1].mean() for b in range(i, count)) for a in range(i + 1))
        for i in range(count)
    ]
    highest = max(low, high - gap * (count - 1))
    return np.clip(moved, low, highest) + gap * np.arange(count)


def _inked(axes: Axes) -> np.ndarray:
    """Points along every line drawn so far, [points, 2] in pixels."""
    points = [np.empty((0, 2))]
    for line in axes.get_lines():
        corners = axes.transData.transform(np.asarray(line.get_xydata(), dtype=float))
        for start, stop in pairwise(corners):
            points.append(np.linspace(start, stop, 64))
        points.append(corners)
    return np.concatenate(points)
