"""Longformer's character language models, as its Table 12 gives them.

What the paper leaves open is decided here: a window counts tokens to the left; the windows of the
layers of a phase are those of `WINDOWS`, whose mean, 229, is near the 230 that the paper states;
a printed dilation of k is a distance of k + 1 tokens; lengths and learning rates between the
printed ends double and halve; and warm-up is 10% of a phase but at most 10,000 steps.
"""

from typing import Any

from longspan.data.text import Source
from longspan.train.recipe import Evaluation, Optimizer, Phase, Recipe

PUBLISHED_SIZE = 100_000_000
WINDOWS = (32, 32, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512)
DILATION = (1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4)
LENGTHS = (2048, 4096, 8192, 16384, 23040)
BATCHES = (32, 32, 16, 16, 16)


def attention(
    windows: tuple[int, ...], dilation: tuple[int, ...], heads: int = 8, dilated: int = 2
) -> list[dict[str, Any]]:
    """A setting per layer; only the last `dilated` heads are dilated."""
    return [
        {
            "kind": "window",
            "left": left,
            "dilation": [1] * (heads - dilated) + [step] * dilated,
            "position": "relative",
        }
        for left, step in zip(windows, dilation, strict=True)
    ]


def longformer(
    name: str,
    *,
    windows: tuple[int, ...],
    dilation: tuple[int, ...],
    dropout: float,
    steps: tuple[int, ...],
    dilated: int = 2,
) -> Recipe:
    """A model of 512 with 8 heads, trained in as many phases as `steps` has: each doubles windows
    and length and halves the learning rate."""
    phases = tuple(
        Phase(
            steps=count,
            length=LENGTHS[number],
            batch=BATCHES[number],
            learning_rate=2.5e-4 / 2**number,
            warmup=min(count // 10, 10_000),
            windows=tuple(left * 2**number for left in windows),
        )
        for number, count in enumerate(steps)
    )
    return Recipe(
        name=name,
        model={
            "hidden_size": 512,
            "num_hidden_layers": len(windows),
            "num_attention_heads": 8,
            "intermediate_size": 2048,
            "hidden_act": "gelu",
            "hidden_dropout_prob": dropout,
            "attention": attention(windows, dilation, dilated=dilated),
        },
        data=Source("file", size=PUBLISHED_SIZE),
        phases=phases,
        optimizer=Optimizer("adamw", weight_decay=0.01, clip=0.25, schedule="constant"),
        evaluation=Evaluation(
            "sliding", length=32_256, stride=512, batch=1, every=5000, limit=200_000
        ),
        checkpointing=True,
        save_every=5000,
        sample_every=5000,
        log_every=100,
    )


def enwik8_small() -> Recipe:
    """Longformer's small model on enwik8: 41M, 12 layers, five phases; 1.00 in the paper."""
    return longformer(
        "enwik8-small",
        windows=WINDOWS,
        dilation=DILATION,
        dropout=0.2,
        steps=(430_000, 50_000, 50_000, 35_000, 5_000),
    )


def text8_small() -> Recipe:
    """Longformer's small model on text8: 41M, 12 layers, five phases; 1.10 in the paper."""
    return longformer(
        "text8-small",
        windows=WINDOWS,
        dilation=DILATION,
        dropout=0.2,
        steps=(430_000, 50_000, 50_000, 35_000, 5_000),
    )


def enwik8_large() -> Recipe:
    """Longformer's large model on enwik8: 102M, 30 layers, five phases; 0.99 in the paper."""
    windows = (32,) * 5 + (64,) * 5 + (128,) * 5 + (256,) * 8 + (512,) * 7
    return longformer(
        "enwik8-large",
        windows=windows,
        dilation=(1,) * 15 + (2,) * 5 + (3,) * 5 + (4,) * 5,
        dropout=0.4,
        steps=(350_000, 25_000, 10_000, 5_000, 5_000),
    )
