"""A run's folder: its recipe, its metrics, and checkpoints that are whole or not there.

    RUN/recipe.json
    RUN/metrics.jsonl, samples.jsonl
    RUN/checkpoints/step-00001000/   config.json and model.safetensors: a model to load
                                     optimizer.safetensors, state-0.safetensors, progress.json

A checkpoint is written under another name and renamed when it is complete, so that a run killed
at any moment goes on from the last complete one. Nothing is ever pickled.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_EVERYWHERE = StateDictOptions(full_state_dict=True)
_TO_MAIN = StateDictOptions(full_state_dict=True, cpu_offload=True)


def write_text(path: Path, content: str) -> None:
    """The whole file or none of it, also where several processes write it at once."""
    own = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        own.write_text(content, encoding="utf8")
        os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf8"))


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def unfinished(path: Path) -> Path:
    """Where something is written before it takes its name."""
    return path.with_name(path.name + ".tmp")


def finish(folder: Path, progress: Mapping[str, Any], keep: set[int]) -> None:
    """Give a checkpoint its name, and delete those of other steps than `keep`."""
    write_json(unfinished(folder) / "progress.json", dict(progress))
    for file in unfinished(folder).iterdir():
        _flush(file)  # a name must never reach the disk before what it names
    if folder.exists():
        shutil.rmtree(folder)  # of an earlier attempt at this step
    os.replace(unfinished(folder), folder)
    _flush(folder.parent)
    for other in folder.parent.glob("step-*"):
        if other.suffix == ".tmp" or int(other.name.removeprefix("step-")) not in keep:
            shutil.rmtree(other)


@contextlib.contextmanager
def claim(run: Path) -> Iterator[None]:
    """Keep other processes from training in this folder. The system gives it back when the process
    ends, however it ends."""
    with open(run / ".claim", "a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is training in {run}: wait for it, or end it, or name "
                    "another folder"
                ) from None
            except OSError:
                pass  # a file system without such locks
        yield


def clear(run: Path) -> None:
    """Delete what a run that was killed while saving has left."""
    for torn in (run / "checkpoints").glob("step-*.tmp"):
        shutil.rmtree(torn)


def refuse_run(run: Path) -> None:
    """Raise if a folder has a run in it: a new one would mix with it."""
    if (run / "recipe.json").exists():
        raise ValueError(
            f"{run} holds a run already: --resume goes on with it, --output names another"
        )


def find(run: Path, which: str = "last") -> Path | None:
    """The "last" checkpoint of a run or its "best" one; None if there is none yet."""
    folders = sorted((run / "checkpoints").glob("step-????????"))
    if not folders:
        return None
    if which == "best":
        best = progress(folders[-1]).get("best")
        if best is not None and folder_of(run, best["step"]).exists():
            return folder_of(run, best["step"])
    return folders[-1]


def progress(folder: Path) -> dict[str, Any]:
    return read_json(folder / "progress.json")


def optimizer_tensors(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """What the optimisers remember, by parameter; whole, also where it is spread over devices.

    All processes call it, the main one gets it. Learning rates and the like are not in it: they
    follow from the recipe and the step.
    """
    state: Any = get_optimizer_state_dict(model, optimizers, options=_TO_MAIN).get("state", {})
    return {
        f"{parameter}/{name}": value.detach().clone().contiguous()
        for parameter, values in state.items()
        for name, value in values.items()
    }


def load_optimizers(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        parameter, name = key.rsplit("/", 1)
        state.setdefault(parameter, {})[name] = value
    whole: Any = get_optimizer_state_dict(model, optimizers, options=_EVERYWHERE)
    whole["state"] = state
    set_optimizer_state_dict(model, optimizers, whole, options=_EVERYWHERE)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
