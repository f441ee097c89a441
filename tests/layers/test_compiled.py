"""Every kind as `torch.compile` makes it: one graph, for padded batches of any length.

Without a GPU the graph is made, and run as it was written; with one it is compiled, which tests
the compiler more than the graph: what it makes of these has failed before.
"""

from typing import Any

import pytest
import torch
from layers.family import DECODERS, DEVICE, DIM, ENCODERS, HEADS

import longspan

BACKEND = "inductor" if DEVICE.type == "cuda" else "eager"
SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": DIM,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
}
BASIC = [kind for kind in ENCODERS if "-" not in kind]
CAUSAL = [kind for kind in DECODERS if kind not in ("reformer-once", "performer-relu")]


def compiled(model: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend=BACKEND)


@pytest.mark.parametrize("kind", ["window", *BASIC])
def test_encoders(kind):
    """The first token is global, and nobody has to be told how many are."""
    torch.manual_seed(0)
    attention = {"window": 8} if kind == "window" else ENCODERS[kind]
    config = longspan.LongspanConfig(attention=attention, max_position_embeddings=66, **SIZES)
    model: Any = longspan.LongspanForSequenceClassification(config)
    model.to(DEVICE).eval()
    run = compiled(model)
    for tokens in (37, 41):
        ids = torch.randint(3, 30, (3, tokens)).to(DEVICE)
        mask = torch.ones_like(ids)
        mask[1, tokens - 9 :] = mask[2, :5] = 0
        found, wanted = (call(ids, attention_mask=mask).logits for call in (run, model))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", CAUSAL)
def test_decoders(kind):
    torch.manual_seed(0)
    config = longspan.LongspanDecoderConfig(attention=DECODERS[kind], **SIZES)
    model: Any = longspan.LongspanForCausalLM(config)
    model.to(DEVICE).eval()
    run = compiled(model)
    ids = torch.randint(3, 30, (2, 40)).to(DEVICE)
    torch.testing.assert_close(run(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-4)
