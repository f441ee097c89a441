"""Long Range Arena's ListOps and byte-level text, for every kind of attention that encoders have.

Sizes, steps, batch, learning rate and its schedule are those of the benchmark's released
configurations, the same for every kind; `--set attention=KIND` chooses it. What differs from the
released code:

- Embeddings are normed, and scores come from a head of this library's.
- Batches are as long as their longest document and made of documents of like length, 50 batches
  drawn at a time; gradients are clipped to a norm of 1.
- Of IMDB's training reviews a twentieth decides which checkpoint is the best, where the benchmark
  takes the test reviews for that; and 4,096 bytes are read, as in the paper, not 1,000.
- Closing brackets of ListOps are symbols; the released tokenizer keeps letters and digits alone.
- Linformer has 64 keys, shared over layers, where the released one has 16 or 32; Performer has 256
  features, where the released one has 2 on ListOps. Both levels of Poolingformer share their
  projections: no kind's parameters differ by more than a tenth from those of a window.
"""

from typing import Any

from longspan.data.examples import Examples
from longspan.train.finetuning import Checks, Finetuning, New, Start
from longspan.train.recipe import Optimizer


def listops() -> Finetuning:
    """Long Range Arena's ListOps: --set attention=KIND, accuracy; data are made, no file needed."""
    return _arena(
        "lra-listops",
        New("listops", _sizes(layers=6, hidden=512, heads=8, feed_forward=2048)),
        Examples(train="listops:train", valid="listops:valid", test="listops:test"),
        length=2000,
        steps=5000,
        warmup=1000,
    )


def text() -> Finetuning:
    """Long Range Arena's text, IMDB as bytes: --data TRAIN --test TEST --set attention=KIND."""
    return _arena(
        "lra-text",
        New("bytes", _sizes(layers=4, hidden=256, heads=4, feed_forward=1024)),
        Examples(valid_share=0.05),
        length=4096,
        steps=20_000,
        warmup=8000,
    )


def _sizes(*, layers: int, hidden: int, heads: int, feed_forward: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
        "norm_first": True,
        "position": "sinusoidal",
        "embedding_scale": True,  # else positions would drown the symbols
        "type_vocab_size": 0,
        "classifier_act": "relu",
    }


def _arena(
    name: str, new: New, data: Examples, *, length: int, steps: int, warmup: int
) -> Finetuning:
    # What has no default, and dense attention, which is a window over everything.
    new.kinds.update(
        window={"window": 512, "separate_global": False},  # else a quarter more parameters
        linformer={"length": length, "rank": 64, "sharing": "layers"},
        poolingformer={"share_weights": True},  # for the same reason
        dense={"kind": "window", "window": 2 * length, "global_tokens": False},
    )
    return Finetuning(
        name=name,
        task="classify",
        measure="accuracy",
        model=Start(length=length, new=new),
        attention="window",
        data=data,
        updates=steps,
        batch=32,
        learning_rate=0.05 / warmup**0.5,  # the highest, at the end of warm-up
        warmup=float(warmup),
        too_long="head",
        packed=False,  # the family would make padded batches of a packed row in every layer
        alike=50,
        optimizer=Optimizer(
            betas=(0.9, 0.98), eps=1e-9, weight_decay=0.1, clip=1.0, schedule="rsqrt"
        ),
        evaluation=Checks(every=steps // 10, batch=32, limit=2000),
    )
