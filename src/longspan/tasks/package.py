"""The language model that the package carries: where it lies, and how it gets there."""

import json
import os
import shutil
from pathlib import Path

import longspan
from longspan.models.decoder import LongspanForCausalLM
from longspan.models.sampling import Sampler
from longspan.tasks.charlm import CharLM
from longspan.tasks.runs import Run, load_model, open_run
from longspan.tasks.writing import write
from longspan.train.checkpoint import unfinished, write_text
from longspan.train.recipe import change

PLACE = Path(longspan.__path__[0]) / "packaged"
LARGEST = 12_000_000  # bytes of weights
_WORSE = 0.01  # bits per character that fewer digits may cost


def packaged_model() -> Path:
    """The folder of the model that came with the package."""
    if not (PLACE / "config.json").exists():
        raise ValueError(
            "no model came with this package: `longspan train tiny` makes one in two minutes on a "
            "CPU, and then `longspan generate runs/tiny`"
        )
    return PLACE


def package_run(folder: Path, destination: Path, data: Path | None = None, limit: int = 0) -> str:
    """Write a run's best model to a folder, in bfloat16, with a card; returns the card.

    `limit` is how many bytes of valid and test are scored for it; 0 = all.
    """
    run = open_run(folder)
    if data is not None:
        run = run._replace(recipe=change(run.recipe, {"data.path": str(data)}))
    task = CharLM(run.recipe)
    model = load_model(run.checkpoint)
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        raise ValueError(
            f"{folder}: {size / 1e6:.1f} MB of weights in bfloat16, but at most "
            f"{LARGEST / 1e6:.0f} are carried along; `longspan train books-small` makes fewer"
        )
    before = task.evaluate(model, "valid", limit)["bits_per_character"]
    made = unfinished(destination)
    if made.exists():
        shutil.rmtree(made)
    model.bfloat16().save_pretrained(made)
    written = load_model(made)
    scores = {
        split: task.evaluate(written, split, limit)["bits_per_character"] for split in _SPLITS
    }
    if scores["valid"] > before + _WORSE:
        shutil.rmtree(made)
        raise ValueError(
            f"{folder}: bfloat16 takes it from {before:.4f} to {scores['valid']:.4f} bits per "
            "character; it cannot be carried along"
        )
    card = _card(run, task, written, scores, limit)
    write_text(made / "README.md", card)
    if destination.exists():
        shutil.rmtree(destination)
    os.replace(made, destination)
    return card


_SPLITS = ("valid", "test")


def _card(
    run: Run, task: CharLM, model: LongspanForCausalLM, scores: dict[str, float], limit: int
) -> str:
    recipe, config = run.recipe, model.config
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    step = int(run.checkpoint.name.rpartition("-")[2])
    entries = [e for e in map(json.loads, lines) if "split" not in e and e["step"] <= step]
    last = entries[-1]
    evaluation = recipe.evaluation
    how = f"windows of {evaluation.length:,} bytes, the last {evaluation.stride:,} of each scored"
    if evaluation.kind == "streamed":
        how = f"segments of {evaluation.length:,} bytes connected by state"
    much = f"the first {limit:,} bytes of each" if limit else "all of both"
    sizes = ", ".join(f"{split} {len(getattr(task.corpus, split)):,}" for split in _SPLITS)
    sample = "".join(write(model, "It was", 300, Sampler(0.8, None, 0.95, seed=0)))
    quoted = "\n".join(f"    {line}" for line in f"It was{sample}".splitlines())
    return f"""# A byte-level language model, recipe `{recipe.name}`

{model.num_parameters() / 1e6:.2f}M parameters, {config.num_hidden_layers} layers of \
{config.hidden_size}, written in bfloat16.

- Made by `longspan train {recipe.name}`: {last["step"]:,} steps, {last["tokens"]:,} bytes \
read, {last["training_seconds"] / 60:.1f} minutes of training; seed {recipe.seed}.
- Text: {_source(run)}; {len(task.corpus.train):,} bytes to train on, {sizes}.
- Bits per character of these very weights: **{scores["valid"]:.4f}** on valid, \
**{scores["test"]:.4f}** on test; {much}, by {how}.

It writes in the manner of what it has read. It knows nothing, and means nothing by what it says.

{quoted}
"""


def _source(run: Run) -> str:
    data = run.recipe.data
    if data.kind == "python":
        return "the Python standard library's sources"
    return ", ".join(data.train) or Path(data.path or "").name
