"""BART, mBART and LED in, LED out: compared with transformers on the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.small import SEP, VOCAB, largest_difference, spread
from typer.testing import CliRunner

import longspan
from longspan.cli import app
from longspan.hub.exchange import gather
from longspan.hub.seq2seq import FAMILIES, modules

CLOSE = 2e-5
SHORT = ("Bart", "MBart")
HEAD = "ForConditionalGeneration"


def stock(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 32,
        "dropout": 0.0,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": SEP,
        "decoder_start_token_id": SEP,
    }
    if family == "LED":
        settings |= {"max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 32}
        settings |= {"attention_window": [8, 4]}
    else:
        settings |= {"max_position_embeddings": 40, "scale_embedding": family == "MBart"}
    config = getattr(transformers, f"{family}Config")(**(settings | changes))
    model = spread(getattr(transformers, family + HEAD)(config))
    model.final_logits_bias.normal_()
    return model


def documents(padding: str, lengths: tuple[int, ...] = (33, 20)) -> dict[str, Any]:
    """Ids, masks and targets of uneven length, padded on one side."""
    draw = torch.Generator().manual_seed(0)
    batch, tokens = len(lengths), max(lengths)
    real = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    ids = torch.randint(4, VOCAB, (batch, tokens), generator=draw)
    chosen = torch.rand(batch, tokens, generator=draw) < 0.1
    chosen[:, 0] = True
    if padding == "left":
        real = real.flip(1)
        chosen = chosen.flip(1)
    labels = torch.randint(4, VOCAB, (batch, 9), generator=draw)
    labels[:, -1] = SEP
    labels[1, 5:] = torch.tensor([SEP, -100, -100, -100])
    return {
        "input_ids": torch.where(real, ids, 1),
        "attention_mask": real.long(),
        "global_attention_mask": (chosen & real).long(),
        "labels": labels,
    }


def numbers(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a call gives, the states of padding left out: nobody sees them."""
    output = model(**given)
    real = given["attention_mask"].bool()
    return {
        "loss": output.loss,
        "logits": output.logits,
        "encoder": output.encoder_last_hidden_state[real],
    }


def compare(source: Any, ours: Any, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Outputs, the loss and all gradients."""
    found = []
    for model, given in ((source, theirs), (ours, mine)):
        model.zero_grad()
        values = numbers(model, given)
        (values["loss"] + values["logits"].square().mean()).backward()
        found.append(values)
    assert largest_difference(*found) <= CLOSE
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in source.named_parameters(remove_duplicate=False)
    }
    wanted = {
        name: p.grad
        for name, p in ours.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }
    family = FAMILIES[source.config.model_type]
    expected = gather(wanted, modules(family, ours.config), grads)
    for name in ("encoder.embeddings.positions.weight", "decoder.embeddings.positions.weight"):
        expected[name] = expected[name][family.reserved :]
        wanted[name] = wanted[name][: expected[name].shape[0]]
    if not family.long:
        # Theirs knows one set of projections, to which both of ours together are equal.
        for name in [name for name in wanted if "qkv_global" in name]:
            local = name.replace("_global", "")
            wanted[local] = wanted[local] + wanted.pop(name)
            del expected[name]
    assert largest_difference(expected, wanted) <= CLOSE


@pytest.mark.parametrize("padding", ["right", "left"])
def test_led_comes_over_as_it_is(padding):
    source = stock("LED")
    ours = longspan.convert(source)
    given = documents(padding, (61, 37))
    compare(source, ours, given, given)
    given.pop("global_attention_mask")
    assert largest_difference(numbers(source, given), numbers(ours, given)) <= CLOSE


@pytest.mark.parametrize("padding", ["right", "left"])
def test_rounded_alike_the_encoder_is_leds_to_the_bit(padding):
    source, given = stock("LED"), documents(padding)
    ours = longspan.convert(source)
    ours.set_backend("chunks")
    theirs, mine = (numbers(model, given) for model in (source, ours))
    assert torch.equal(mine["encoder"], theirs["encoder"])
    assert largest_difference(mine, theirs) <= CLOSE


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", SHORT)
def test_a_short_model_agrees_within_the_window(family, padding):
    """Whatever is global: the copied projections compute the same."""
    source = stock(family)
    ours = longspan.convert(source, window=80)
    given = documents(padding)
    plain = {name: tensor for name, tensor in given.items() if name != "global_attention_mask"}
    compare(source, ours, plain, given)
    assert largest_difference(numbers(source, plain), numbers(ours, plain)) <= CLOSE


@pytest.mark.parametrize("family", SHORT)
def test_positions_are_tiled_without_the_reserved_rows(family):
    source = stock(family)
    ours = longspan.convert(source, max_length=100)
    table = ours.get_parameter("encoder.embeddings.positions.weight")
    trained = source.model.encoder.embed_positions.weight[2:]
    assert torch.equal(table, torch.cat([trained, trained, trained[:20]]))
    targets = ours.get_parameter("decoder.embeddings.positions.weight")
    assert torch.equal(targets, source.model.decoder.embed_positions.weight[2:])


def test_bart_becomes_what_led_is():
    ours = longspan.convert(stock("Bart", max_position_embeddings=1024, d_model=6))
    assert ours.config.longest == 16384
    assert ours.config.decoder_positions == 1024
    assert [setting["window"] for setting in ours.config.attention] == [1024, 1024]


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", ["LED", *SHORT])
def test_generated_tokens_are_the_same(family, padding, beams):
    source = stock(family)
    ours: Any = longspan.convert(source, window=80)
    given = documents(padding)
    given.pop("labels")
    # Without repetition every token depends on many scores, and a mix-up of beams shows.
    asked = {"max_new_tokens": 20, "num_beams": beams, "do_sample": False, "min_new_tokens": 8}
    asked["no_repeat_ngram_size"] = 1
    for chosen in (True, False):
        mine = given if chosen else given | {"global_attention_mask": None}
        theirs = dict(mine)
        if family != "LED":
            theirs.pop("global_attention_mask")
        found = [m.generate(**g, **asked) for m, g in ((source, theirs), (ours, mine))]
        assert torch.equal(*found)
        assert found[0].unique().numel() > 4


@pytest.mark.parametrize("family", ["LED", "Bart"])
def test_back_to_a_stock_led(family):
    ours: Any = longspan.convert(stock(family), window=16)
    theirs: Any = longspan.to_transformers(ours)
    assert type(theirs).__name__ == "LEDForConditionalGeneration"
    given = documents("right", (61, 37))
    assert largest_difference(numbers(theirs, given), numbers(ours, given)) <= CLOSE
    given.pop("labels")
    for beams in (1, 4):
        asked = {"max_new_tokens": 12, "num_beams": beams, "no_repeat_ngram_size": 1}
        assert torch.equal(*(model.generate(**given, **asked) for model in (theirs, ours)))


def test_words_that_are_not_shared_stay_apart():
    source = stock("LED", tie_word_embeddings=False)
    given = documents("right")
    ours = longspan.convert(source)
    assert largest_difference(numbers(source, given), numbers(ours, given)) <= CLOSE
    theirs = longspan.to_transformers(ours)
    assert largest_difference(numbers(theirs, given), numbers(ours, given)) <= CLOSE


def test_what_led_cannot_express_is_refused():
    with pytest.raises(ValueError, match=r"LED cannot express.*norm_first.*embedding_scale"):
        longspan.to_transformers(longspan.convert(stock("MBart")))


def test_other_heads_are_refused_by_name():
    config = stock("Bart").config
    with pytest.raises(ValueError, match="cannot convert BartForSequenceClassification"):
        longspan.convert(transformers.BartForSequenceClassification(config))
    with pytest.raises(ValueError, match="load it as BartForConditionalGeneration"):
        longspan.convert(transformers.BartModel(config))
    with pytest.raises(ValueError, match="max_length=8 is below the 40 positions"):
        longspan.convert(stock("Bart"), max_length=8)


@pytest.mark.parametrize("family", ["LED", *SHORT])
def test_from_folder_to_folder(family, tmp_path: Path):
    source = stock(family)
    source.save_pretrained(tmp_path / "short")
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "short"), str(tmp_path / "long"), "--window", "32"]
    )
    assert done.exit_code == 0, done.output
    assert f"{family}{HEAD} -> Longspan{HEAD}" in " ".join(done.output.split())
    from longspan.hub.checkpoint import parity

    made: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "long")
    assert type(made).__name__ == f"Longspan{HEAD}"
    (report,) = parity(source, made)
    assert report.largest <= CLOSE
    with torch.no_grad():
        made.decoder.layers[0].cross_query.weight.add_(1.0)
    (report,) = parity(source, made)
    assert report.largest > CLOSE


def test_a_bare_checkpoint_gets_its_scores_from_its_words(tmp_path: Path):
    source = stock("Bart")
    source.final_logits_bias.zero_()
    source.model.save_pretrained(tmp_path)
    given = documents("right")
    wanted = numbers(source, {k: v for k, v in given.items() if k != "global_attention_mask"})
    ours = longspan.convert(tmp_path, window=80).eval()
    assert largest_difference(wanted, numbers(ours, given)) <= CLOSE
