"""What a study of Long Range Arena found, beside what was published, from its data alone."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.table import Table

from longspan.analyze.figures import GREY
from longspan.bench.drawing import look, save, time_unit
from longspan.bench.family.contenders import MECHANISMS
from longspan.bench.family.figure import COLOURS
from longspan.bench.labels import End, label_column
from longspan.bench.report import make_table, parameter_count
from longspan.data import listops
from longspan.tasks.kinds import Study
from longspan.train.checkpoint import read_json

CITED = "Tay et al., Long Range Arena, ICLR 2021, Table 1"
# Accuracy in per cent by kind: its name there, ListOps, Text.
PUBLISHED = {
    "dense": ("Transformer", 36.37, 64.27),
    "window": ("Longformer", 35.63, 62.85),
    "linformer": ("Linformer", 35.70, 53.94),
    "performer": ("Performer", 18.01, 65.40),
    "bigbird": ("BigBird", 36.05, 64.02),
    "reformer": ("Reformer", 37.27, 56.10),
}
# Those published there that are none of our encoders.
OTHERS = (
    ("Local Attention", 15.82, 52.98),
    ("Sparse Trans.", 17.07, 63.58),
    ("Linear Trans.", 16.13, 65.90),
    ("Sinkhorn Trans.", 33.67, 61.20),
    ("Synthesizer", 36.99, 61.68),
)
_COLUMN = {"lra-listops": 1, "lra-text": 2}
_COLUMNS = (
    *("attention", "test", "±", "valid", "published", "parameters", "updates", "peak MiB"),
    *("minutes", "tokens/s"),  # not of runs that shared a device
)
# Seen on bars of every colour.
_DIAMOND: Any = {"marker": "D", "color": "white", "markeredgecolor": "#222222", "markersize": 5}


def describe(result: Study, shared: bool = False) -> dict[str, Any]:
    """Everything that tables and figures are made of, as plain values; no times and speeds of runs
    that `shared` a device. Where and with what is that of the runs, which may be elsewhere."""
    found = asdict(result)
    made = [arm.pop("made") for arm in found["arms"]]
    if shared:
        for arm in found["arms"]:
            del arm["seconds"], arm["tokens_per_second"]
            arm["curve"] = [(updates, None, value) for updates, _, value in arm["curve"]]
    if result.recipe == "lra-listops":
        found["by_operator"] = listops.by_operator(listops.examples("test", result.examples))
    return {
        **found,
        "shared": shared,
        "published": {k: v[_COLUMN[result.recipe]] for k, v in PUBLISHED.items()},
        "cited": CITED,
        "machine": ", ".join(dict.fromkeys(one["machine"] for one in made)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "made": [one for place, one in enumerate(made) if one not in made[:place]],
    }


def read_study(path: Path) -> dict[str, Any] | None:
    """What `describe` gave, from the file it was written to; None of a file of something else."""
    try:
        found = read_json(path)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("recipe") not in _COLUMN:
        return None
    if not found["arms"]:
        raise ValueError(f"{path} cannot be drawn: no kind of attention came to its end")
    return found


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The best first; accuracies in per cent, as they were published."""
    made = []
    for arm in sorted(found["arms"], key=lambda arm: -arm["test"]):
        published = found["published"].get(arm["kind"])
        made.append(
            [
                arm["kind"],
                f"{100 * arm['test']:.2f}",
                f"{100 * margin(arm['test'], found['examples']):.2f}",
                f"{100 * arm['valid']:.2f}",
                "" if published is None else f"{published:.2f}",
                parameter_count(arm["parameters"]),
                f"{arm['updates']:,}",
                f"{arm['peak_mib']:,.0f}",
            ]
        )
        if not found["shared"]:
            made[-1] += [f"{arm['seconds'] / 60:.1f}", f"{arm['tokens_per_second']:,.0f}"]
    return made


def _columns(found: dict[str, Any]) -> tuple[str, ...]:
    return _COLUMNS[:-2] if found["shared"] else _COLUMNS


def margin(share: float, examples: int) -> float:
    """Half the 95% interval that so many examples leave open."""
    return 1.96 * (share * (1 - share) / examples) ** 0.5


def table(found: dict[str, Any]) -> Table:
    made = make_table(f"{found['recipe']}: {found['measure']}, %.{_floor(found)}")
    for place, name in enumerate(_columns(found)):
        made.add_column(name, justify="right" if place else "left")
    for row in rows(found):
        made.add_row(*row)
    return made


def markdown(found: dict[str, Any]) -> str:
    columns = _columns(found)
    lines = [columns, ("---", *["---:"] * (len(columns) - 1)), *rows(found)]
    made = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    failed = "".join(f"- {kind} failed: {why}\n" for kind, why in found["failed"].items())
    return (
        f"{found['recipe']}, {found['measure']} in per cent on {found['examples']:,} test "
        f"examples, ± 95% of them alone; one seed. Published: {found['cited']}. On "
        f"{found['machine']}.{_floor(found)}\n\n{made}" + (f"\n{failed}" if failed else "")
    )


def _floor(found: dict[str, Any]) -> str:
    """A sentence about what needs no attention at all, where that is known."""
    if (share := found.get("by_operator")) is None:
        return ""
    return f" Answering by the first operator alone is right for {100 * share:.2f}%."


def draw(found: dict[str, Any], stem: Path) -> list[Path]:
    """Writes PNG and SVG: accuracies beside the published ones, and how they were reached."""
    with look():
        figure = Figure(figsize=(10.4, 1.6 + 0.32 * len(found["arms"])))
        bars, curves = figure.subplots(1, 2)
        _draw_bars(bars, found)
        ends = _draw_curves(curves, found)
        figure.tight_layout(w_pad=2.5)
        label_column(curves, ends)
        return save({"": figure}, stem)


def _colour(kind: str) -> str:
    """That of the family's figures, where it has one."""
    return COLOURS[MECHANISMS[kind].label] if kind in MECHANISMS else GREY


def _draw_bars(axes: Axes, found: dict[str, Any]) -> None:
    arms = sorted(found["arms"], key=lambda arm: -arm["test"])
    for place, arm in enumerate(arms):
        published, own = found["published"].get(arm["kind"]), 100 * arm["test"]
        axes.barh(place, own, height=0.6, color=_colour(arm["kind"]))
        wide = 100 * margin(arm["test"], found["examples"])
        axes.plot([own - wide, own + wide], [place, place], color="#222222", linewidth=1)
        if published is not None:
            axes.plot([published], [place], **_DIAMOND)
    axes.plot([], [], linestyle="", label="published", **_DIAMOND)
    if (share := found.get("by_operator")) is not None:
        label = "answering by the first operator alone"
        axes.axvline(100 * share, color="#222222", linestyle=":", linewidth=1, label=label)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.1), borderpad=0)
    axes.set_yticks(range(len(arms)), [arm["kind"] for arm in arms])
    axes.set_title(f"{found['recipe']}: test {found['measure']}, %, with 95% intervals")
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _draw_curves(axes: Axes, found: dict[str, Any]) -> list[End]:
    """Against time; of runs that shared a device against updates."""
    which, unit, size = 0, "updates", 1.0
    if not found["shared"]:
        which = 1
        unit, size = time_unit(max(arm["curve"][-1][1] for arm in found["arms"]))
    ends = []
    for arm in found["arms"]:
        x, y = zip(*((at[which] / size, 100 * at[2]) for at in arm["curve"]), strict=True)
        colour = _colour(arm["kind"])
        axes.plot(x, y, marker="o", color=colour)
        ends.append(End(x[-1], y[-1], arm["kind"], colour))
    axes.set(title=f"Validation {found['measure']}, %, while training", xlabel=unit)
    last = max(end.x for end in ends)
    axes.set_xlim(0, last * 1.35)
    axes.set_xticks([at for at in MaxNLocator(4).tick_values(0, last) if at <= last])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    return ends
