"""How much of a document its summary needs: the paper's Figure 3, by a model trained from scratch.

One model, the same examples in the same order and as many updates, reading the first 1K, 4K and
16K tokens. Before, it may practise on passages of the documents, read in short parts; its positions
are then copied, as BART's were for LED. Runs are chosen by their loss; only then texts are written,
once, for the test examples. They are kept with what they should have been, so that ROUGE can be had
of them on another machine, without the model.
"""

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from longspan.data.examples import Skips, read_examples
from longspan.tasks.compare import interval
from longspan.tasks.finetune import done_before, finetune, half, load_model, read_metrics
from longspan.tasks.practice import LENGTH, Practice, practice
from longspan.tasks.scratch import make_writer
from longspan.tasks.summaries import ROUGE, Rouge, read_requests
from longspan.tasks.summarize import Summarize
from longspan.train import checkpoint
from longspan.train.finetuning import Finetuning, check, planned

LENGTHS = (1024, 4096, 16384)
_WRITTEN = "written.jsonl"
# ROUGE-1 and -2 of LED on arXiv, by tokens read.
PAPER = {1024: (35.21, 11.54), 4096: (44.48, 17.99), 16384: (46.23, 19.62)}


@dataclass(frozen=True)
class Arm:
    """What reading so many tokens reached and took."""

    name: str
    length: int
    cut: float  # share of the documents that are longer
    valid_loss: float
    test_loss: float
    updates: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Study:
    data: str
    parameters: int
    examples: int  # that texts were written about
    practised: int  # updates before
    arms: list[Arm]


def study(
    recipe: Finetuning,
    output: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    limit: int = 0,
    practised: int = 0,
    sizes: dict[str, Any] | None = None,
    console: Console | None = None,
) -> Study:
    """Train every arm in a folder of its own and let it write; `score` says how well.

    An arm that is complete is not done again, one that was interrupted goes on. Of the test
    examples the first `limit` are written about; 0 = all. What arms start from is made by
    `prepare`; once it is there, several processes may each carry out an arm of their own.
    """
    console = console or Console()
    lengths = sorted(set(lengths))
    recipe = prepare(recipe, output, practised=practised, sizes=sizes, console=console)
    base: Summarize | None = None
    arms, written, parameters = [], 0, 0
    for length in lengths:
        own = replace(recipe, name=name_of(length), model=replace(recipe.model, length=length))
        console.rule(f"the first {length:,} tokens")
        task = Summarize(own) if base is None else base.again(own)
        base = base or task
        arms.append(_carry_out(task, output / own.name, limit, console))
        written = len(task.examples.test[: limit or None])
        parameters = task.build().num_parameters()
        # The next arm shall find the memory that this one used.
        gc.collect()
        torch.compiler.reset()
    assert recipe.data.train is not None
    data = Path(recipe.data.train).name.partition(".")[0]
    return Study(data, parameters, written, practised, arms)


def prepare(
    recipe: Finetuning,
    output: Path,
    *,
    practised: int = 0,
    sizes: dict[str, Any] | None = None,
    console: Console | None = None,
) -> Finetuning:
    """The recipe with what all arms start from, made unless it is there: a model of `sizes`, where
    none is given, after so many updates of practice."""
    check(recipe)
    recipe = replace(recipe, measure="loss", too_long="head")
    if recipe.model.source is None:
        # Positions that were practised on are copied for those beyond.
        positions = min(LENGTH, recipe.model.length) if practised else recipe.model.length
        start = _start(recipe, output / "start", positions, sizes or {})
        recipe = replace(recipe, model=replace(recipe.model, source=str(start)))
    if practised:
        console = console or Console()
        console.rule("practice")
        own, run = practice(recipe, practised), output / "practice"
        if done_before(planned(own, 1), run) is None:  # its steps do not depend on the examples
            finetune(Practice(own), run, resume=(run / "recipe.json").exists(), console=console)
        else:
            console.print("practised before", highlight=False)
        source = checkpoint.find(run, "best")
        recipe = replace(recipe, model=replace(recipe.model, source=str(source)))
    return recipe


def score(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A study as plain values, with ROUGE of what its folder holds: of each arm, of its gain over
    the shortest reading, example by example, and of the documents' beginnings ("lead")."""
    rouge, first, lead = Rouge(), None, None
    arms = []
    for arm in found["arms"]:
        written = _read(folder / arm["name"])
        right = [one["right"] for one in written]
        sheet = rouge(right, [one["written"] for one in written])
        if first is None:
            first, lead = sheet, rouge(right, [one["lead"] for one in written])
        gain = None if sheet is first else _intervals(sheet, first)
        arms.append(arm | {"scores": _intervals(sheet), "gain": gain})
    return found | {"arms": arms, "lead": None if lead is None else _intervals(lead)}


def name_of(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _start(recipe: Finetuning, folder: Path, positions: int, sizes: dict[str, Any]) -> Path:
    if not (folder / "config.json").exists():
        columns, skips = recipe.data.columns, Skips()
        found = read_examples(
            recipe.data,
            lambda row: read_requests(row, columns, skips),
            skips,
            about=lambda one: one.text,  # as `Summarize` has it
        )
        texts = [part for one in found.train for part in (one.summary, one.question, one.text)]
    else:
        texts = []
    return make_writer(
        folder,
        dict.fromkeys(texts),  # several queries may be about one text
        positions=positions,
        window=recipe.model.window,
        longest=recipe.writing.longest,
        seed=recipe.seed,
        **sizes,
    )


def _carry_out(task: Summarize, run: Path, limit: int, console: Console) -> Arm:
    results = done_before(task.recipe, run)
    if results is None:
        again = (run / "recipe.json").exists()
        results = finetune(task, run, resume=again, console=console)
    else:
        console.print("trained before", highlight=False)
    wanted = task.examples.test[: limit or None]
    if len(_read(run)) != len(wanted):
        folder = checkpoint.find(run, "best")
        assert folder is not None
        model = load_model(task.recipe, folder)
        with console.status(f"writing {len(wanted):,} texts ..."), half(task.recipe, model):
            texts = task.texts(model, wanted)
        lines = [
            json.dumps({"right": one.summary, "lead": first, "written": text}, ensure_ascii=False)
            for one, first, text in zip(wanted, task.leads(wanted), texts, strict=True)
        ]
        checkpoint.write_text(run / _WRITTEN, "\n".join(lines) + "\n")
    last = next(entry for entry in reversed(read_metrics(run)) if "split" not in entry)
    return Arm(
        task.recipe.name,
        task.recipe.model.length,
        task.reach.too_long / task.reach.documents,
        results["valid"]["loss"],
        results["test"]["loss"],
        last["step"],
        last["tokens"],
        last["training_seconds"],
    )


def _read(run: Path) -> list[dict[str, str]]:
    """What an arm wrote, beside what was right and the document's beginning."""
    if not (run / _WRITTEN).exists():
        return []
    return [json.loads(line) for line in (run / _WRITTEN).open(encoding="utf8")]


def _intervals(sheet: np.ndarray, minus: np.ndarray | None = None) -> dict[str, dict[str, float]]:
    """Of each measure, or of its difference to another sheet's."""
    return {
        name: asdict(
            interval(
                lambda rows: float(rows.mean()),
                [sheet[:, column]],
                None if minus is None else [minus[:, column]],
            )
        )
        for column, name in enumerate(ROUGE)
    }
