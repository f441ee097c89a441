"""The learning rate of a step: warm-up, then a schedule."""

import math

from longspan.train.recipe import Plan


def learning_rate(recipe: Plan, step: float) -> float:
    """Of a step counted from 0, or of a place between two.

    Warm-up begins above 0 and reaches, in its last step, what the schedule has there. That falls
    with the steps that were done before, as in transformers' and PyTorch's schedules and those of
    the papers: the first step behind warm-up still has the top, and the end (`final`) is where the
    step after the last would be. So no step has a rate of 0, which would change nothing.
    """
    optimizer = recipe.optimizer
    number, inside = recipe.at(step)
    phase = recipe.phases[number]
    top = phase.learning_rate * min(1.0, (inside + 1) / max(1, phase.warmup))
    if optimizer.schedule == "constant":
        return top
    if optimizer.schedule == "rsqrt":
        return top * min(1.0, (max(1, phase.warmup) / (inside + 1)) ** 0.5)
    if optimizer.over == "run":
        first = recipe.phases[0].warmup
        done = (step - first) / max(1, recipe.steps - first)
    else:
        done = (inside - phase.warmup) / max(1, phase.steps - phase.warmup)
    done = max(0.0, done)
    if optimizer.schedule == "cosine":
        left = (1.0 + math.cos(math.pi * done)) / 2.0
    else:
        left = (1.0 - done) ** (optimizer.power if optimizer.schedule == "polynomial" else 1.0)
    return top * (optimizer.final + (1.0 - optimizer.final) * left)
