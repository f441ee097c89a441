"""A recipe at toy size: the same parts in the same order, done in seconds anywhere."""

from dataclasses import replace
from typing import Any

from longspan.train.recipe import Recipe

_HEADS = 2
_MOST = {"left": 8, "memory": 8, "compressed": 8, "clamp": 8}


def shrink(recipe: Recipe, steps: int = 2) -> Recipe:
    """Two layers, two heads, short windows and segments; `steps` steps per phase, float32."""
    given = recipe.model["attention"]
    settings = [given, given] if isinstance(given, dict) else [given[0], given[-1]]
    model = {
        **recipe.model,
        "hidden_size": 16,
        "num_hidden_layers": len(settings),
        "num_attention_heads": _HEADS,
        "intermediate_size": 32,
        "attention": [_shrink(setting) for setting in settings],
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


def _shrink(setting: dict[str, Any]) -> dict[str, Any]:
    small = dict(setting)
    for name, most in _MOST.items():
        if name in setting:
            small[name] = min(most, setting[name])
    if isinstance(setting.get("dilation"), list):
        small["dilation"] = [setting["dilation"][0], setting["dilation"][-1]]
    return small
