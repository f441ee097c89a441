"""Transformer-XL and the Compressive Transformer, as published.

Two things differ from the originals: the biases of relative positions are each layer's own, and
the vocabulary is all 256 bytes. Their models of words (WikiText-103, PG-19) are not here: recipes
read bytes.
"""

from typing import Any

from longspan.data.text import Source
from longspan.recipes.enwik8 import PUBLISHED_SIZE
from longspan.train.recipe import Evaluation, Optimizer, Phase, Recipe


def _base(name: str) -> Recipe:
    """12 layers of 512, segments and memory of 512; evaluated with a memory of 2,100."""
    return _recurrent(
        name,
        sizes=(12, 512, 8, 2048),
        attention={"kind": "xl", "memory": 512},
        dropout=(0.1, 0.0),
        phases=(Phase(steps=400_000, length=512, batch=22, learning_rate=2.5e-4),),
        evaluation=Evaluation(
            "streamed",
            length=80,
            batch=10,
            attention={"memory": 2100, "clamp": 820, "same_length": True},
        ),
    )


def _large(name: str, warmup: int) -> Recipe:
    """24 layers of 1,024, segments and memory of 768; evaluated with a memory of 3,800."""
    return _recurrent(
        name,
        sizes=(24, 1024, 8, 3072),
        attention={"kind": "xl", "memory": 768},
        dropout=(0.15, 0.15),
        phases=(Phase(steps=400_000, length=768, batch=64, learning_rate=2.5e-4, warmup=warmup),),
        evaluation=Evaluation(
            "streamed",
            length=128,
            batch=8,
            attention={"memory": 3800, "clamp": 1000, "same_length": True},
        ),
    )


def _recurrent(
    name: str,
    *,
    sizes: tuple[int, int, int, int],
    attention: dict[str, Any],
    dropout: tuple[float, float],
    phases: tuple[Phase, ...],
    evaluation: Evaluation,
    optimizer: Optimizer | None = None,
) -> Recipe:
    layers, hidden, heads, feed_forward = sizes
    return Recipe(
        name=name,
        model={
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": feed_forward,
            "hidden_act": "relu",
            "pre_norm": False,
            "embedding_scale": True,
            "hidden_dropout_prob": dropout[0],
            "attention_probs_dropout_prob": dropout[1],
            "attention": attention,
        },
        data=Source("file", size=PUBLISHED_SIZE),
        phases=phases,
        optimizer=optimizer or Optimizer("adamw", weight_decay=0.0, clip=0.25, schedule="cosine"),
        evaluation=evaluation,
        save_every=4000,
        sample_every=4000,
        log_every=100,
    )


def xl_enwik8() -> Recipe:
    """Transformer-XL on enwik8: 41M, 12 layers; 1.06 in the paper."""
    return _base("xl-enwik8")


def xl_text8() -> Recipe:
    """Transformer-XL on text8: 41M, 12 layers."""
    return _base("xl-text8")


def xl_enwik8_large() -> Recipe:
    """Transformer-XL on enwik8: 277M, 24 layers; 0.99 in the paper."""
    return _large("xl-enwik8-large", warmup=4000)


def xl_text8_large() -> Recipe:
    """Transformer-XL on text8: 277M, 24 layers; 1.08 in the paper."""
    return _large("xl-text8-large", warmup=0)


def compressive_enwik8() -> Recipe:
    """Compressive Transformer on enwik8: 24 layers, convolution, rate 3; 0.97 in the paper.

    Our sources differ on the sizes of its two memories: 768 and 1,152 here, 3,072 compressed for
    evaluation. Batch, steps, dropout and warm-up are not known to us either: those of the large
    Transformer-XL stand in. The original updates the weights only every fourth step after 60,000,
    which is a larger batch: a second phase.
    """
    phases = (
        Phase(steps=60_000, length=768, batch=64, learning_rate=3e-4, warmup=4000),
        Phase(steps=85_000, length=768, batch=256, learning_rate=3e-4),
    )
    return _recurrent(
        "compressive-enwik8",
        sizes=(24, 1024, 8, 3072),
        attention={
            "kind": "compressive",
            "memory": 768,
            "compressed": 1152,
            "rate": 3,
            "compression": "conv",
            "loss": "attention",
        },
        dropout=(0.15, 0.15),
        phases=phases,
        evaluation=Evaluation("streamed", length=768, batch=8, attention={"compressed": 3072}),
        optimizer=Optimizer(
            "adamw", weight_decay=0.0, clip=0.1, schedule="cosine", over="run", final=1 / 300
        ),
    )
