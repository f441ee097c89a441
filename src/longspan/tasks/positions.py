"""What a short checkpoint's positions are worth when it is made long: the paper's Table 5.

Every arm is a recipe for masked tokens of the same documents, and all are scored on the same hidden
tokens. A checkpoint without a head gets one first, and is then trained as a whole on rows of its
own length: only after that is it a short model of masked tokens, of which long ones can be made.
"""

import gc
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from longspan.hub.convert import load_config, positions_of
from longspan.models import LongspanForMaskedLM
from longspan.tasks.finetune import done_before, finetune, half, read_metrics
from longspan.tasks.mlm import MaskedLM
from longspan.tasks.start import build_model, find_source, has_head, load_tokenizer
from longspan.train import checkpoint
from longspan.train.finetuning import Finetuning, Start

HEAD, SHORT, RANDOM, COPIED = "head", "short", "random", "copied"
TRAINED, POSITIONS, CONTROL = "trained", "positions", "short-trained"
_NARROW = "narrow"  # the short model with the windows of the long one
# A new head, the whole of a model that has just got one, and positions in an otherwise frozen model
# have far to go; long models learn at the recipe's rate.
_RATES = {HEAD: 1e-3, SHORT: 5e-4, POSITIONS: 1e-3}


class Kind(NamedTuple):
    label: str
    paper: float | None  # bits per character of RoBERTa-base in Table 5


KINDS = {
    HEAD: Kind("short, only its new head trained", None),
    SHORT: Kind("short", 1.846),
    RANDOM: Kind("long, new positions random", 10.299),
    COPIED: Kind("long, positions copied", 1.957),
    TRAINED: Kind("long, copied, then trained", 1.753),
    POSITIONS: Kind("long, only new positions trained", 1.850),
    CONTROL: Kind("short, trained as much", None),
}


@dataclass(frozen=True)
class Arm:
    """What one way of getting long reached and took."""

    name: str
    label: str
    paper: float | None
    bits_per_character: float
    bits_per_token: float
    updates: int
    tokens: int
    seconds: float
    curve: list[tuple[int, float]]  # updates, bits per character on validation documents


@dataclass(frozen=True)
class Claim:
    text: str
    holds: bool


@dataclass(frozen=True)
class Study:
    source: str
    short: int
    length: int
    window: int
    valid_tokens: int
    valid_characters: int
    arms: list[Arm]
    claims: list[Claim]


def study(
    recipe: Finetuning,
    output: Path,
    console: Console | None = None,
    only: Collection[str] = (),
) -> Study | None:
    """Carry out every arm in a folder of its own; or `only` some of them, and tell nothing.

    An arm that is complete is not done again, one that was interrupted goes on. Once the short
    model is there, its long ones do not wait for one another: they may be carried out side by side.
    """
    console = console or Console()
    strange = [name for name in only if name not in KINDS]
    if strange:
        raise ValueError(f"there is no arm {strange[0]!r}: choose from {', '.join(KINDS)}")
    if recipe.model.source is None:
        raise ValueError("there is no model to start from: give --model FOLDER or a hub name")
    source = find_source(recipe.model.source)
    kind, short = positions_of(load_config(source))
    if kind != "learned" or short is None or short >= recipe.model.length:
        raise ValueError(
            f"{recipe.model.source} has {short or 'no'} {kind} positions: the study needs a "
            f"checkpoint with fewer learned ones than model.length={recipe.model.length}"
        )
    headless = not has_head(source, LongspanForMaskedLM)
    task: Any = None
    found = []
    for name, own in plan(recipe, output, short, headless).items():
        if only and name not in only:
            continue
        _check_start(own, output, [HEAD, SHORT] if headless else [SHORT])
        console.rule(KINDS[name].label)
        task = MaskedLM(own, None if task is None else task.documents)
        trains = name not in (RANDOM, COPIED) and (headless or name != SHORT)
        found.append(_carry_out(task, name, output / name, trains, console))
        if name == SHORT:
            start = source if not headless else find_source(output / SHORT)
            make_narrow(start, output / _NARROW, recipe.model.window)
        # The next arm shall find the memory that this one used.
        gc.collect()
        torch.compiler.reset()
    if only:
        return None
    valid = task.documents.valid
    return Study(
        Path(recipe.model.source).name,
        short,
        recipe.model.length,
        recipe.model.window,
        sum(len(one.ids) for one in valid),
        sum(one.characters for one in valid),
        found,
        judge({arm.name: arm.bits_per_character for arm in found}),
    )


def plan(recipe: Finetuning, output: Path, short: int, headless: bool) -> dict[str, Finetuning]:
    """The recipe of each arm. Short ones read as many tokens in a step, in rows of their own."""
    times = max(1, recipe.model.length // short)
    checks = recipe.evaluation
    brief = replace(
        recipe,
        model=replace(recipe.model, length=short, window=2 * short),
        batch=recipe.batch * times,
        evaluation=replace(checks, batch=checks.batch * times, limit=checks.limit * times),
    )
    long = _start(recipe, output / _NARROW)
    made = {
        SHORT: _start(brief, output / HEAD) if headless else brief,
        RANDOM: replace(long, model=replace(long.model, positions="random")),
        COPIED: long,
        TRAINED: long,
        POSITIONS: replace(
            long,
            model=replace(long.model, freeze="all-but-positions"),
            optimizer=replace(long.optimizer, weight_decay=0.0),
        ),
        CONTROL: _start(brief, output / SHORT) if headless else brief,
    }
    if headless:
        made = {HEAD: replace(brief, model=replace(brief.model, freeze="all-but-head")), **made}
    return {
        name: replace(own, name=name, learning_rate=_RATES.get(name, recipe.learning_rate))
        for name, own in made.items()
    }


def _start(recipe: Finetuning, folder: Path) -> Finetuning:
    return replace(recipe, model=replace(recipe.model, source=str(folder)))


def _check_start(recipe: Finetuning, output: Path, first: list[str]) -> None:
    """A folder that is not there would be looked for on the hub."""
    start = Path(str(recipe.model.source))
    if start.parent == output and not start.exists():
        flags = " ".join(f"--only {name}" for name in first)
        raise ValueError(
            f"the arm {recipe.name} starts from {start}, which is not there yet: run {flags} first"
        )


def make_narrow(source: str, folder: Path, window: int) -> None:
    """A copy of a model of masked tokens whose layers see no more than `window` tokens."""
    if (folder / "config.json").exists():
        return
    tokenizer = load_tokenizer(source)
    start = Start(source, length=1, window=window)  # as many positions as it has
    model = build_model(start, LongspanForMaskedLM, tokenizer, keep_head=True)
    for setting in model.config.attention:
        own = setting["window"]
        setting["window"] = min(window, own) if isinstance(own, int) else own
    unfinished = checkpoint.unfinished(folder)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def judge(bits: dict[str, float]) -> list[Claim]:
    """What the paper found, asked of these numbers."""
    short, random, copied = bits[SHORT], bits[RANDOM], bits[COPIED]
    trained, positions = bits[TRAINED], bits[POSITIONS]
    return [
        Claim(
            "random positions are far worse than copied ones: twice the bits", random > 2 * copied
        ),
        Claim("copied positions come within 10% of the short model", copied < 1.1 * short),
        Claim("trained, the long model beats the short one", trained < short),
        Claim("training the new positions alone helps", positions < copied),
        Claim("training everything helps more", trained < positions),
        Claim("the long model beats the short one trained as much", trained < bits[CONTROL]),
    ]


def _carry_out(task: MaskedLM, name: str, run: Path, trains: bool, console: Console) -> Arm:
    recipe, known = task.recipe, done_before(task.recipe, run)
    if known is not None:
        console.print("done before", highlight=False)
        scores = known["valid"]
    elif trains:
        again = (run / "recipe.json").exists()
        scores = finetune(task, run, resume=again, console=console)["valid"]
    else:
        scores = _score(task)
        run.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(run / "recipe.json", recipe.to_dict())
        checkpoint.write_json(run / "results.json", {"valid": scores})
    console.print(f"{scores['bits_per_character']:.4f} bits per character", highlight=False)
    entries = read_metrics(run)
    last = next((e for e in reversed(entries) if "split" not in e), {})
    return Arm(
        name,
        KINDS[name].label,
        KINDS[name].paper,
        scores["bits_per_character"],
        scores["bits_per_token"],
        last.get("step", 0),
        last.get("tokens", 0),
        last.get("training_seconds", 0.0),
        [(e["step"], e["bits_per_character"]) for e in entries if e.get("split") == "valid"],
    )


def _score(task: MaskedLM) -> dict[str, float]:
    """Of the model as training would begin with it."""
    torch.manual_seed(task.recipe.seed)
    model: Any = task.build()
    model = model.to("cuda") if torch.cuda.is_available() else model
    with half(task.recipe, model):
        return task.evaluate(model, "valid")
