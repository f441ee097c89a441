"""Does this data need long context? The same checkpoint, examples and passes, read four ways.

Each contender is a finetuning recipe that differs from the others in nothing but how a document is
read. Their test examples are the same, so differences are judged example by example.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from longspan.models.presets import none_is_meant
from longspan.tasks.finetune import done_before, finetune, half, load_model, make_task
from longspan.train import checkpoint
from longspan.train.finetuning import Finetuning

FIRST, CHUNKS = "first tokens", "chunk and pool"
WINDOW, GLOBAL = "long, window only", "long, global"
SHORT_ONES = (FIRST, CHUNKS)
_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A measure with the bounds that 95% of resampled sets of examples stay within."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Contender:
    """What one way of reading reached and took, over all seeds."""

    name: str
    valid: float  # by which the better of two is chosen, so that no test example decides it
    score: Interval
    on_long: Interval | None  # on documents beyond the short length alone
    by_seed: list[float]
    train_seconds: float
    documents_per_second: float
    memory_mib: float | None  # of the GPU while training


@dataclass(frozen=True)
class Comparison:
    measure: str
    short: int
    length: int
    examples: int
    long_share: float
    contenders: list[Contender]
    gain: Interval  # of the better long reading over the better short one
    advice: str


def contenders(recipe: Finetuning, short: int) -> dict[str, Finetuning]:
    """Four recipes. Short ones see all of what they read at once, as the checkpoint was trained.

    Without global tokens a document's label comes from the mean of its tokens: its first token
    would know nothing of its end. A long reading keeps the recipe's policy for what is beyond it.
    """
    model, full = recipe.model, 2 * short
    narrow = replace(model, length=short, window=full, global_tokens=None)
    brief = replace(recipe, model=narrow, overlap=min(recipe.overlap, short // 4))
    return {
        FIRST: replace(brief, too_long="head"),
        CHUNKS: replace(brief, too_long="split"),
        WINDOW: replace(recipe, model=replace(model, global_tokens="none", pooling="mean")),
        GLOBAL: recipe,
    }


def compare(
    recipe: Finetuning,
    output: Path,
    *,
    short: int = 512,
    seeds: int = 1,
    console: Console | None = None,
) -> Comparison:
    """Train and score every contender with every seed; writes `compare.json`.

    Runs are kept in the folder: one that is complete is not done again, one that was interrupted
    goes on.
    """
    console = console or Console()
    if not 16 <= short < recipe.model.length:
        raise ValueError(
            f"short={short} must be at least 16 and below model.length={recipe.model.length}"
        )
    base = make_task(replace(recipe, too_long="head"))
    long = base.lengths("test") > short
    texts = base.about("test")
    long_ones = [text for text, is_long in zip(texts, long, strict=True) if is_long]
    readings = contenders(recipe, short)
    for own in readings.values():
        base.again(own)  # what the last one cannot read is said before the first is trained
    sheets: dict[str, list[np.ndarray]] = {}
    costs: dict[str, list[dict[str, Any]]] = {}
    for name, own in readings.items():
        for seed in range(recipe.seed, recipe.seed + seeds):
            task = base.again(replace(own, seed=seed))
            run = output / name.replace(", ", "-").replace(" ", "-") / f"seed-{seed}"
            console.print(f"{name}, seed {seed}", highlight=False)
            with none_is_meant() if name == WINDOW else nullcontext():
                sheet, cost = _carry_out(task, run, console)
            sheets.setdefault(name, []).append(sheet)
            costs.setdefault(name, []).append(cost)
    found = [
        Contender(
            name,
            float(np.mean([one["valid"] for one in costs[name]])),
            interval(base.mark, sheets[name], about=texts),
            interval(base.mark, [one[long] for one in sheets[name]], about=long_ones)
            if long_ones
            else None,
            [base.mark(one) for one in sheets[name]],
            float(np.mean([one["train_seconds"] for one in costs[name]])),
            float(np.mean([one["documents_per_second"] for one in costs[name]])),
            costs[name][0]["memory_mib"],
        )
        for name in sheets
    ]
    best = {
        is_short: max(
            (one for one in found if (one.name in SHORT_ONES) == is_short),
            key=lambda one: one.valid,
        )
        for is_short in (True, False)
    }
    gain = interval(base.mark, sheets[best[False].name], sheets[best[True].name], texts)
    share = float(long.mean())
    result = Comparison(
        # Test examples are judged at the threshold that validation chose, not at their own best.
        recipe.measure.removeprefix("best_"),
        short,
        recipe.model.length,
        len(long),
        share,
        found,
        gain,
        advise(found, best[True], best[False], gain, share, short),
    )
    checkpoint.write_json(output / "compare.json", asdict(result))
    return result


def interval(
    mark: Callable[[np.ndarray], float],
    sheets: list[np.ndarray],
    minus: list[np.ndarray] | None = None,
    about: Sequence[Hashable] | None = None,
) -> Interval:
    """The mean over seeds of a measure, or of its difference to that of other sheets, with bounds
    from resampling the examples: each sample takes the same ones for all seeds and both sides.

    Examples `about` the same text come together: answers to 40 questions about one contract say
    less than those about 40. Of a single text, questions are all there is to draw from.
    """

    def value(rows: Any) -> float:
        own = float(np.mean([mark(sheet[rows]) for sheet in sheets]))
        return own if minus is None else own - float(np.mean([mark(s[rows]) for s in minus]))

    count = len(sheets[0])
    groups: dict[Hashable, list[int]] = {}
    for place in range(count):
        groups.setdefault(place if about is None else about[place], []).append(place)
    rows = list(groups.values()) if len(groups) > 1 else [[place] for place in range(count)]
    random = np.random.default_rng(0)
    samples = []
    for _ in range(_RESAMPLES):
        drawn = random.integers(len(rows), size=len(rows))
        samples.append(value(np.concatenate([rows[place] for place in drawn])))
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(value(slice(None)), float(low), float(high))


def advise(
    found: list[Contender],
    short: Contender,
    long: Contender,
    gain: Interval,
    share: float,
    tokens: int,
) -> str:
    """What to do, in plain words."""
    shown = f"{gain.value:+.3f} (95% between {gain.low:+.3f} and {gain.high:+.3f})"
    beyond = f"{share:.0%} of the test examples have more than {tokens:,} tokens."
    if gain.low > 0:
        return f"Long context helps: take '{long.name}', {shown} over '{short.name}'. {beyond}"
    if gain.high < 0:
        return f"Long context hurts: take '{short.name}'; '{long.name}' is {shown}. {beyond}"
    best = max(one.score.value for one in found)
    may_be = [one for one in found if one.score.high >= best or one in (short, long)]
    cheap = min(may_be, key=lambda one: one.train_seconds)
    return (
        f"These examples show no difference: '{long.name}' is {shown} against '{short.name}'. "
        f"'{cheap.name}' is the cheapest that may be as good as any; more test examples or seeds "
        f"would tell more. {beyond}"
    )


def _carry_out(task: Any, run: Path, console: Console) -> tuple[np.ndarray, dict[str, Any]]:
    """The test sheet of a contender's run, and what it cost; read back if it is there already."""
    kept, costs = run / "sheet.safetensors", run / "costs.json"
    if done_before(task.recipe, run) is not None and costs.exists():
        return checkpoint.load_tensors(kept)["sheet"].numpy(), checkpoint.read_json(costs)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    results = finetune(task, run, resume=(run / "recipe.json").exists(), console=console)
    memory = torch.cuda.max_memory_allocated() / 2**20 if gpu else None
    folder, last = checkpoint.find(run, "best"), checkpoint.find(run)
    assert folder is not None
    assert last is not None
    model = load_model(task.recipe, folder)
    started = time.monotonic()
    with half(task.recipe, model):
        sheet = task.sheet(model, "test")
    cost = {
        "valid": results["valid"][task.recipe.measure],
        "train_seconds": checkpoint.progress(last)["seconds"],
        "documents_per_second": len(sheet) / (time.monotonic() - started),
        "memory_mib": memory,
    }
    checkpoint.save_tensors(kept, {"sheet": torch.from_numpy(sheet)})
    checkpoint.write_json(costs, cost)
    return sheet, cost
