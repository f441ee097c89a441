"""The training loop: one function, read from top to bottom.

Devices, precision and sharding are Accelerate's: `accelerate launch -m longspan train ...`
runs it on several GPUs, with DDP or FSDP as `accelerate config` was told. FSDP shards the model in
place, so that `plain` below is the model in every case. Everything random follows from the seed,
the step and the process, and what is read follows from the step, so a run that was killed goes on
to the same losses.
"""

import atexit
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    TorchDynamoPlugin,
    broadcast_object_list,
    disable_fsdp_ram_efficient_loading,
)
from rich.console import Console
from safetensors.torch import load_model
from torch.distributed.fsdp import fully_shard

from longspan.layers.observing import Observing, auxiliary_loss, end_part, refresh
from longspan.machine import peak_mib, reset_peak
from longspan.train import checkpoint
from longspan.train.optim import build_optimizers, set_learning_rate
from longspan.train.pace import Pace, due
from longspan.train.progress import Bar, Metrics
from longspan.train.recipe import Plan
from longspan.train.schedule import learning_rate
from longspan.train.task import BITS, Task

# Steps from which on compiling its layers, which takes half a minute, makes a run shorter.
_LONG = 500
# What an evaluation is entered with, beside its findings.
_COUNTS = ("step", "tokens", "training_seconds", "seconds")


def train(
    recipe: Plan,
    task: Task,
    run: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Carry out a recipe in the folder `run`; returns the last evaluation."""
    # An earlier run in this process may have had other settings.
    AcceleratorState._reset_state(reset_partial_state=True)
    disable_fsdp_ram_efficient_loading()  # every process builds the model
    atexit.unregister(_part)
    accelerator = Accelerator(
        mixed_precision=recipe.precision,
        dynamo_plugin=_compiler(recipe, task),
    )
    shares = _shares(recipe, accelerator)
    console = console or Console()
    if not accelerator.is_main_process:
        return _train(recipe, task, run, resume, console, accelerator, shares)
    _prepare_folder(recipe, run, resume)
    with checkpoint.claim(run):
        checkpoint.clear(run)
        try:
            return _train(recipe, task, run, resume, console, accelerator, shares)
        except (TypeError, ValueError):
            # A setting that only the model refuses: the folder is free for a better one.
            if not resume and not (run / "metrics.jsonl").exists():
                (run / "recipe.json").unlink(missing_ok=True)
            raise


def _train(
    recipe: Plan,
    task: Task,
    run: Path,
    resume: bool,
    console: Console,
    accelerator: Accelerator,
    shares: list[list[range]],
) -> dict[str, Any]:
    """One linear function: what every process does, once the folder is the run's."""
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded:
        _prepare_sharding(accelerator)
    main = accelerator.is_main_process
    accelerator.wait_for_everyone()
    last = checkpoint.find(run)

    torch.manual_seed(recipe.seed)
    plain = task.build()
    if recipe.checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    if last is not None:
        load_model(plain, last / "model.safetensors")
    if sharded:
        _shard_by_hand(plain, accelerator)
    optimizers = build_optimizers(plain, recipe.optimizer, fused=accelerator.device.type == "cuda")
    model, *prepared = accelerator.prepare(plain, *optimizers)
    optimizers = [wrapped.optimizer for wrapped in prepared]
    states: list[Any] = [None] * recipe.accumulate
    known: dict[str, Any] = {}
    if last is not None:
        known = checkpoint.progress(last)
        checkpoint.load_optimizers(last, plain, optimizers)
        states = _load_states(task, plain, last, accelerator, recipe.accumulate)

    pace, best = Pace(recipe, known), known.get("best")
    if resume and main:
        where = f"after step {pace.step:,}" if last else "from the beginning: nothing was saved yet"
        console.print(f"resuming {where}", highlight=False)
    metrics = Metrics(run, pace.step) if main else None
    started = time.monotonic() - known.get("seconds", 0.0)
    found: dict[str, Any] = {}
    entry: dict[str, Any] = {}
    losses: list[torch.Tensor] = []
    since, tokens, entered = time.monotonic(), 0, None
    place = _agree(accelerator, pace)
    reset_peak(accelerator.device)
    goal = task.goal
    with Bar(console, recipe, place, shown=main, bits=goal is BITS) as bar:
        while place < recipe.steps:
            number, _ = recipe.at(place)
            phase = recipe.phases[number]
            if number != entered:
                pace.enter(number)
                task.enter(plain, phase)
                model.train()
                entered = number
            # Dropout of a step is the same whether or not the run was interrupted before it.
            torch.manual_seed(_seed(recipe.seed, pace.step, accelerator.process_index))
            rate = learning_rate(recipe, place)
            set_learning_rate(optimizers, rate)
            read, graphs, seconds = 0, _graphs(), pace.seconds
            for part, rows in enumerate(shares[number]):
                batch, anew = task.batch(number, pace.inside, rows)
                read += _tokens(batch) * accelerator.num_processes
                batch = {name: _sent(tensor, accelerator.device) for name, tensor in batch.items()}
                if anew:
                    states[part] = None
                with _sync_with(accelerator, model, part == recipe.accumulate - 1):
                    with accelerator.autocast():
                        loss = task.loss(model, batch, states[part])
                        total = loss.total + auxiliary_loss(plain)
                    accelerator.backward(total / recipe.accumulate)
                end_part(plain)
                states[part] = loss.state
                losses.append(loss.nats)
            norm = None
            if recipe.optimizer.clip > 0:
                norm = accelerator.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
            for wrapped in prepared:
                wrapped.step()
                wrapped.zero_grad()
            refresh(plain)  # layers that keep more than weights
            if pace.held or _graphs() > graphs:
                float(losses[-1])  # waits for the device, which may have had to be compiled for
                pace.go(seconds)
            pace.advance(read)
            tokens += read
            done, after = pace.step, _agree(accelerator, pace)
            ends = after >= recipe.steps
            evaluates = ends or due(recipe.evaluation.every, place, after)
            saves = ends or evaluates or due(recipe.save_every, place, after)
            samples = due(recipe.sample_every, place, after)
            if saves or samples or done % recipe.log_every == 0:
                mean: Any = accelerator.reduce(torch.stack(losses).mean(), "mean")
                nats = float(mean)  # waits for the device
                if not math.isfinite(nats):
                    raise FloatingPointError(
                        f"the loss is {nats} at step {done}: try a lower learning rate, a longer "
                        "warm-up or precision=no; --resume goes on from the last checkpoint"
                    )
                now = time.monotonic()
                speed = tokens / (now - since)
                entry = {
                    "step": done,
                    "phase": number,
                    "loss": nats,
                    **({BITS.name: nats / math.log(2)} if goal is BITS else {}),
                    "learning_rate": rate,
                    "gradient_norm": None if norm is None else float(norm),
                    "tokens_per_second": speed,
                    "tokens": pace.tokens,
                    "training_seconds": pace.seconds,
                    "seconds": now - started,
                    "peak_mib": peak_mib(accelerator.device),
                }
                if metrics is not None:
                    metrics.add(entry)
                bar.show(after, number, done, nats, speed)
                losses, since, tokens = [], now, 0
            else:
                bar.show(after, number, done)
            if saves or samples:
                pace.hold()
            if evaluates:
                limit = recipe.evaluation.limit
                with bar.saying("evaluating"), accelerator.autocast(), _as_written():
                    found = task.evaluate(plain, "valid", limit)
                model.train()
                value = found[goal.name]
                if best is None or goal.is_better(value, best[goal.name]):
                    best = {"step": done, goal.name: value}
                if metrics is not None:
                    counts = {name: entry[name] for name in _COUNTS}
                    metrics.add({"split": "valid", **counts, **found})
                bar.say(f"step {done}: valid {value:.4f} {goal.in_words}")
            if samples:
                with bar.saying("sampling"), accelerator.autocast(), _as_written():
                    text = task.sample(plain)  # by every process: sharded weights need them all
                model.train()
                if metrics is not None:
                    metrics.add_sample(done, text)
                bar.say(text)
            if saves:
                known = {
                    **pace.known(),
                    "best": best,
                    "seconds": time.monotonic() - started,
                }
                _save(task, run, known, accelerator, plain, optimizers, states)
            if saves or samples:
                since = time.monotonic()  # the speed is that of training alone
                pace.go()
            place = after
    if metrics is not None:
        metrics.close()
    accelerator.wait_for_everyone()
    # Not now: processes that meet a second time at the same place may read what they had left there
    # the first time, and wait for each other forever. Nor after a failure, when others still wait.
    atexit.register(_part)
    return found


def _part() -> None:
    """At the end of a program whose last run came to its end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _compiler(recipe: Plan, task: Task) -> TorchDynamoPlugin | None:
    how = recipe.compile
    if how == "auto":
        how = "layers" if torch.cuda.is_available() and recipe.steps >= _LONG else "no"
    if how == "no":
        return None
    return TorchDynamoPlugin(
        backend="inductor",  # pyright: ignore
        # Where each phase has its own length, compile for it; else once for all.
        dynamic=task.varies,
        use_regional_compilation=how == "layers",
    )


def _prepare_sharding(accelerator: Accelerator) -> None:
    """Settings of FSDP under which a run is the same as without it."""
    state: Any = accelerator.state
    plugin = state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"FSDP {plugin.fsdp_version} leaves no model that could be evaluated: set fsdp_version "
            "to 2 in the configuration of accelerate (FSDP_VERSION=2)"
        )
    plugin.mixed_precision_policy = None  # autocast does it, and leaves losses in float32
    state.dynamo_plugin.use_regional_compilation = True  # layers are gathered one by one


def _shard_by_hand(plain: Any, accelerator: Accelerator) -> None:
    """Weights that are read outside of their module, where FSDP does not see it."""
    if any(isinstance(module, Observing) for module in plain.modules()):
        raise ValueError(
            "layers that keep centroids need whole weights between steps, and FSDP splits them: "
            "use DDP (distributed_type: MULTI_GPU)"
        )
    if getattr(plain.config, "reversible", False):
        raise ValueError(
            "reversible layers are called half by half, where FSDP gathers no weights: use DDP "
            "(distributed_type: MULTI_GPU), or checkpointing=true in their place"
        )
    # Embeddings that make the output too stay gathered until the backward pass is over.
    if plain.get_output_embeddings() is None:
        plugin: Any = accelerator.state.fsdp_plugin
        fully_shard(
            plain.get_input_embeddings(),
            reshard_after_forward=False,
            offload_policy=plugin.cpu_offload,
        )


def _as_written() -> Any:
    """Evaluations and samples have lengths of their own: nothing is compiled for them."""
    return torch.compiler.set_stance("force_eager")


def _graphs() -> int:
    """How many torch has compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


def _agree(accelerator: Accelerator, pace: Pace) -> float:
    """The place of the run: of several clocks, the main process's counts."""
    if accelerator.num_processes == 1 or pace.recipe.minutes == 0:
        return pace.place
    return broadcast_object_list([pace.place])[0]


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On its way to the device: the host, which does not wait, makes the next batch meanwhile."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def _tokens(batch: dict[str, torch.Tensor]) -> int:
    """Real ones of a batch that is still on the CPU: padding does not count."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def _prepare_folder(recipe: Plan, run: Path, resume: bool) -> None:
    """Write the recipe down; a folder with another run in it is refused."""
    path = run / "recipe.json"
    if not resume:
        checkpoint.refuse_run(run)
    if path.exists():
        differing = recipe.differing(checkpoint.read_json(path))
        if differing:
            raise ValueError(
                f"{run} was begun with other settings ({', '.join(differing)}): resume it with "
                "the same ones, or name another folder"
            )
        return
    if resume:
        raise ValueError(f"{run} holds no run to resume")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{run} cannot be a run's folder: there is a file in its place") from None
    checkpoint.write_json(path, recipe.to_dict())


def _shares(recipe: Plan, accelerator: Accelerator) -> list[list[range]]:
    """For each phase, the rows of a batch that fall to this process, in equal parts."""
    parts = accelerator.num_processes * recipe.accumulate
    shares = []
    for number, phase in enumerate(recipe.phases):
        if phase.batch % parts:
            raise ValueError(
                f"phase {number}: a batch of {phase.batch} cannot be cut into {parts} equal "
                f"parts ({accelerator.num_processes} processes, accumulate={recipe.accumulate})"
            )
        size = phase.batch // parts
        first = accelerator.process_index * recipe.accumulate
        cuts = range(first * size, (first + recipe.accumulate) * size, size)
        shares.append([range(begin, begin + size) for begin in cuts])
    return shares


def _sync_with(accelerator: Accelerator, model: Any, last: bool) -> Any:
    """Processes exchange gradients once per step, in the last part."""
    return nullcontext() if last else accelerator.no_sync(model)


def _save(
    task: Task,
    run: Path,
    known: dict[str, Any],
    accelerator: Accelerator,
    plain: Any,
    optimizers: list[torch.optim.Optimizer],
    states: list[Any],
) -> None:
    folder = checkpoint.folder_of(run, known["step"])
    temporary = checkpoint.unfinished(folder)
    temporary.mkdir(parents=True, exist_ok=True)
    weights: Any = accelerator.get_state_dict(plain)
    moments = checkpoint.optimizer_tensors(plain, optimizers)
    packed = {
        f"{part}/{name}": tensor
        for part, state in enumerate(states)
        if state is not None
        for name, tensor in task.pack(state).items()
    }
    checkpoint.save_tensors(temporary / f"state-{accelerator.process_index}.safetensors", packed)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        plain.save_pretrained(temporary, state_dict=task.export(weights))
        task.accompany(temporary)
        checkpoint.save_tensors(temporary / "optimizer.safetensors", moments)
        keep = {known["step"]} | ({known["best"]["step"]} if known["best"] else set())
        checkpoint.finish(folder, known, keep)
    accelerator.wait_for_everyone()


def _load_states(
    task: Task, plain: Any, folder: Path, accelerator: Accelerator, parts: int
) -> list[Any]:
    files = [*folder.glob("state-*.safetensors")]
    if len(files) != accelerator.num_processes and any(map(checkpoint.load_tensors, files)):
        raise ValueError(
            f"{folder} holds the memories of {len(files)} processes: resume it with as many, not "
            f"{accelerator.num_processes}"
        )
    path = folder / f"state-{accelerator.process_index}.safetensors"
    packed = checkpoint.load_tensors(path) if path.exists() else {}
    states = []
    for part in range(parts):
        own = {
            name.removeprefix(f"{part}/"): tensor.to(accelerator.device)
            for name, tensor in packed.items()
            if name.startswith(f"{part}/")
        }
        states.append(task.unpack(plain, own) if own else None)
    return states
