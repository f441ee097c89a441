"""Relative effective context length: how much context still helps a model, beside its rivals.

Transformer-XL's measure. A longer context counts as useful if it lowers the perplexity of the
hardest tokens by 1%, and only what it gains over the best of all models at the shorter context
is counted, so that models of different strength can be compared.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from longspan.data.text import Bytes
from longspan.models.decoder import LongspanForCausalLM
from longspan.tasks.bits import sliding_nats

# Nats [tokens] of the same tokens, each with exactly this many tokens before it.
Losses = Callable[[int], np.ndarray]


def losses_of(
    model: LongspanForCausalLM,
    text: Bytes,
    count: int,
    batch: int = 64,
    segment: int | None = None,
) -> Losses:
    """Of the last `count` bytes of a text; contexts are read at once, or, for models with
    memories, in segments."""

    def losses(context: int) -> np.ndarray:
        if len(text) < count + context:
            raise ValueError(
                f"{count} bytes with {context} before each need {count + context}, the text has "
                f"{len(text)}"
            )
        part = text[len(text) - count - context :]
        nats = sliding_nats(model, part, length=context, stride=1, batch=batch, segment=segment)
        return nats[-count:].cpu().numpy()

    return losses


def recl(
    models: Sequence[Losses],
    *,
    start: int,
    step: int,
    longest: int,
    fraction: float = 0.1,
    threshold: float = 0.01,
) -> list[int]:
    """For each model the context length beyond which more of it no longer helps.

    Args:
        models: the losses of a group of models on the same tokens.
        start, step: the first context length, and by how much it grows.
        longest: the last one to try; a model that still gains there gets it.
        fraction: of the tokens, the hardest ones, that count.
        threshold: the relative gain in perplexity below which it ends.
    """
    if start < 1 or step < 1 or longest < start:
        raise ValueError(f"start={start}, step={step}, longest={longest}: at least 1, and ordered")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be above 0 and at most 1")
    known = [cache(losses) for losses in models]

    def ends(own: Losses) -> int:
        context = start
        while context + step <= longest:
            best = np.minimum.reduce([losses(context) for losses in known])
            count = max(1, round(fraction * len(best)))
            hard = np.argsort(-best, kind="stable")[:count]
            now = best[hard].mean()
            later = np.minimum(best, own(context + step))[hard].mean()
            if 1.0 - math.exp(later - now) < threshold:
                break
            context += step
        return context

    return [ends(own) for own in known]
