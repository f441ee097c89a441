"""A byte model of whole novels."""

from longspan.data.text import Source
from longspan.train.recipe import Evaluation, Optimizer, Phase, Recipe

WINDOWS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 1024, 1024, 1024)


def books() -> Recipe:
    """Novels as JSON lines: 38M, 12 layers, rotary windows of 64 to 1,024, Muon.

    Reads a folder with books-train.jsonl.xz, books-valid.jsonl.xz and books-test.jsonl.xz, each
    line a document with its "text"; or one such file, whose documents are then split.
    """
    return Recipe(
        name="books",
        model={
            "hidden_size": 512,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "intermediate_size": 2048,
            "hidden_act": "gelu",
            "norm": "rms",
            "feed_forward_bias": False,
            "hidden_dropout_prob": 0.1,
            "attention": [
                {
                    "kind": "window",
                    "left": left,
                    "dilation": [1] * 6 + [2 if left == 1024 else 1] * 2,
                    "norm_keys": True,
                }
                for left in WINDOWS
            ],
        },
        data=Source(
            "documents",
            train=("books-train.jsonl.xz",),
            valid=("books-valid.jsonl.xz",),
            test=("books-test.jsonl.xz",),
        ),
        phases=(Phase(steps=6000, length=8192, batch=16, learning_rate=2e-3, warmup=200),),
        optimizer=Optimizer(
            "muon", betas=(0.9, 0.95), weight_decay=0.1, clip=1.0, schedule="linear", final=0.02
        ),
        evaluation=Evaluation(
            "sliding", length=16_384, stride=8192, batch=4, every=500, limit=1_000_000
        ),
        compile=True,
        save_every=500,
        sample_every=1000,
    )
