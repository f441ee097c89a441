"""Runs of language models: opened for use, and several carried out one after the other."""

import gc
from collections.abc import Callable, Sequence
from json import loads
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from longspan.data.text import Corpus
from longspan.models.decoder import LongspanForCausalLM
from longspan.models.decoder_config import LongspanDecoderConfig
from longspan.tasks.charlm import CharLM
from longspan.train.checkpoint import find, progress
from longspan.train.loop import train
from longspan.train.pace import Pace
from longspan.train.recipe import Recipe, from_dict


class Run(NamedTuple):
    folder: Path
    recipe: Recipe
    checkpoint: Path  # a folder with a model


def open_run(folder: Path, which: str = "best") -> Run:
    """A run and its "best" or "last" checkpoint."""
    path = folder / "recipe.json"
    if not path.exists():
        why = "there is no recipe.json" if folder.exists() else "it does not exist"
        raise ValueError(f"{folder} holds no run: {why}; `longspan train` makes one")
    recipe = loads(path.read_text(encoding="utf8"))
    if "task" in recipe:
        raise ValueError(
            f"{folder} holds a run of {recipe['task']}, not of a language model; its scores are in "
            "results.json, and `longspan predict` uses it"
        )
    checkpoint = find(folder, which)
    if checkpoint is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    return Run(folder, from_dict(recipe), checkpoint)


def load_model(folder: Path) -> LongspanForCausalLM:
    """The model of a folder, ready for use, on a GPU if there is one; always in float32."""
    kind = loads((folder / "config.json").read_text(encoding="utf8")).get("model_type")
    if kind != LongspanDecoderConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, not a language model of longspan"
        )
    model = LongspanForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if torch.cuda.is_available():
        torch.nn.Module.cuda(model)
    return model


def carry_out(
    recipes: Sequence[Recipe],
    folder: Path,
    console: Console,
    corpus: Corpus | None = None,
    after: Callable[[Path, CharLM], object] = lambda run, task: None,
) -> dict[str, str]:
    """Each recipe in a folder of its own, begun or gone on with; what failed, and why.

    A run that fails, for want of memory, say, does not keep the next from being tried. What is
    done already is left as it is, so that the same call goes on after an interruption. `after` is
    called with each run as soon as it is done.
    """
    failed: dict[str, str] = {}
    for recipe in recipes:
        run = folder / recipe.name
        if _is_done(recipe, run):
            console.print(f"{recipe.name}: done before", highlight=False)
            continue
        try:
            task = CharLM(recipe, corpus)
            corpus = task.corpus  # all read the same text
            console.rule(recipe.name)
            train(recipe, task, run, resume=(run / "recipe.json").exists(), console=console)
            after(run, task)
        except (RuntimeError, FloatingPointError) as error:
            failed[recipe.name] = str(error).strip().partition("\n")[0]
            console.print(f"{recipe.name} failed: {failed[recipe.name]}", markup=False)
        # The next run shall find the memory that this one used, and compile from scratch.
        task = None
        gc.collect()
        torch.compiler.reset()
    return failed


def _is_done(recipe: Recipe, run: Path) -> bool:
    last = find(run)
    return last is not None and Pace(recipe, progress(last)).place >= recipe.steps
