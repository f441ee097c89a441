"""A recipe at toy size: the same parts in the same order, done in seconds anywhere."""

from dataclasses import replace
from typing import Any

from longspan.data.tables import LISTOPS
from longspan.train.finetuning import Finetuning
from longspan.train.recipe import Recipe, change

_HEADS = 2
_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": _HEADS,
    "intermediate_size": 32,
}
# What stands behind it is cut off. A checkpoint, which stays as large as it is, mostly has 512
# positions: with twice as many it is made long, as it would be without --shrink.
_LENGTH, _NEW_LENGTH = 1024, 256
_WRITTEN, _BEAMS = 16, 2
_MOST = {
    **{"left": 8, "memory": 8, "compressed": 8, "clamp": 8},
    **{"stride": 4, "summary": 2, "longest": 8},
}


def shrink(recipe: Recipe, steps: int = 2) -> Recipe:
    """Two layers, two heads, short windows and segments; `steps` steps per phase, float32."""
    given = recipe.model["attention"]
    # One for all layers stays one, so that its options are set by the same paths.
    small = _shrink(given) if isinstance(given, dict) else [_shrink(given[n]) for n in (0, -1)]
    model = {
        **recipe.model,
        **_SIZES,
        "attention": small,
    }
    phases = tuple(
        replace(
            phase,
            steps=steps,
            length=12 + 6 * number,
            batch=2,
            warmup=min(phase.warmup, 1),
            windows=None if phase.windows is None else (4 + number, 8 + number),
        )
        for number, phase in enumerate(recipe.phases)
    )
    evaluation = replace(
        recipe.evaluation,
        length=16,
        stride=8,
        batch=2,
        attention=_shrink(recipe.evaluation.attention),
        every=0,
        limit=64,
    )
    return replace(
        recipe,
        model=model,
        phases=phases,
        evaluation=evaluation,
        data=replace(recipe.data, size=None),
        precision="no",
        accumulate=1,
        compile="no",
        minutes=0.0,
        log_every=1,
        save_every=0,
        sample_every=0,
    )


def shrink_finetuning(recipe: Finetuning) -> Finetuning:
    """The beginnings of a few examples, two steps or half a pass, float32; what starts from nothing
    is small, too."""
    toy: dict[str, Any] = {"data.limit": 8, "batch": 2, "accumulate": 1, "epochs": 0.5}
    toy |= {"precision": "no", "minutes": 0.0} | ({"updates": 2} if recipe.updates else {})
    toy |= {"model.length": min(recipe.model.length, _LENGTH), "too_long": "head"}
    toy["writing.longest"] = min(recipe.writing.longest, _WRITTEN)
    toy["writing.beams"] = min(recipe.writing.beams, _BEAMS)
    if recipe.model.new is not None:
        toy |= {f"model.new.config.{name}": size for name, size in _SIZES.items()}
        toy |= {"data.limit": 64, "evaluation.every": 0}
        toy["model.length"] = min(recipe.model.length, _NEW_LENGTH)
    for split in ("train", "valid", "test"):
        source = getattr(recipe.data, split)
        if source is not None and source.startswith(LISTOPS):
            toy[f"data.{split}"] = f"{source}#64"
    return change(recipe, toy)


def _shrink(setting: dict[str, Any]) -> dict[str, Any]:
    small = dict(setting)
    for name, most in _MOST.items():
        if name in setting:
            small[name] = min(most, setting[name])
    if isinstance(setting.get("dilation"), list):
        small["dilation"] = [setting["dilation"][0], setting["dilation"][-1]]
    return small
