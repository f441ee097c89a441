"""Longformer, Transformer-XL, the Compressive Transformer and dense attention side by side.

One skeleton, the same novels, 65,536 bytes a step, the same time, and within 1% the same number
of parameters: where positions or a compressor have weights, feed-forward layers have fewer. Rates
of learning and regularisation are those of `books` for all; nothing was tuned for any of them. The
published models of each are recipes of their own.
"""

from dataclasses import replace
from typing import Any

from longspan.recipes.books import FEED_FORWARD, MUON, NOVELS, WINDOWS, skeleton, windows
from longspan.train.recipe import Evaluation, Phase, Recipe

_BYTES = 65_536
_STEPS = 2000
_TOP = tuple(2 if left == 1024 else 1 for left in WINDOWS)  # dilation of two heads, by layer


def rival(
    name: str,
    attention: Any,
    *,
    length: int,
    evaluation: Evaluation,
    feed_forward: int = FEED_FORWARD,
    compile: Any = "model",
) -> Recipe:
    """The same but for its attention, and the length of its rows."""
    return Recipe(
        name=name,
        model=skeleton(attention, feed_forward=feed_forward),
        data=NOVELS,
        phases=(
            Phase(
                steps=_STEPS,
                length=length,
                batch=_BYTES // length,
                learning_rate=3e-3,
                warmup=_STEPS // 20,
            ),
        ),
        optimizer=MUON,
        evaluation=replace(evaluation, every=_STEPS // 8, limit=500_000),
        compile=compile,
        minutes=2.0,
        save_every=_STEPS // 4,
        sample_every=0,
    )


def longformer() -> Recipe:
    """Novels, two minutes: windows of 64 to 1,024 on rows of 8,192 from the first step on."""
    return rival(
        "rival-longformer",
        windows(WINDOWS, _TOP),
        length=8192,
        evaluation=Evaluation("sliding", length=16_384, stride=8192, batch=4),
    )


def staged() -> Recipe:
    """Novels, two minutes: the same in three phases, windows and rows doubling in each.

    As the paper stages it, the learning rate halves with every phase; most of the time goes into
    the first. The last phase has the windows of `rival-longformer`.
    """
    made = longformer()
    (whole,) = made.phases
    phases = tuple(
        replace(
            whole,
            steps=int(share * _STEPS),
            length=whole.length // part,
            batch=whole.batch * part,
            learning_rate=whole.learning_rate * part / 4,
            warmup=_STEPS // 20 if part == 4 else _STEPS // 100,
            windows=tuple(left // part for left in WINDOWS),
        )
        for part, share in ((4, 0.6), (2, 0.25), (1, 0.15))
    )
    return replace(
        made,
        name="rival-staged",
        phases=phases,
        optimizer=replace(MUON, schedule="linear", over="run"),
    )


def xl() -> Recipe:
    """Novels, two minutes: Transformer-XL, segments and memory of 512."""
    return rival(
        "rival-xl",
        {"kind": "xl", "memory": 512},
        length=512,
        feed_forward=FEED_FORWARD - 256,  # the projection of relative positions
        evaluation=Evaluation("streamed", length=512, batch=16, attention={"memory": 1024}),
        compile="layers",
    )


def compressive() -> Recipe:
    """Novels, two minutes: the Compressive Transformer, sizes as on PG-19, a convolution.

    The compressor, 6M of the parameters, learns from its own loss and predicts nothing.
    """
    return rival(
        "rival-compressive",
        {
            "kind": "compressive",
            "memory": 512,
            "compressed": 512,
            "rate": 2,
            "compression": "conv",
            "loss": "attention",
        },
        length=512,
        feed_forward=FEED_FORWARD - 768,
        evaluation=Evaluation("streamed", length=512, batch=16),
        compile="layers",
    )


def compressive_mean() -> Recipe:
    """Novels, two minutes: the same with the mean of two tokens, which has no parameters."""
    return rival(
        "rival-compressive-mean",
        {
            "kind": "compressive",
            "memory": 512,
            "compressed": 512,
            "rate": 2,
            "compression": "mean",
        },
        length=512,
        feed_forward=FEED_FORWARD - 256,
        evaluation=Evaluation("streamed", length=512, batch=16),
        compile="layers",
    )


def dense() -> Recipe:
    """Novels, two minutes: dense attention on rows of 1,024."""
    return rival(
        "rival-dense",
        {"kind": "full", "norm_keys": True},
        length=1024,
        evaluation=Evaluation("sliding", length=1024, stride=256, batch=64),
    )
