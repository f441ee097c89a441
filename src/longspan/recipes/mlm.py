"""Continued pretraining of a checkpoint that was made long, as Longformer was made of RoBERTa.

What the paper leaves open is taken from its authors' published notebook: Adam's epsilon, weight
decay, clipping. The parts of a batch keep the scores of words, some 50,000 for every hidden token,
from filling a GPU.
"""

from dataclasses import replace

from longspan.data.examples import Examples
from longspan.train.finetuning import Checks, Finetuning, Start
from longspan.train.recipe import Optimizer


def mlm() -> Finetuning:
    """Masked tokens of long documents as published: 65,000 updates of 64 x 4,096 tokens."""
    return Finetuning(
        name="mlm",
        task="mlm",
        measure="bits_per_character",
        model=Start(length=4096, window=512),
        data=Examples(valid_share=0.05, test_share=0.05),
        updates=65_000,
        batch=64,
        accumulate=8,
        learning_rate=3e-5,
        warmup=500.0,
        too_long="split",
        optimizer=Optimizer(
            eps=1e-6, weight_decay=0.01, clip=5.0, schedule="polynomial", power=3.0
        ),
        evaluation=Checks(every=1000, batch=8, limit=128),
        save_every=1000,
    )


def head() -> Finetuning:
    """A head that scores words for a checkpoint without one; nothing else is trained.

    Rows of 512 tokens, each token seeing them all: as most checkpoints were trained. The encoder
    stays as it is, so a high learning rate is safe.
    """
    return replace(
        mlm(),
        name="mlm-head",
        model=Start(length=512, window=1024, freeze="all-but-head"),
        updates=2000,
        batch=128,
        accumulate=4,
        learning_rate=1e-3,
        warmup=100.0,
        evaluation=Checks(every=500, batch=64, limit=1024),
    )


def positions() -> Finetuning:
    """Only the new positions of a checkpoint made long, everything else frozen, as published."""
    recipe = mlm()
    return replace(
        recipe,
        name="mlm-positions",
        model=replace(recipe.model, freeze="all-but-positions"),
        optimizer=replace(recipe.optimizer, weight_decay=0.0),
    )
