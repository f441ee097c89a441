"""One recipe for one kind of attention after the other: the same examples, sizes and steps."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from longspan.layers.registry import ATTENTION
from longspan.tasks.finetune import done_before, finetune, make_task, read_metrics
from longspan.train.finetuning import Finetuning


@dataclass(frozen=True)
class Arm:
    """What one kind reached and took."""

    kind: str
    valid: float
    test: float
    parameters: int
    updates: int
    seconds: float  # of training
    tokens_per_second: float
    peak_mib: float
    # Updates, seconds of training, and the measure on validation examples by then.
    curve: list[tuple[int, float, float]]
    made: dict[str, Any]  # on what machine, with what versions


@dataclass(frozen=True)
class Study:
    recipe: str
    measure: str
    settings: dict[str, Any]  # the same for all
    examples: int  # in the test split
    arms: list[Arm]
    failed: dict[str, str]  # why, by kind


def kinds_of(recipe: Finetuning) -> list[str]:
    """Every kind that encoders have, and the names that the recipe adds to them."""
    if recipe.model.new is None:
        raise ValueError(f"{recipe.name} starts from a checkpoint, which has its own attention")
    return list(dict.fromkeys((*ATTENTION, *recipe.model.new.kinds)))


def study(
    recipe: Finetuning,
    output: Path,
    kinds: Sequence[str] | None = None,
    console: Console | None = None,
) -> Study:
    """Carry out the recipe with each kind, in a folder of its own.

    One that is complete is not done again, one that was interrupted goes on, and one that fails
    does not keep the next from being tried.
    """
    console = console or Console()
    known = kinds_of(recipe)
    for kind in kinds or ():
        if kind not in known:
            raise ValueError(f"--only {kind}: choose from {', '.join(known)}")
    base = make_task(recipe)
    arms, failed = [], {}
    for kind in kinds or known:
        task = base.again(replace(recipe, attention=kind))
        try:
            arms.append(_carry_out(task, kind, output / kind, console))
        except (RuntimeError, FloatingPointError) as error:
            failed[kind] = str(error).strip().partition("\n")[0]
            console.print(f"{kind} failed: {failed[kind]}", markup=False)
        # The next one shall find the memory that this one used.
        task = None
        gc.collect()
        torch.compiler.reset()
    names = ("updates", "batch", "learning_rate", "warmup", "alike", "seed")
    settings = {name: getattr(recipe, name) for name in names}
    assert recipe.model.new is not None  # as `kinds_of` has seen
    settings |= {"length": recipe.model.length, **recipe.model.new.config}
    return Study(recipe.name, recipe.measure, settings, len(base.documents.test), arms, failed)


def _carry_out(task: Any, kind: str, run: Path, console: Console) -> Arm:
    console.rule(kind)
    with torch.device("meta"):
        parameters = task.build().num_parameters()
    results = done_before(task.recipe, run)
    if results is None:
        results = finetune(task, run, resume=(run / "recipe.json").exists(), console=console)
    else:
        console.print(f"{kind}: done before", highlight=False)
    entries = read_metrics(run)
    trained = [entry for entry in entries if "split" not in entry]
    measure = task.recipe.measure
    return Arm(
        kind,
        results["valid"][measure],
        results["test"][measure],
        parameters,
        trained[-1]["step"],
        trained[-1]["training_seconds"],
        trained[-1]["tokens"] / max(trained[-1]["training_seconds"], 1e-9),
        max(entry["peak_mib"] for entry in trained),
        [
            (entry["step"], entry["training_seconds"], entry[measure])
            for entry in entries
            if entry.get("split") == "valid"
        ],
        {name: results[name] for name in ("machine", "versions", "commit")},
    )
