"""Finetuned runs side by side: what each scored over its seeds, as data, table and picture."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from longspan.analyze.figures import BLUE, ORANGE
from longspan.bench.drawing import look, save
from longspan.bench.report import make_table
from longspan.tasks.finetune import spread
from longspan.train.checkpoint import read_json

_COLUMNS = ("", "measure", "test", "valid", "seeds", "tokens", "GiB", "minutes")


def collect(folders: list[Path]) -> list[dict[str, Any]]:
    """Of every run, or folder of runs by seed: scores, settings, and what each seed took."""
    arms = []
    for folder in folders:
        runs = [folder] if (folder / "results.json").exists() else _by_seed(folder)
        if not runs:
            raise ValueError(
                f"{folder} has no results.json, neither itself nor in seed-*: name folders that "
                "`longspan train` has finished"
            )
        recipes = [read_json(run / "recipe.json") for run in runs]
        arms.append(
            {
                "name": folder.name,
                # "best_f1" is at the threshold that is best for the very examples; test examples
                # are told at that of validation.
                "measure": recipes[0]["measure"].removeprefix("best_"),
                "seeds": [_seed(*pair) for pair in zip(runs, recipes, strict=True)],
                "recipe": _shared(recipes[0]),
            }
        )
        for split in ("valid", "test"):
            arms[-1][split] = spread([one[split] for one in arms[-1]["seeds"]])
    return arms


def rows(arms: list[dict[str, Any]], shared: bool) -> list[list[str]]:
    """Minutes last, and none of runs that `shared` a device."""
    return [
        [
            arm["name"],
            arm["measure"].replace("_", " "),
            *(_score(arm, split) for split in ("test", "valid")),
            str(len(arm["seeds"])),
            f"{_mean(arm, 'tokens') / 1e6:.1f}M",
            f"{_mean(arm, 'peak_mib') / 1024:.1f}",
            f"{_mean(arm, 'seconds') / 60:.1f}",
        ][: -1 if shared else None]
        for arm in arms
    ]


def table(arms: list[dict[str, Any]], shared: bool = False) -> Table:
    made = make_table("Finetuned runs: mean and deviation over seeds")
    for place, name in enumerate(_columns(shared)):
        made.add_column(name, justify="left" if place < 2 else "right")
    for row in rows(arms, shared):
        made.add_row(*row)
    return made


def markdown(arms: list[dict[str, Any]], shared: bool = False) -> str:
    columns = _columns(shared)
    lines = [columns, ("---", "---", *["---:"] * (len(columns) - 2)), *rows(arms, shared)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(arms: list[dict[str, Any]], stem: Path) -> list[Path]:
    """Writes PNG and SVG: a dot for each seed and a bar at their mean, a panel for each measure."""
    tasks: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for arm in arms:
        tasks.setdefault((arm["recipe"]["name"], arm["measure"]), []).append(arm)
    with look():
        columns = min(2, len(tasks))
        sizes = list(map(len, tasks.values()))
        # In inches: a line is as high as its longest panel needs.
        heights = [
            1.1 + 0.32 * max(sizes[first : first + columns])
            for first in range(0, len(sizes), columns)
        ]
        figure = Figure(figsize=(4.6 * columns, sum(heights)))
        panels = figure.subplots(
            len(heights), columns, squeeze=False, height_ratios=heights
        ).flatten()
        for unused in panels[len(tasks) :]:
            unused.set_visible(False)
        for axes, ((task, measure), own) in zip(panels, tasks.items(), strict=False):
            for place, arm in enumerate(own):
                scores = [one["test"][measure] for one in arm["seeds"]]
                axes.plot(scores, [place] * len(scores), "o", color=BLUE, alpha=0.5, ms=5)
                mean = arm["test"][measure]["mean"]
                axes.plot([mean, mean], [place - 0.3, place + 0.3], color=ORANGE, lw=2)
            axes.set_yticks(range(len(own)), [arm["name"].removeprefix(f"{task}-") for arm in own])
            axes.set_ylim(len(own) - 0.5, -0.5)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.margins(x=0.1)
            axes.set_title(f"{task}: {measure.replace('_', ' ')}, test")
        figure.tight_layout(w_pad=2.0, h_pad=1.5)
        return save({"": figure}, stem)


def _columns(shared: bool) -> tuple[str, ...]:
    return _COLUMNS[:-1] if shared else _COLUMNS


def _by_seed(folder: Path) -> list[Path]:
    found = [path.parent for path in folder.glob("seed-*/results.json")]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def _seed(run: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in entries if "split" not in one]
    took = {name: steps[-1].get(name, 0.0) for name in ("seconds", "tokens", "peak_mib")}
    results = read_json(run / "results.json")
    for name in ("train", "valid", "test"):  # notes name files as they were given
        if recipe["data"][name] is not None:
            folder = f"{Path(recipe['data'][name]).parent}/"
            results["notes"] = [note.replace(folder, "") for note in results["notes"]]
    split = recipe["data"].get("split_seed")  # one for all seeds, or another for each
    return {"seed": recipe["seed"], "split_seed": split, **results, **took}


def _shared(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without what differs by seed, and without the folders of the machine it ran on."""
    kept = {name: value for name, value in recipe.items() if name not in ("seed", "phases")}
    for part, names in (("model", ("source",)), ("data", ("train", "valid", "test"))):
        own = {name: value for name, value in kept[part].items() if name != "split_seed"}
        kept[part] = own | {name: Path(own[name]).name for name in names if own[name] is not None}
    return kept


def _score(arm: dict[str, Any], split: str) -> str:
    own = arm[split][arm["measure"]]
    return f"{own['mean']:.4f}" + (f" ± {own['deviation']:.4f}" if len(arm["seeds"]) > 1 else "")


def _mean(arm: dict[str, Any], name: str) -> float:
    return sum(one[name] for one in arm["seeds"]) / len(arm["seeds"])
