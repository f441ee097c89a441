"""Models with int8 weights: near the original, saved and loaded as any other, never trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.small import VOCAB, longformer, modernbert
from safetensors.torch import load_file
from torch import nn

import longspan
from longspan.layers.quantized import QuantizedLinear


def model(head: str = "Model") -> Any:
    return longspan.convert(longformer(head)).eval()


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.zeros(2, 60, dtype=torch.long)
    mask[:, :2] = 1
    return {"input_ids": torch.randint(3, VOCAB, (2, 60)), "global_attention_mask": mask}


def test_near_the_model_it_was_made_of() -> None:
    exact, small = model(), longspan.quantize(model())
    wanted = exact(**batch()).last_hidden_state
    out = small(**batch()).last_hidden_state
    assert 0 < (out - wanted).norm() < 0.05 * wanted.norm()
    assert small.config.quantize == "int8"
    assert exact.config.quantize is None  # it was a copy


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForMaskedLM"])
def test_saved_and_loaded(head: str, tmp_path: Path) -> None:
    small = longspan.quantize(model(head))
    small.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not list(tmp_path.glob("*.bin"))
    again = type(small).from_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[-2] for name, t in stored.items() if t.dtype == torch.int8} == {
        "qkv", "qkv_global", "project", "up", "down",
    }  # fmt: skip
    first, second = small(**batch()), again(**batch())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_in_bfloat16(tmp_path: Path) -> None:
    small = longspan.quantize(model())
    small.save_pretrained(tmp_path)
    half = longspan.LongspanModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wanted, out = (one(**batch()).last_hidden_state.float() for one in (small, half))
    assert (out - wanted).norm() < 0.05 * wanted.norm()


def test_rotary_and_gated_layers() -> None:
    exact = longspan.convert(modernbert("Model"), max_length=100).eval()
    wanted = exact(**batch()).last_hidden_state
    out = longspan.quantize(exact)(**batch()).last_hidden_state
    assert (out - wanted).norm() < 0.05 * wanted.norm()


def test_embeddings_norms_and_heads_stay() -> None:
    small: Any = longspan.quantize(model("ForSequenceClassification"))
    plain = {type(m) for m in small.modules() if next(m.children(), None) is None}
    assert {nn.Embedding, nn.LayerNorm, nn.Linear, QuantizedLinear} <= plain
    assert not any(isinstance(m, nn.Linear) for m in small.base_model.layers.modules())


def test_training_is_refused() -> None:
    small = longspan.quantize(model("ForSequenceClassification")).train()
    with pytest.raises(ValueError, match="int8 weights are for inference"):
        small(**batch(), labels=torch.tensor([0, 1]))


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match="int8 already"):
        longspan.quantize(longspan.quantize(model()))
    with pytest.raises(ValueError, match="its weights are int8; give the model"):
        longspan.to_transformers(longspan.quantize(model()))
    with pytest.raises(TypeError, match="only longspan's encoders"):
        longspan.quantize(longformer("Model"))
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    with pytest.raises(ValueError, match="layers of windows; here are performer"):
        longspan.LongspanConfig(attention={"kind": "performer"}, quantize="int8", **sizes)
    with pytest.raises(ValueError, match="quantize='int4' is unknown; choose from None, int8"):
        longspan.LongspanConfig(quantize="int4")
    with pytest.raises(ValueError, match="an encoder-decoder has quantize=None"):
        longspan.LongspanSeq2SeqConfig(quantize="int8")
