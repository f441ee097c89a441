"""Two minutes on a CPU, and nothing to download."""

from longspan.data.text import Source
from longspan.train.recipe import Evaluation, Optimizer, Phase, Recipe


def tiny() -> Recipe:
    """A small model of Python: trains on the standard library's sources, two minutes on a CPU."""
    return Recipe(
        name="tiny",
        model={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "norm": "rms",
            "attention": [{"left": left, "norm_keys": True} for left in (32, 64, 128, 128)],
        },
        data=Source("python"),
        phases=(
            Phase(steps=140, length=256, batch=16, learning_rate=1.5e-2, warmup=15),
            Phase(steps=60, length=1024, batch=4, learning_rate=8e-3, warmup=3),
        ),
        optimizer=Optimizer(
            "muon", betas=(0.9, 0.95), weight_decay=0.05, clip=1.0, schedule="linear", final=0.1
        ),
        evaluation=Evaluation("sliding", length=1024, stride=512, batch=4, every=100, limit=50_000),
        precision="no",
        save_every=100,
        sample_every=100,
    )
