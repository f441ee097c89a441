"""Compiled runs learn as the others do, and are compiled once for each kind of layer."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch._dynamo.utils import counters

from longspan.data.text import Corpus
from longspan.recipes import find
from longspan.recipes.shrink import shrink
from longspan.tasks.charlm import CharLM
from longspan.train import loop
from longspan.train.recipe import change

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
CORPUS = Corpus(TEXT, TEXT[:100], TEXT[:100])


# With the most graphs that are made. Windows: the model. Memories: each layer as they fill up, and
# no more once they are full; embedding, dropout and norm are three more.
@pytest.mark.parametrize(
    ("name", "how", "most"),
    [
        ("books", "model", 1),
        ("rival-xl", "layers", 5),
        ("rival-compressive", "layers", 9),
        ("causal-routing", "layers", 4),
    ],
)
def test_compiled_losses_are_the_same(name, how, most, tmp_path, monkeypatch):
    # Graphs are traced and run as they are: generating code for a CPU takes minutes.
    made: Any = loop.TorchDynamoPlugin
    monkeypatch.setattr(
        loop, "TorchDynamoPlugin", lambda **options: made(**options | {"backend": "aot_eager"})
    )
    recipe = change(shrink(find(name), steps=8), {"model.hidden_dropout_prob": 0.0})
    found = {}
    for compile in ("no", how):
        torch.compiler.reset()
        counters.clear()
        own = change(recipe, {"compile": compile})
        run = tmp_path / compile
        loop.train(own, CharLM(own, CORPUS), run, console=Console(quiet=True))
        entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        found[compile] = [entry["loss"] for entry in entries if "split" not in entry]
    assert found[how] == pytest.approx(found["no"], rel=1e-4)
    assert 1 <= counters["stats"]["unique_graphs"] <= most
