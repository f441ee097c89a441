"""What `longspan study positions` found, as a table and as a picture, from its data alone."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.table import Table

from longspan import machine
from longspan.analyze.figures import BLUE, GREY, ORANGE
from longspan.bench.drawing import look, save
from longspan.bench.labels import End, label_ends
from longspan.bench.report import make_table
from longspan.tasks.positions import CONTROL, HEAD, POSITIONS, RANDOM, SHORT, Study

_GREEN = "#009E73"
_COLUMNS = ("", "bits/character", "bits/token", "Table 5, base", "updates", "tokens", "minutes")


def describe(result: Study) -> dict[str, Any]:
    """Everything that tables and figures are made of, as plain values."""
    return {
        **asdict(result),
        **machine.record(),
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    return [
        [
            arm["label"],
            f"{arm['bits_per_character']:.4f}",
            f"{arm['bits_per_token']:.3f}",
            "" if arm["paper"] is None else f"{arm['paper']:.3f}",
            f"{arm['updates']:,}" if arm["updates"] else "",
            f"{arm['tokens']:,}" if arm["tokens"] else "",
            f"{arm['seconds'] / 60:.1f}" if arm["seconds"] else "",
        ]
        for arm in found["arms"]
    ]


def table(found: dict[str, Any]) -> Table:
    made = make_table("Masked tokens")
    for place, name in enumerate(_COLUMNS):
        made.add_column(name, justify="right" if place else "left")
    for row in rows(found):
        made.add_row(*row)
    return made


def markdown(found: dict[str, Any]) -> str:
    lines = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *rows(found)]
    made = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    claims = "".join(f"- {'yes' if c['holds'] else 'no'}: {c['text']}\n" for c in found["claims"])
    return (
        f"{found['source']} made {found['length']:,} tokens long, windows of {found['window']:,}; "
        f"{found['valid_characters']:,} characters of validation text, "
        f"{found['valid_tokens']:,} tokens, the same ones hidden for all.\n\n{made}\n{claims}"
    )


def draw(found: dict[str, Any], stem: Path) -> list[Path]:
    """Writes PNG and SVG: where each arm ended, and how those that were trained got there."""
    with look():
        figure = Figure(figsize=(10.4, 3.4))
        bars, curves = figure.subplots(1, 2, width_ratios=[3, 2])
        _draw_bars(bars, found)
        ends = _draw_curves(curves, found)
        figure.tight_layout(w_pad=2.5)
        label_ends(curves, ends)
        return save({"": figure}, stem)


def _colour(name: str) -> str:
    return {RANDOM: ORANGE, SHORT: GREY, HEAD: GREY, CONTROL: _GREEN}.get(name, BLUE)


def _draw_bars(axes: Axes, found: dict[str, Any]) -> None:
    arms = found["arms"]
    for place, arm in enumerate(arms):
        bits = arm["bits_per_character"]
        axes.barh(place, bits, height=0.6, color=_colour(arm["name"]))
        axes.annotate(
            f"{bits:.3f}",
            (bits, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(arms)), [arm["label"] for arm in arms])
    axes.set_title(f"Bits per character, {found['source']}")
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _draw_curves(axes: Axes, found: dict[str, Any]) -> list[End]:
    """Arms that go on from the short model; the others began with something else. While training,
    evaluations may read part of the text only, so that what all of it gave is no point here."""
    ends = []
    for arm in found["arms"]:
        if not arm["curve"] or arm["name"] in (HEAD, SHORT):
            continue
        x, y = zip(*arm["curve"], strict=True)
        style = "--" if arm["name"] == POSITIONS else "-"
        axes.plot(x, y, marker="o", linestyle=style, color=_colour(arm["name"]))
        ends.append(End(x[-1], y[-1], arm["name"], _colour(arm["name"])))
    axes.set(title="While training", xlabel="updates", xlim=(0, axes.get_xlim()[1] * 1.45))
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    return ends
