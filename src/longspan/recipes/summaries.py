"""Texts about documents: LED's published settings, and a start for files of your own."""

from dataclasses import replace

from longspan.train.finetuning import Checks, Finetuning, Start, Writing
from longspan.train.recipe import Optimizer


def summarize() -> Finetuning:
    """Texts about your documents: --data FILE --text and --answers COLUMN, --question if any."""
    return Finetuning(
        name="summarize",
        task="summarize",
        measure="rougeLsum",
        model=Start(length=16384, window=1024),
        writing=Writing(longest=256),
        epochs=5.0,
        batch=8,
        accumulate=8,
        evaluation=Checks(batch=4, limit=64),
    )


def arxiv() -> Finetuning:
    """arXiv abstracts as LED's scripts have it: 16,384 in, 256 out; ROUGE-2 19.62 in the paper."""
    return replace(
        summarize(),
        name="arxiv",
        measure="rouge2",
        writing=Writing(longest=256, smoothing=0.0),
        warmup=1000.0,
        optimizer=Optimizer(clip=1.0, schedule="linear"),
        too_long="head",
    )


def scratch() -> Finetuning:
    """A small model that has read nothing before, as `longspan study summaries` trains it.

    Chosen by the loss: texts are written once, at the end, not while training. What knows little
    yet repeats itself, the more so the more beams it has; so no three words in a row may.
    """
    return replace(
        summarize(),
        name="scratch",
        measure="loss",
        model=Start(length=16384, window=512),
        writing=Writing(longest=256, no_repeat=3),
        learning_rate=5e-4,
        updates=3000,
        accumulate=1,
        too_long="head",
        evaluation=Checks(every=300, batch=8),
    )
