"""A finetuning recipe carried out, and the results of it: one run, or one for each seed."""

import json
import statistics
from dataclasses import replace
from os import environ
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import autocast, bfloat16

from longspan import machine
from longspan.models import (
    LongspanForConditionalGeneration,
    LongspanForCoreference,
    LongspanForMaskedLM,
    LongspanForMultihop,
    LongspanForQuestionAnswering,
    LongspanForSequenceClassification,
    LongspanForTokenClassification,
)
from longspan.tasks.choice import Choice, Chooser
from longspan.tasks.classify import Classifier, Classify
from longspan.tasks.coref import Coref, Resolver
from longspan.tasks.mlm import Filler, MaskedLM
from longspan.tasks.multihop import Multihop, Reasoner
from longspan.tasks.spans import Finder, Spans
from longspan.tasks.summarize import Summarize, Summarizer
from longspan.train import checkpoint
from longspan.train.finetuning import Finetuning
from longspan.train.loop import train

# By the name of a task: how it is trained, how it predicts, its model.
TASKS: dict[str, tuple[Any, Any, Any]] = {
    "classify": (Classify, Classifier, LongspanForSequenceClassification),
    "spans": (Spans, Finder, LongspanForQuestionAnswering),
    "coref": (Coref, Resolver, LongspanForCoreference),
    "choice": (Choice, Chooser, LongspanForTokenClassification),
    "multihop": (Multihop, Reasoner, LongspanForMultihop),
    "mlm": (MaskedLM, Filler, LongspanForMaskedLM),
    "summarize": (Summarize, Summarizer, LongspanForConditionalGeneration),
}
# The folder of a run's earlier stage, if it has one.
FIRST_STAGE = "chooser"


def make_task(recipe: Finetuning) -> Any:
    """The task of a recipe, its examples read."""
    return TASKS[recipe.task][0](recipe)


def finetune(
    task: Any, run: Path, *, resume: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train in the folder `run`, then score the test examples with the best checkpoint.

    A task with an earlier stage has that carried out first, in a folder within. Returns and writes
    (`results.json`) the measures on validation and test examples.
    """
    console = console or Console()
    first = task.before()
    if first is not None:
        stage = run / FIRST_STAGE
        if not resume:
            checkpoint.refuse_run(run)  # `train` would say so after this stage
        if not resume or done_before(first.recipe, stage) is None:
            console.print(f"the first stage, into {stage}", highlight=False, soft_wrap=True)
            finetune(first, stage, resume=resume, console=console)
        resume = resume and (run / "recipe.json").exists()
        model = load_model(first.recipe, _best(stage))
        with half(first.recipe, model):
            task.take(first, model.eval())
        console.print(f"the second stage, into {run}", highlight=False, soft_wrap=True)
    for note in task.notes():
        console.print(note, soft_wrap=True, highlight=False, markup=False)
    train(task.recipe, task, run, resume=resume, console=console)
    folder = _best(run)
    model = load_model(task.recipe, folder)
    found = {}
    for split in ("valid", "test"):
        with half(task.recipe, model), console.status(f"scoring {split} examples ..."):
            found[split] = task.evaluate(model, split)
    results = {
        "checkpoint": folder.name,
        **found,
        "notes": task.notes(),
        **machine.record(),
    }
    if environ.get("RANK", "0") == "0":  # of several processes, one writes
        checkpoint.write_json(run / "results.json", results)
    return results


def done_before(recipe: Finetuning, run: Path) -> dict[str, Any] | None:
    """The results of a run that is complete, None if it is not; an error if it had another recipe
    than this, as `planned` makes it."""
    results = run / "results.json"
    if not results.exists():
        return None
    differing = recipe.differing(checkpoint.read_json(run / "recipe.json"))
    if differing:
        raise ValueError(
            f"{run} was done with other settings ({', '.join(differing)}): name another folder"
        )
    return checkpoint.read_json(results)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """What a run entered while training, in order; none if it was not trained."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def finetune_seeds(
    task: Any,
    run: Path,
    seeds: int,
    *,
    resume: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """A run for each seed from the recipe's on, in RUN/seed-N, and their mean and deviation.

    With `resume`, runs that have results are not done again.
    """
    console = console or Console()
    found, recipe = {}, task.recipe
    for seed in range(recipe.seed, recipe.seed + seeds):
        folder = run / f"seed-{seed}"
        own = task.again(replace(recipe, seed=seed))
        known = done_before(own.recipe, folder) if resume else None
        if known is not None:
            found[seed] = known
            continue
        console.print(f"seed {seed}, into {folder}", highlight=False, soft_wrap=True)
        again = resume and any(folder.rglob("recipe.json"))  # of either stage
        found[seed] = finetune(own, folder, resume=again, console=console)
    summary = {"seeds": sorted(found)} | {
        split: spread([one[split] for one in found.values()]) for split in ("valid", "test")
    }
    if environ.get("RANK", "0") == "0":
        checkpoint.write_json(run / "summary.json", summary)
    return summary


def spread(measures: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and sample standard deviation of each measure."""
    return {
        name: {
            "mean": statistics.fmean(one[name] for one in measures),
            "deviation": statistics.stdev(one[name] for one in measures)
            if len(measures) > 1
            else 0.0,
        }
        for name in measures[0]
    }


def _best(run: Path) -> Path:
    folder = checkpoint.find(run, "best")
    assert folder is not None  # a run that ended has saved one
    return folder


def load_model(recipe: Finetuning, folder: Path) -> Any:
    """The model of a checkpoint, ready to predict, on the GPU if there is one."""
    model = TASKS[recipe.task][2].from_pretrained(folder).eval()
    return model.to("cuda") if torch.cuda.is_available() else model


def half(recipe: Finetuning, model: Any) -> Any:
    return autocast(model.device.type, bfloat16, enabled=recipe.precision == "bf16")
