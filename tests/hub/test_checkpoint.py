"""From folder to folder: weights, tokenizer, parity, and nothing half-written."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import longspan
from longspan.cli import app

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat"]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A tiny BERT with its tokenizer, as `save_pretrained` leaves it."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = tmp_path / "bert"
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=40
    ).save_pretrained(folder)
    return folder


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def plain(output: str) -> str:
    """What is in the box, on one line."""
    return " ".join(output.replace("│", " ").split())


def test_a_folder_becomes_long(bert: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("[/b] the cat sat on a mat")
    done = run(bert, tmp_path / "long", "--max-length", 200, "--window", 32, "--text", text)
    assert done.exit_code == 0, done.output
    assert "BertForMaskedLM" in done.output
    assert "'[/b] the cat sat on a mat'" in done.output
    import transformers

    model = longspan.LongspanForMaskedLM.from_pretrained(tmp_path / "long")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "long")
    assert tokenizer.model_max_length == model.config.longest == 200
    ids = tokenizer("the cat sat " * 50, return_tensors="pt")["input_ids"]
    assert ids.shape[1] > 40
    assert model(input_ids=ids).logits.shape == (1, ids.shape[1], len(WORDS))


def test_int8_weights_and_what_they_cost(bert: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat " * 20)
    done = run(bert, tmp_path / "small", "--window", 32, "--text", text, "--quantize", "int8")
    assert done.exit_code == 0, done.output
    assert "int8 weights: " in done.output
    assert "cosine of embeddings" in done.output
    small = longspan.LongspanForMaskedLM.from_pretrained(tmp_path / "small")
    assert small.config.quantize == "int8"
    refused = run(bert, tmp_path / "other", "--quantize", "int4")
    assert refused.exit_code == 2
    assert "choose from int8" in plain(refused.output)


def test_the_cost_is_that_of_rounding(bert: Path, tmp_path: Path) -> None:
    from longspan.hub.checkpoint import convert_checkpoint

    texts = ["the cat sat on a mat " * 20]
    made = convert_checkpoint(bert, tmp_path / "small", window=32, texts=texts, int8=True)
    assert [row.tokens for row in made.rounding] == [320, 122]  # not only what fits the window
    ours = longspan.convert(bert, window=32).eval()
    small = type(ours).from_pretrained(tmp_path / "small")
    ids = torch.tensor([[2, *[5, 6, 7, 8, 9, 10] * 20, 3]])
    given = {"input_ids": ids, "global_attention_mask": (torch.arange(122) == 0).long()[None]}
    first, second = (model.base_model(**given).last_hidden_state for model in (ours, small))
    assert made.rounding[1].largest == pytest.approx((first - second).abs().max().item())
    assert made.rounding[1].mean == pytest.approx((first - second).abs().mean().item())
    assert 0 < made.rounding[1].mean < made.rounding[1].largest < 0.1 * made.rounding[1].size
    assert 0.99 < made.rounding[1].cosine < 1.0
    assert made.megabytes is not None
    assert made.megabytes[1] < made.megabytes[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_is_smaller_than_what_it_was_made_of(dtype: torch.dtype, tmp_path: Path) -> None:
    import transformers

    from longspan.hub.checkpoint import convert_checkpoint

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 3}
    sizes |= {"intermediate_size": 384, "max_position_embeddings": 40, "vocab_size": 2000}
    source, small = tmp_path / "source", tmp_path / "small"
    bert: Any = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    bert.to(dtype).save_pretrained(source)
    made = convert_checkpoint(source, small, window=32, int8=True)

    before, after = ((folder / "model.safetensors").stat().st_size for folder in (source, small))
    assert after < before
    assert made.megabytes is not None
    assert made.megabytes[1] == after / 1e6 < made.megabytes[0]
    stored = load_file(small / "model.safetensors")
    assert stored["encoder.embeddings.words.weight"].dtype == dtype
    assert stored["encoder.layers.0.attention.qkv.scale"].dtype == torch.float32

    # What is loaded computes what was reported, in float32: the file has lost nothing.
    ours: Any = longspan.convert(source, window=32).float()
    again = _load(small)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    whole = longspan.quantize(ours)
    assert torch.equal(again.get_input_embeddings().weight, ours.get_input_embeddings().weight)
    ids = torch.randint(10, 2000, (2, 200))
    assert torch.equal(again(ids).logits, whole(ids).logits)
    assert all(row.largest < 2e-5 for row in made.parity)
    assert all(row.largest < 0.01 * row.size for row in made.rounding)

    # Copied, it stays as it is.
    copied = convert_checkpoint(small, tmp_path / "copy")
    assert copied.parameters == made.parameters
    assert (tmp_path / "copy" / "model.safetensors").stat().st_size == after


def _load(folder: Path) -> Any:
    return longspan.LongspanForMaskedLM.from_pretrained(folder).eval()


def test_int8_of_a_model_that_is_long_already(bert: Path, tmp_path: Path) -> None:
    from longspan.hub.checkpoint import convert_checkpoint

    long, small = tmp_path / "long", tmp_path / "small"
    convert_checkpoint(bert, long, window=32)
    with pytest.raises(ValueError, match="its windows stay as they are"):
        convert_checkpoint(long, small, window=16, int8=True)
    made = convert_checkpoint(long, small, int8=True)
    assert made.parity == []
    assert made.positions[0] == made.positions[1]
    assert made.megabytes is not None
    assert made.megabytes[1] < made.megabytes[0]
    assert longspan.LongspanModel.from_pretrained(small).config.quantize == "int8"


def test_a_model_that_is_long_already_is_copied_or_made_longer(bert: Path, tmp_path: Path) -> None:
    from longspan.hub.checkpoint import convert_checkpoint

    long = tmp_path / "long"
    convert_checkpoint(bert, long, window=32)
    same = convert_checkpoint(long, tmp_path / "same")
    assert (same.positions, same.parity) == ((320, 320), [])
    assert convert_checkpoint(long, tmp_path / "longer", max_length=500).positions == (320, 500)
    ids = torch.randint(5, len(WORDS), (1, 300))
    made = [
        longspan.LongspanForMaskedLM.from_pretrained(tmp_path / name).eval()(ids).logits
        for name in ("long", "same", "longer")
    ]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    with pytest.raises(ValueError, match="positions are only ever added"):
        convert_checkpoint(long, tmp_path / "shorter", max_length=100)
    with pytest.raises(ValueError, match="a text has nothing to compare"):
        convert_checkpoint(long, tmp_path / "compared", texts=["the cat"])


def test_a_model_of_other_layers_is_copied(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 24, "num_attention_heads": 3}
    config = longspan.LongspanConfig(
        **sizes, num_hidden_layers=1, intermediate_size=32, attention={"kind": "performer"}
    )
    longspan.LongspanModel(config).save_pretrained(tmp_path / "made")
    done = run(tmp_path / "made", tmp_path / "copy")
    assert done.exit_code == 0, done.output
    assert "window" not in done.output


def test_int8_is_for_encoders(tmp_path: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {"d_model": 24, "encoder_attention_heads": 3}
    sizes |= {"decoder_attention_heads": 3}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60}
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))
    bart.save_pretrained(tmp_path / "bart")
    done = run(tmp_path / "bart", tmp_path / "small", "--quantize", "int8")
    assert done.exit_code == 2
    assert "only longspan's encoders can be" in plain(done.output)
    assert not (tmp_path / "small").exists()


def test_the_report_is_the_difference(bert: Path, tmp_path: Path) -> None:
    from longspan.hub.checkpoint import convert_checkpoint, parity

    made = convert_checkpoint(bert, tmp_path / "long", window=32, texts=["the cat"])
    assert [p.what for p in made.parity] == ["random tokens", "'the cat'"]
    assert [p.tokens for p in made.parity] == [17, 4]
    assert all(p.largest < 2e-5 for p in made.parity)
    assert all(p.exact is not None and p.exact < 1e-12 for p in made.parity)
    assert made.positions == (40, 320)
    # A model that is not equal must not look equal.
    import transformers

    theirs = transformers.BertForMaskedLM.from_pretrained(bert)
    ours: Any = longspan.convert(theirs, window=32)
    with torch.no_grad():
        ours.encoder.layers[1].attention.qkv.weight.mul_(1.5)
    (report,) = parity(theirs, ours)
    assert report.largest > 1e-4
    assert report.exact is not None
    assert report.exact > 1e-4


def test_a_long_text_is_not_cut_silently(bert: Path, tmp_path: Path) -> None:
    from longspan.hub.checkpoint import convert_checkpoint

    made = convert_checkpoint(bert, tmp_path / "long", window=32, texts=["the cat sat " * 10])
    assert made.parity[1].what.endswith("its first 17 tokens")


def test_a_tokenizer_that_cuts_does_so_no_more(bert: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(bert / "tokenizer.json"))
    words.enable_truncation(8)
    words.save(str(bert / "tokenizer.json"))
    assert run(bert, tmp_path / "long").exit_code == 0
    saved = Tokenizer.from_file(str(tmp_path / "long" / "tokenizer.json"))
    assert len(saved.encode("the cat sat " * 10).ids) == 32
    assert '"max_length"' not in (tmp_path / "long" / "tokenizer_config.json").read_text()


def test_what_is_left_behind_is_noted(bert: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = bert / "model.safetensors"
    weights = load_file(path) | {"other.weight": torch.zeros(2)}
    save_file(weights, path, metadata={"format": "pt"})
    done = run(bert, tmp_path / "long")
    assert done.exit_code == 0, done.output
    assert "note:" in done.output
    assert "1 weights are not used: ['other.weight']" in done.output
    assert "UserWarning" not in done.output


def test_without_a_tokenizer(bert: Path, tmp_path: Path) -> None:
    for name in os.listdir(bert):
        if "token" in name:
            (bert / name).unlink()
    done = run(bert, tmp_path / "long")
    assert done.exit_code == 0, done.output
    assert "no tokenizer" in done.output


def test_nothing_is_overwritten_and_nothing_left_behind(bert: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "precious").write_text("keep me")
    done = run(bert, taken)
    assert done.exit_code != 0
    assert "exists already" in plain(done.output)
    assert (taken / "precious").read_text() == "keep me"
    before = sorted(os.listdir(tmp_path))
    done = run(bert, tmp_path / "long", "--max-length", 5)
    assert done.exit_code != 0
    assert "positions are only ever added" in plain(done.output)
    assert sorted(os.listdir(tmp_path)) == before


def test_bad_sources_are_named(bert: Path, tmp_path: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    done = run(bert, tmp_path / "long")
    assert done.exit_code != 0
    assert "supported are" in plain(done.output)
    (bert / "config.json").write_text("{")
    assert "is not JSON" in plain(run(bert, tmp_path / "long").output)
    done = run(tmp_path / "nowhere", tmp_path / "long")
    assert done.exit_code != 0
    assert not (tmp_path / "long").exists()


@pytest.mark.parametrize("name", ["longformer", "led"])
def test_what_has_windows_is_compared_over_two_of_them(name: str, tmp_path: Path) -> None:
    import transformers

    from longspan.hub.checkpoint import convert_checkpoint

    torch.manual_seed(0)
    small: dict[str, dict[str, Any]] = {
        "longformer": {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32},
        "led": {"d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
    }
    small["longformer"] |= {"num_hidden_layers": 2, "max_position_embeddings": 70}
    small["led"] |= {
        "encoder_layers": 2,
        "decoder_layers": 1,
        "max_encoder_position_embeddings": 70,
    }
    small["led"] |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    stock: Any = {
        "longformer": transformers.LongformerForMaskedLM,
        "led": transformers.LEDForConditionalGeneration,
    }[name]
    config = stock.config_class(vocab_size=50, attention_window=[8, 16], **small[name])
    stock(config).save_pretrained(tmp_path / "stock")
    made = convert_checkpoint(tmp_path / "stock", tmp_path / "ours")
    (row,) = made.parity
    assert row.tokens == 32
    assert row.largest <= 2e-5
    assert row.alike == (0.0 if name == "longformer" else None)
    assert not made.notes[:-1]  # the last is that there is no tokenizer
    other = convert_checkpoint(tmp_path / "stock", tmp_path / "other", window=32)
    assert (
        "its windows of [8, 16]: the window of 32 that was asked for is not used" in other.notes[0]
    )
    done = run(tmp_path / "stock", tmp_path / "again")
    assert ("rounded alike" in plain(done.output)) == (name == "longformer")
