"""Runs of language models side by side: how they learned, what they score, how far they look.

Everything is data first, one JSON file; `run_figures` draws it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import autocast

from longspan import machine
from longspan.analyze.recl import losses_of, recl
from longspan.data.text import Bytes, Corpus, Source, split_documents
from longspan.models.decoder import LongspanForCausalLM
from longspan.tasks.bits import row_nats
from longspan.tasks.charlm import CharLM, with_attention
from longspan.tasks.runs import Run, load_model, open_run
from longspan.train.checkpoint import find, read_json, write_json
from longspan.train.recipe import change

FRACTIONS = (0.1, 0.5, 1.0)  # of the hardest tokens, for RECL
_TOKENS = 65_536  # read at a time
_MEASURED = "measured.json"  # in a run's folder
# What table and curves need of a run; the latter unless the device was shared.
_SHOWN = frozenset({"name", "parameters", "bits_per_character", "peak_mib", "step", "curve"})
_SHOWN_OF_TIME = frozenset({"characters_per_second", "training_seconds"})


def _nobody(text: str) -> None:
    """Is told."""


@dataclass(frozen=True)
class Probe:
    """What is measured of every run.

    Args:
        limit: bytes of valid and test to score; 0 = all.
        rows, longest: rows of text, and how long they are, for the loss by position.
        tokens: bytes that RECL looks at; 0 = no RECL.
        start, step: its first context length, and by how much it grows, up to `longest`.
    """

    limit: int = 0
    rows: int = 64
    longest: int = 4096
    tokens: int = 500
    start: int = 256
    step: int = 256

    def __post_init__(self) -> None:
        for name in ("rows", "longest", "start", "step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("limit", "tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")

    @property
    def contexts(self) -> list[int]:
        return list(range(self.start, self.longest + 1, self.step)) if self.tokens else []


def measure(
    folders: Sequence[Path],
    probe: Probe,
    *,
    data: Path | None = None,
    say: Callable[[str], None] = _nobody,
) -> dict[str, Any]:
    """Everything that tables and figures are made of, as plain values; `say` is told what is being
    done, as it takes minutes."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"runs are told apart by their folders' names, which repeat: {names}")
    corpora: dict[Source, Corpus] = {}  # reading takes long
    before = [measured_before(folder, probe) for folder in folders]
    # Measuring takes long: what cannot be measured is said first.
    runs = [
        None if known else open_run(folder) for folder, known in zip(folders, before, strict=True)
    ]
    measured = []
    for folder, known, run in zip(folders, before, runs, strict=True):
        if run is None:
            say(f"{folder.resolve().name}: measured before")
        else:
            recipe = run.recipe
            if data is not None:
                recipe = change(recipe, {"data.path": str(data)})
            task = CharLM(recipe, corpora.get(recipe.data))
            corpora[recipe.data] = task.corpus
            known = measure_run(folder, task, probe, say)
        measured.append(known)
    return _join(dict(zip(names, measured, strict=True)))


def measure_run(
    folder: Path, task: CharLM, probe: Probe, say: Callable[[str], None] = _nobody
) -> dict[str, Any]:
    """What is measured of one run, also written into its folder: runs that were carried out and
    measured apart, by other machines even, are joined by these files alone."""
    run = open_run(folder)
    name = folder.resolve().name
    of_run, losses = _measure_one(run, task, probe, lambda what: say(f"{name}: {what}"))
    measured = {
        "run": of_run,
        "losses": {str(context): own.tolist() for context, own in losses.items()},
        "checkpoint": run.checkpoint.name,
        "text": sha256(task.corpus.valid.tobytes()).hexdigest(),
        "probe": asdict(probe),
        **machine.record(),
    }
    write_json(folder / _MEASURED, measured)
    return measured


def measured_before(folder: Path, probe: Probe) -> dict[str, Any] | None:
    """What was measured of a run: by this probe, or by any if the run has no checkpoint here."""
    path = folder / _MEASURED
    if not path.exists():
        return None
    known, checkpoint = read_json(path), find(folder, "best")
    if checkpoint is None:
        return known
    same = known["probe"] == asdict(probe) and known["checkpoint"] == checkpoint.name
    return known if same else None


def read_results(path: Path) -> dict[str, Any]:
    """What `measure` gave, from the file it was written to; some of it may be left out there."""
    try:
        found = read_json(path)
    except ValueError:  # UnicodeDecodeError too
        raise ValueError(f"{path} is not JSON") from None
    runs = found.get("runs") if isinstance(found, dict) else None
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise ValueError(f"{path} is no results file of longspan plot: it holds no runs")
    wanted = _SHOWN if found.get("shared", False) else _SHOWN | _SHOWN_OF_TIME
    lacking = sorted({key for run in runs for key in wanted - run.keys()})
    if lacking:
        raise ValueError(f"{path} cannot be drawn: its runs lack {', '.join(lacking)}")
    return found


def _join(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs by name, side by side; only now is there a group, which RECL is a measure of."""
    (first, one), *others = measured.items()
    for name, other in others:
        if other["text"] != one["text"]:
            raise ValueError(f"{name} was not trained on the text of {first}")
        if other["probe"] != one["probe"]:
            raise ValueError(
                f"{name} was measured by {other['probe']}, {first} by {one['probe']}: measure them "
                "alike, where their checkpoints are"
            )
    probe = Probe(**one["probe"])
    losses = [
        {int(context): np.array(nats) for context, nats in own["losses"].items()}
        for own in measured.values()
    ]
    lengths = {
        str(fraction): _recl(losses, probe, fraction)
        for fraction in FRACTIONS
        if len(probe.contexts) > 1
    }
    return {
        "runs": [
            {"name": name, **own["run"], "recl": {f: found[place] for f, found in lengths.items()}}
            for place, (name, own) in enumerate(measured.items())
        ],
        "probe": one["probe"],
        "machine": " / ".join(dict.fromkeys(own["machine"] for own in measured.values())),
        "versions": one["versions"],
        # A copy without git knows no commit.
        "commit": " / ".join(dict.fromkeys(o["commit"] for o in measured.values() if o["commit"]))
        or None,
    }


def _recl(losses: Sequence[dict[int, np.ndarray]], probe: Probe, fraction: float) -> list[int]:
    return recl(
        [own.__getitem__ for own in losses],
        start=probe.start,
        step=probe.step,
        longest=probe.contexts[-1],
        fraction=fraction,
    )


def _measure_one(
    run: Run, task: CharLM, probe: Probe, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[int, np.ndarray]]:
    recipe, evaluation = run.recipe, run.recipe.evaluation
    model = load_model(run.checkpoint)
    half = autocast(model.device.type, torch.bfloat16, enabled=recipe.precision == "bf16")
    with half:
        scores = {}
        for split in ("valid", "test"):
            say(f"bits per character, {split}")
            scores[split] = task.evaluate(model, split, probe.limit)["bits_per_character"]
        model = with_attention(model, evaluation.attention).eval()
        segment = evaluation.length if evaluation.kind == "streamed" else None
        text = task.corpus.valid
        losses: dict[int, np.ndarray] = {}
        for context in probe.contexts:
            say(f"the loss of {probe.tokens} bytes, {context:,} of {probe.longest:,} before each")
            batch = _rows_at_a_time(context, segment)
            losses[context] = losses_of(model, text, probe.tokens, batch, segment)(context)
        say("the loss by position")
        positions = {
            "position": _by_position(model, _anywhere(text, probe), segment),
            "document": _by_position(model, _beginnings(text, probe), segment),
        }
    curve = read_curve(run.folder)
    speeds = [entry["tokens_per_second"] for entry in curve["train"]]
    last = curve["train"][-1]
    measured = {
        "recipe": recipe.name,
        "parameters": model.num_parameters(),
        "step": last["step"],
        "characters": last["tokens"],
        "training_seconds": last["training_seconds"],
        "seconds": last["seconds"],
        "characters_per_second": median(speeds[1:] or speeds),  # the first may have compiled
        "peak_mib": max(entry["peak_mib"] for entry in curve["train"]),
        "bits_per_character": scores,
        "bits_by_context": [
            [context, float(nats.mean() / np.log(2))] for context, nats in losses.items()
        ],
        "bits_by": positions,
        "curve": curve,
    }
    return measured, losses


_KEPT = ("step", "tokens", "training_seconds", "seconds", "bits_per_character")


def read_curve(run: Path) -> dict[str, list[dict[str, Any]]]:
    """What a run wrote of its training and of its evaluations, in order."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    entries = [json.loads(line) for line in lines]
    if not entries:
        raise ValueError(f"{run} has no metrics yet")
    speed = (*_KEPT, "tokens_per_second", "peak_mib")
    return {
        "train": [{name: e[name] for name in speed} for e in entries if "split" not in e],
        "valid": [{name: e[name] for name in _KEPT} for e in entries if e.get("split") == "valid"],
    }


def _anywhere(text: Bytes, probe: Probe) -> list[Bytes]:
    """Rows that begin anywhere, the same for every run."""
    last = len(text) - probe.longest - 1
    if last < 0:
        return []
    starts = np.random.default_rng(0).integers(0, last + 1, probe.rows)
    return [text[start : start + probe.longest + 1] for start in starts]


def _beginnings(text: Bytes, probe: Probe) -> list[Bytes]:
    """The beginnings of documents that are long enough."""
    whole = [own for own in split_documents(text) if len(own) > probe.longest]
    return [own[: probe.longest + 1] for own in whole[: probe.rows]]


def _rows_at_a_time(length: int, segment: int | None) -> int:
    return max(1, _TOKENS // min(length, segment or length))


def _by_position(
    model: LongspanForCausalLM, rows: list[Bytes], segment: int | None
) -> list[list[float]]:
    """[bytes before, bits per character], by bins that double; nothing of no rows."""
    if not rows:
        return []
    batch = _rows_at_a_time(len(rows[0]), segment)
    total = np.zeros(len(rows[0]) - 1)
    for first in range(0, len(rows), batch):
        nats = row_nats(model, np.stack(rows[first : first + batch]), segment)
        total += nats.double().sum(0).cpu().numpy()
    bits = total / len(rows) / np.log(2)
    edges = [2**power for power in range(len(bits).bit_length()) if 2**power < len(bits)]
    bounds = [0, *edges, len(bits)]
    # Byte i of a row's scored ones has i + 1 before it.
    return [
        [float(np.sqrt((low + 1) * high)), float(bits[low:high].mean())]
        for low, high in pairwise(bounds)
    ]
