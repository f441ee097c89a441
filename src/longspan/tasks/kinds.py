"""One recipe for one kind of attention after the other: the same examples, sizes and steps."""

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
from rich.console import Console

from longspan.layers.registry import ATTENTION
from longspan.tasks.finetune import done_before, finetune, make_task, read_metrics
from longspan.train.finetuning import Finetuning

_QUIET = Console(quiet=True)


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
    jobs: int = 1,
) -> Study:
    """Carry out the recipe with each kind, in a folder of its own; so many of them (`jobs`) at a
    time, each in a process of its own with a log beside its folder, if it is more than one.

    One that is complete is not done again, one that was interrupted goes on, and one that fails
    does not keep the next from being tried.
    """
    console = console or Console()
    known = kinds_of(recipe)
    for kind in kinds or ():
        if kind not in known:
            raise ValueError(f"--only {kind}: choose from {', '.join(known)}")
    base = make_task(recipe)
    tasks = {kind: base.again(replace(recipe, attention=kind)) for kind in kinds or known}
    arms, failed = [], _beside(tasks, output, jobs, console) if jobs > 1 else {}
    for kind, task in tasks.items():
        if kind in failed:
            continue
        try:
            arms.append(_carry_out(task, kind, output / kind, console if jobs == 1 else _QUIET))
        except (RuntimeError, FloatingPointError) as error:
            failed[kind] = _first_line(error)
            console.print(f"{kind} failed: {failed[kind]}", markup=False)
        # The next one shall find the memory that this one used.
        gc.collect()
        torch.compiler.reset()
    names = ("updates", "batch", "learning_rate", "warmup", "alike", "seed")
    settings = {name: getattr(recipe, name) for name in names}
    assert recipe.model.new is not None  # as `kinds_of` has seen
    settings |= {"length": recipe.model.length, **recipe.model.new.config}
    return Study(recipe.name, recipe.measure, settings, len(base.documents.test), arms, failed)


def _beside(tasks: Mapping[str, Any], output: Path, jobs: int, console: Console) -> dict[str, str]:
    """Finetune with the kinds that are not done yet; which failed, and why."""
    waiting = []
    for kind, task in tasks.items():
        if done_before(task.recipe, output / kind) is None:
            waiting.append(kind)
        else:
            console.print(f"{kind}: done before", highlight=False)
    output.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    running: dict[Any, tuple[str, Any]] = {}  # kinds and processes, by what these tell their end to
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                kind = waiting.pop(0)
                with _heard_later():
                    end, process = _begin(tasks[kind], output / kind)
                    running[end] = kind, process
                where = _log(output / kind)
                console.print(f"{kind}: training, see {where}", highlight=False, soft_wrap=True)
            with console.status(", ".join(kind for kind, _ in running.values())):
                ended: Any = wait(list(running))
            for end in ended:
                kind, process = running.pop(end)
                why = _end(end, process)
                if why is None:
                    console.print(f"{kind}: done", highlight=False)
                else:
                    failed[kind] = why
                    console.print(f"{kind} failed: {why}", markup=False, soft_wrap=True)
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return failed


@contextmanager
def _heard_later() -> Iterator[None]:
    """Ctrl-C reaches all processes. Those begun here are deaf to it from their first moment on, as
    they are ended by the one that began them, which hears of it once it knows them."""
    if current_thread() is not main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # children have the same
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if heard:
            raise KeyboardInterrupt


def _log(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def _begin(task: Any, run: Path) -> tuple[Any, Any]:
    """A process of its own, and where it tells how it ended."""
    context = get_context("spawn")  # a forked one could not use a GPU
    end, tell = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(task, run, tell))
    process.start()
    tell.close()  # the process has its own, which is closed with it
    return end, process


def _alone(task: Any, run: Path, tell: Any) -> None:
    with _log(run).open("a", encoding="utf8") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
        try:
            console = Console(file=log, width=100)
            finetune(task, run, resume=(run / "recipe.json").exists(), console=console)
            tell.send(None)
        except Exception as error:
            tell.send(_first_line(error))
            raise


def _end(end: Any, process: Any) -> str | None:
    """Why a process that is over has failed; None if it has not."""
    try:
        why = end.recv()
    except EOFError:  # it was killed
        process.join()
        why = f"its process ended with exit code {process.exitcode}"
    process.join()
    return why


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


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
