"""Checkpoints of ours that are not what they should be."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import HfApi, RepoUrl, constants
from models.small import build, short_sizes
from safetensors.torch import load_file, save_file

from longspan import (
    LongspanForCausalLM,
    LongspanForMaskedLM,
    LongspanForTokenClassification,
    LongspanModel,
    convert,
)
from longspan.hub.checkpoint import convert_checkpoint
from longspan.models import LongspanDecoderConfig, loading
from longspan.models.loading import shortest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build("ForMaskedLM").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_a_file_cut_off(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for load in (LongspanForMaskedLM, transformers.AutoModelForMaskedLM):
        with pytest.raises(ValueError, match="damaged or cut off"):
            load.from_pretrained(saved)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="damaged or cut off"):
        LongspanForMaskedLM.from_pretrained(saved)


def test_weights_that_are_missing(saved):
    rewrite(saved, lambda weights: weights.pop("encoder.layers.1.down.weight"))
    for load in (LongspanForMaskedLM, transformers.AutoModelForMaskedLM, LongspanModel):
        with pytest.raises(ValueError, match=r"lacks 1 of its weights.*layers.1.down.weight"):
            load.from_pretrained(saved)


def test_weights_that_are_left_over(saved):
    rewrite(saved, lambda weights: weights.update(surplus=torch.ones(2)))
    for load in (LongspanForMaskedLM, transformers.AutoModelForMaskedLM):
        with pytest.raises(ValueError, match=r"1 weights that are none of it.*surplus"):
            load.from_pretrained(saved)
    # What one model leaves over may be another's head.
    _, info = LongspanModel.from_pretrained(saved, output_loading_info=True)
    assert "surplus" in info["unexpected_keys"]


def test_a_head_that_lacks_weights(saved):
    """It is no new one: the checkpoint says that it has it."""
    rewrite(saved, lambda weights: weights.pop("lm_head.dense.weight"))
    with pytest.raises(ValueError, match=r"lacks 1 of its weights.*lm_head\.dense\.weight"):
        LongspanForMaskedLM.from_pretrained(saved)


def test_a_language_model_with_a_weight_too_many(tmp_path):
    config = LongspanDecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    LongspanForCausalLM(config).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: weights.update(surplus=torch.ones(2)))
    with pytest.raises(ValueError, match=r"1 weights that are none of it.*surplus"):
        LongspanForCausalLM.from_pretrained(tmp_path)


def test_a_folder_without_a_config(saved):
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no LongspanModel: there is no config\.json"):
        LongspanModel.from_pretrained(saved)


def test_a_config_that_is_none(saved):
    (saved / "config.json").write_text("[1]")
    for load in (LongspanModel.from_pretrained, convert):
        with pytest.raises(ValueError, match="is no config: it holds a list"):
            load(saved)


def test_other_settings_than_it_was_saved_with(saved, monkeypatch):
    """What is missing or left over then is no fault of the file's."""
    said = []
    monkeypatch.setattr(loading.logger, "warning", said.append)
    made = LongspanForMaskedLM.from_pretrained(saved, tie_word_embeddings=False)
    assert "1 weights are new and have to be trained, lm_head.decoder.weight" in said[0]
    assert not made.config.tie_word_embeddings


def test_a_subfolder(saved):
    build("ForMaskedLM").save_pretrained(saved / "inner")
    (saved / "config.json").unlink()
    assert LongspanForMaskedLM.from_pretrained(saved, subfolder="inner") is not None


def test_layers_that_are_left_over(saved):
    """A config of fewer layers than the weights have would silently drop the last ones."""

    def repeat(weights):
        layer = "encoder.layers.1."
        more = {k.replace(layer, "encoder.layers.2."): v for k, v in weights.items() if layer in k}
        weights.update({k: v.clone() for k, v in more.items()})

    rewrite(saved, repeat)
    for load in (LongspanForMaskedLM, LongspanModel):
        with pytest.raises(ValueError, match=r"weights of layers.*layers\.2\."):
            load.from_pretrained(saved)


def test_weights_of_another_size(saved):
    def shrink(weights):
        weights["encoder.layers.0.up.weight"] = weights["encoder.layers.0.up.weight"][:9].clone()

    rewrite(saved, shrink)
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight: \(9, .* in the file"):
        LongspanForMaskedLM.from_pretrained(saved)


def test_a_head_of_other_labels_is_drawn_anew_if_asked(saved):
    build("ForTokenClassification").save_pretrained(saved)
    with pytest.raises(ValueError, match=r"classifier.*ignore_mismatched_sizes=True"):
        LongspanForTokenClassification.from_pretrained(saved, num_labels=5)
    model = LongspanForTokenClassification.from_pretrained(
        saved, num_labels=5, ignore_mismatched_sizes=True
    )
    assert model.classifier.out_features == 5


def test_a_model_of_another_library(saved):
    transformers.BertModel(transformers.BertConfig(**short_sizes())).save_pretrained(saved)
    with pytest.raises(ValueError, match=r"of type 'bert', not LongspanModel; longspan\.convert"):
        LongspanModel.from_pretrained(saved)


def test_a_config_that_is_damaged(saved):
    (saved / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is damaged, it is not JSON"):
        LongspanModel.from_pretrained(saved)


def test_a_file_instead_of_its_folder(saved):
    with pytest.raises(ValueError, match=r"model\.safetensors is a file; give the folder"):
        LongspanModel.from_pretrained(saved / "model.safetensors")


def test_a_new_head_and_a_missing_pooler_are_fine(saved, monkeypatch):
    said = []
    monkeypatch.setattr(loading.logger, "warning", said.append)
    _, info = LongspanForTokenClassification.from_pretrained(saved, output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert len(said) == 1
    assert "2 weights are new and have to be trained, classifier.bias" in said[0]
    said.clear()
    assert isinstance(LongspanModel.from_pretrained(saved), LongspanModel)
    assert len(said) == 1
    assert "has no pooler of a LongspanModel: 2 weights are new" in said[0]
    said.clear()
    assert LongspanModel.from_pretrained(saved, add_pooling_layer=False).pooler is None
    assert not said


def test_half_a_pooler(tmp_path):
    build("Model").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: weights.pop("pooler.dense.weight"))
    with pytest.raises(ValueError, match=r"lacks 1 of its weights, .*pooler\.dense\.weight"):
        LongspanModel.from_pretrained(tmp_path)


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_never_loaded(saved):
    (saved / "model.safetensors").unlink()
    torch.save({"weight": Trap(saved / "sprung")}, saved / "pytorch_model.bin")
    for load in (LongspanForMaskedLM, transformers.AutoModelForMaskedLM):
        with pytest.raises(ValueError, match=r"no safetensors, but \['pytorch_model.bin'\]"):
            load.from_pretrained(saved)
    with pytest.raises(ValueError, match="pickled weights can run code"):
        LongspanForMaskedLM.from_pretrained(saved, use_safetensors=False)
    assert not (saved / "sprung").exists()


def on_the_hub(folder, monkeypatch) -> str:
    """The name under which transformers finds what a folder holds, without a network."""
    cache = folder.parent / "cache" / "models--some--model"
    shutil.copytree(folder, cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.parent))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "some/model"


def test_a_name_on_the_hub(tmp_path, monkeypatch):
    build("ForMaskedLM").save_pretrained(tmp_path / "here")
    name = on_the_hub(tmp_path / "here", monkeypatch)
    for load in (LongspanForMaskedLM, transformers.AutoModelForMaskedLM):
        assert isinstance(load.from_pretrained(name), LongspanForMaskedLM)
    made = convert_checkpoint(name, tmp_path / "longer", max_length=99)
    assert made.positions == (64, 99)


def test_a_model_of_another_library_on_the_hub(tmp_path, monkeypatch):
    transformers.BertModel(transformers.BertConfig(**short_sizes())).save_pretrained(
        tmp_path / "here"
    )
    name = on_the_hub(tmp_path / "here", monkeypatch)
    with pytest.raises(ValueError, match=r"some/model holds a model of type 'bert'.*convert"):
        LongspanModel.from_pretrained(name)
    assert isinstance(convert(name), LongspanModel)


def test_a_folder_that_is_not_there_is_not_a_pickle(tmp_path):
    with pytest.raises(OSError, match="my-safetensors"):
        LongspanModel.from_pretrained(tmp_path / "my-safetensors")


def test_a_pickle_on_the_hub_is_never_loaded(tmp_path, monkeypatch):
    here = tmp_path / "here"
    model = transformers.BertModel(transformers.BertConfig(**short_sizes()))
    model.save_pretrained(here)
    (here / "model.safetensors").unlink()
    torch.save({"weight": Trap(tmp_path / "sprung")}, here / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"some/model has no safetensors\. Pickled weights can"):
        convert(on_the_hub(here, monkeypatch))
    assert not (tmp_path / "sprung").exists()


def test_pushed_to_the_hub(tmp_path, monkeypatch):
    """What is uploaded is a whole model, in safetensors."""
    monkeypatch.setattr(
        HfApi, "create_repo", lambda *_, **__: RepoUrl("https://huggingface.co/some/model")
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # no card is looked for

    def upload(self, working_dir, repo_id, *_, **__):
        shutil.copytree(working_dir, tmp_path / repo_id)

    monkeypatch.setattr(LongspanForMaskedLM, "_upload_modified_files", upload)
    model = build("ForMaskedLM")
    model.push_to_hub("some/model")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "some" / "model")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_pickled_language_model_is_never_loaded(tmp_path):
    config = LongspanDecoderConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, attention={"left": 4}
    )
    LongspanForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weight": Trap(tmp_path / "sprung")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no safetensors, but \['pytorch_model.bin'\]"):
        LongspanForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pickled weights can run code"):
        LongspanForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
    assert not (tmp_path / "sprung").exists()


def test_half_precision_is_for_what_it_holds_exactly():
    numbers = {"float16": 1 + 2**-10, "bfloat16": 2.0**100, "float32": 1 + 2**-20}
    weights = {name: torch.tensor([number, 0.0]) for name, number in numbers.items()}
    weights["tied"] = weights["float16"]
    weights["int8"] = torch.ones(2, dtype=torch.int8)
    made = shortest(weights)
    assert {name: str(t.dtype).split(".")[1] for name, t in made.items()} == {
        **{name: name for name in (*numbers, "int8")},
        "tied": "float16",
    }
    assert made["tied"] is made["float16"]
    assert all(torch.equal(made[name].to(t.dtype), t) for name, t in weights.items())
    assert shortest({"nan": torch.tensor([torch.nan])})["nan"].dtype == torch.float32
