"""What `longspan study summaries` found, as a table and as a picture, from its data alone."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from longspan import machine
from longspan.analyze.figures import BLUE, GREY, ORANGE
from longspan.bench.drawing import look, save
from longspan.bench.report import make_table, parameter_count
from longspan.tasks.lengths import PAPER, Study

_MEASURES = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
}
_COLUMNS = (
    "reads",
    *_MEASURES.values(),
    "ROUGE-1 gained",
    "test loss",
    "cut",
    "updates",
    "minutes",
    "paper, 1 / 2",
)


def describe(result: Study) -> dict[str, Any]:
    """Everything that tables and figures are made of, as plain values."""
    return {
        **asdict(result),
        **machine.record(),
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Percent, with half of what 95% of resampled sets of examples stay within."""
    lead = ["first words", *_scores(found.get("lead"))]
    made = [lead + [""] * (len(_COLUMNS) - len(lead))]
    for arm in found["arms"]:
        gain, paper = arm.get("gain"), PAPER.get(arm["length"])
        made.append(
            [
                arm["name"],
                *_scores(arm.get("scores")),
                "" if gain is None else _shown(gain["rouge1"], "+"),
                f"{arm['test_loss']:.3f}",
                f"{arm['cut']:.0%}",
                f"{arm['updates']:,}",
                f"{arm['seconds'] / 60:.1f}",
                "" if paper is None else f"{paper[0]} / {paper[1]}",
            ]
        )
    return made


def _scores(scores: dict[str, Any] | None) -> list[str]:
    return [""] * len(_MEASURES) if scores is None else [_shown(scores[name]) for name in _MEASURES]


def _shown(interval: dict[str, float], sign: str = "") -> str:
    half = (interval["high"] - interval["low"]) / 2
    return f"{100 * interval['value']:{sign}.2f} ± {100 * half:.1f}"


def table(found: dict[str, Any]) -> Table:
    made = make_table(title(found))
    for place, name in enumerate(_COLUMNS):
        made.add_column(name, justify="right" if place else "left")
    for row in rows(found):
        made.add_row(*row)
    return made


def title(found: dict[str, Any]) -> str:
    size = f"{parameter_count(found['parameters'])} parameters"
    before = found.get("practised")
    practice = f" after {before:,} updates of practice" if before else ""
    return f"Summaries of {found['data']}, {size}{practice}, {found['examples']} test texts"


def markdown(found: dict[str, Any]) -> str:
    lines = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *rows(found)]
    made = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{title(found)}; {found['machine']}.\n\n{made}"


def draw(found: dict[str, Any], stem: Path) -> list[Path]:
    """Writes PNG and SVG: ROUGE against tokens read, beside the documents' first words."""
    if "lead" not in found:
        return []
    with look():
        figure = Figure(figsize=(8.6, 3.2))
        for axes, name in zip(figure.subplots(1, 2), ("rouge1", "rouge2"), strict=True):
            _draw(axes, found, name)
        figure.suptitle(title(found), x=0.02, ha="left", fontsize=10)
        figure.tight_layout(w_pad=2.5)
        return save({"": figure}, stem)


def _draw(axes: Axes, found: dict[str, Any], name: str) -> None:
    arms = found["arms"]
    for place, arm in enumerate(arms):
        own = {key: 100 * value for key, value in arm["scores"][name].items()}
        axes.bar(place, own["value"], width=0.6, color=BLUE)
        axes.plot([place, place], [own["low"], own["high"]], color=ORANGE, linewidth=1.5)
        axes.annotate(
            f"{own['value']:.2f}",  # a bar of nothing is not seen
            (place, max(own["value"], own["high"])),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            zorder=5,
        )
    lead = 100 * found["lead"][name]["value"]
    axes.axhline(lead, color=GREY, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"first words\n{lead:.2f}",
        (len(arms) - 0.4, lead),
        xytext=(3, 0),
        textcoords="offset points",
        color=GREY,
        fontsize=8,
        va="center",
        annotation_clip=False,
    )
    axes.set_xticks(range(len(arms)), [arm["name"] for arm in arms])
    axes.set_xlim(-0.6, len(arms) - 0.4)
    axes.set(
        title=_MEASURES[name], xlabel="tokens read", ylim=(0, max(1.0, axes.get_ylim()[1] * 1.1))
    )
    axes.grid(axis="x", visible=False)
