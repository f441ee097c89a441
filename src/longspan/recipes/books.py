"""Byte models of whole novels, and the parts that comparisons on novels share."""

from typing import Any

from longspan.data.text import Source
from longspan.train.recipe import Evaluation, Optimizer, Phase, Recipe

WINDOWS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 1024, 1024, 1024)
FEED_FORWARD = 2240
NOVELS = Source(
    "documents",
    train=("books-train.jsonl.xz", "books-train-extra.jsonl.xz"),
    valid=("books-valid.jsonl.xz",),
    test=("books-test.jsonl.xz",),
)
MUON = Optimizer("muon", betas=(0.9, 0.95), weight_decay=0.1, clip=1.0, schedule="linear")


def skeleton(
    attention: Any,
    *,
    layers: int = 12,
    hidden: int = 512,
    heads: int = 8,
    feed_forward: int = FEED_FORWARD,
    dropout: float = 0.1,
) -> dict[str, Any]:
    """A decoder without biases, with RMS norms in front; everything but its attention.

    What lies between its matrix products is as little as can be: norms without weights, squared
    ReLU, no dropout inside the feed-forward part, half precision between layers. With weights,
    GELU and float32 there, a step without dropout took 15% longer on an H200 (LOG.md).
    """
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
        "hidden_act": "relu2",
        "norm": "unit",
        "half_residual": True,
        "feed_forward_bias": False,
        "hidden_dropout_prob": dropout,
        "activation_dropout": 0.0,
        "attention": attention,
    }


def windows(
    left: tuple[int, ...], dilation: tuple[int, ...], heads: int = 8, dilated: int = 2
) -> list[dict[str, Any]]:
    """Rotary windows, a setting per layer; only the last `dilated` heads are dilated."""
    return [
        {
            "kind": "window",
            "left": own,
            "dilation": [1] * (heads - dilated) + [step] * dilated,
            "norm_keys": True,
        }
        for own, step in zip(left, dilation, strict=True)
    ]


def books() -> Recipe:
    """Novels as JSON lines: 40M, 12 layers, rotary windows of 64 to 1,024, Muon; 11 minutes.

    Reads a folder with books-train.jsonl.xz, books-train-extra.jsonl.xz, books-valid.jsonl.xz and
    books-test.jsonl.xz, each line a document with its "text"; or one such file, whose documents
    are then split. On one H200 it reads 764 million bytes in 10.5 minutes, 12 with compiling and
    evaluating, and then needs 1.301 bits per character on books-valid, 1.222 on books-test:

    - 40M parameters in 12 layers of 512: the size of Longformer's small model. Feed-forward layers
      of 2,240 rather than 2,048 take up what relative positions would have cost.
    - Windows that grow with depth, as the paper's Table 4 found best, from 64 so that most layers
      are cheap. Two heads of the top layers look twice as far at the same price.
    - Rotary positions: the fused kernel does them, relative ones go without it.
    - Queries and keys of one length, so that Muon's high learning rate cannot make scores explode.
    - Rows of 8,192: the top layers see 2,048 back and stand on others that see less, so hardly a
      byte of a row suffers from its beginning; and 16 of them, 131,072 bytes, fill the device.
    - bfloat16 and one compiled graph: the length never changes, so that it is compiled once.
    - Muon for matrices, which needs about half of AdamW's steps, AdamW for the rest.
    - A learning rate of 3e-3: in trials of 400 steps 4e-3 did better than 2e-3 and 8e-3, and longer
      runs want lower ones.
    - Linear decay to zero: it averages the last weights as a moving average of them would, so
      that there is none.
    - Over-fitting is what stopped a first trial (train 1.18, valid 1.38 after 3.4 passes over
      books-train). Hence both training files, 152 MB; five passes over them; dropout 0.1 on what is
      added to the residual; weight decay 0.1; and rows cut elsewhere in every pass.
    """
    return Recipe(
        name="books",
        model=skeleton(windows(WINDOWS, tuple(2 if left == 1024 else 1 for left in WINDOWS))),
        data=NOVELS,
        phases=(Phase(steps=8000, length=8192, batch=16, learning_rate=3e-3, warmup=250),),
        optimizer=MUON,
        evaluation=Evaluation(
            "sliding", length=16_384, stride=8192, batch=4, every=1000, limit=1_000_000
        ),
        compile="model",
        minutes=10.5,
        save_every=500,
        sample_every=4000,
    )


def books_small() -> Recipe:
    """Novels as JSON lines: 5.6M, 7 layers of 256, small enough to be carried along; 8 minutes.

    In bfloat16 its weights take 11 MB. Smaller models over-fit less: dropout is 0.05. On a CPU
    each byte it writes takes a few milliseconds.
    """
    left = (32, 64, 128, 256, 256, 512, 1024)
    return Recipe(
        name="books-small",
        model=skeleton(
            windows(left, (1,) * 6 + (2,), heads=4, dilated=1),
            layers=7,
            hidden=256,
            heads=4,
            feed_forward=1024,
            dropout=0.05,
        ),
        data=NOVELS,
        phases=(Phase(steps=8000, length=8192, batch=16, learning_rate=4e-3, warmup=250),),
        optimizer=MUON,
        evaluation=Evaluation(
            "sliding", length=16_384, stride=8192, batch=4, every=1000, limit=1_000_000
        ),
        compile="model",
        minutes=8.0,
        save_every=500,
        sample_every=2000,
    )
