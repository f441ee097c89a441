"""ModernBERT made long: rotary positions, local layers, gates, norms in front, few biases."""

import pytest
import torch
import transformers
from models.small import HEADS, batch, labels, largest_difference, modernbert, results

import longspan
from longspan.hub.checkpoint import parity
from longspan.hub.exchange import gather
from longspan.hub.families import FAMILIES, modules

CLOSE = 2e-5
UNUSUAL = {"classifier_pooling": "mean", "norm_bias": True, "decoder_bias": False}


def plain(given):
    return {name: given[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("changes", [{}, UNUSUAL], ids=["as released", "unusual"])
@pytest.mark.parametrize("lengths", [(33, 20), (9, 31)])
@pytest.mark.parametrize("head", HEADS)
def test_it_agrees_within_the_window(head, lengths, changes):
    """Outputs, losses and gradients, whatever is global: the local layers know of no such token."""
    source, given = modernbert(head, **changes), batch(head, lengths)
    given_labels = labels(head, given)
    if head == "ForQuestionAnswering":
        given_labels = {}  # see test_convert.py
    ours = longspan.convert(source, window=64)
    found = []
    for model, inputs in ((source, plain(given)), (ours, plain(given)), (ours, given)):
        model.zero_grad()
        numbers = results(model(**inputs, **given_labels), given)
        torch.stack([value.square().mean() for value in numbers.values()]).sum().backward()
        found.append(numbers)
    assert largest_difference(found[0], found[1]) <= CLOSE
    assert largest_difference(found[0], found[2]) <= CLOSE

    table = modules(FAMILIES["modernbert"], 4, head, "" if head == "Model" else "model")
    theirs = {n: p.grad for n, p in source.named_parameters(remove_duplicate=False)}
    mine = {n: p.grad for n, p in ours.named_parameters(remove_duplicate=False)}
    # A bias that is only ours has no counterpart.
    shared = {n: g for n, g in mine.items() if n.endswith("weight")}
    assert len(shared) >= 25
    assert all(grad is not None for grad in shared.values())
    assert largest_difference(gather(shared, table, theirs), shared) <= CLOSE


def test_every_layer_keeps_its_kind():
    ours = longspan.convert(modernbert("Model"), window=32)
    local = {"kind": "window", "window": 8, "global_tokens": False, "rotary": 10_000.0}
    wide = {"kind": "window", "window": 32, "rotary": 160_000.0}
    assert ours.config.attention == [wide, local, local, wide]
    assert ours.config.longest == 8 * 64
    assert longspan.convert(modernbert("Model"), max_length=100).config.longest == 100
    assert not any("bias" in name for name in ours.state_dict())


def test_a_window_as_wide_as_the_trained_length_is_full_attention():
    source = modernbert("Model")
    ours = longspan.convert(source, window=2 * 64)
    given = batch("Model", (64, 51))
    assert largest_difference(*(results(m(**plain(given)), given) for m in (source, ours))) <= CLOSE


def test_a_narrow_window_sees_less_unless_a_token_is_global():
    source, given = modernbert("Model"), batch("Model", (60, 60))
    ours = longspan.convert(source, window=8)
    chosen = torch.zeros_like(given["input_ids"])
    first = [results(m(**plain(given)), given)["last_hidden_state"] for m in (source, ours)]
    assert (first[0] - first[1]).abs().max() > 1e-2
    everyone = ours(**plain(given), global_attention_mask=chosen + 1)
    assert (results(everyone, given)["last_hidden_state"] - first[0]).abs().max() <= CLOSE


def test_padding_in_front_and_given_positions():
    source = modernbert("Model")
    ours = longspan.convert(source, window=64)
    given = {name: tensor.flip(1) for name, tensor in plain(batch("Model", (33, 20))).items()}
    assert largest_difference(*(results(m(**given), given) for m in (source, ours))) <= CLOSE
    given["position_ids"] = torch.arange(33).mul(2).expand(2, -1)
    spaced = [results(m(**given), given) for m in (source, ours)]
    assert largest_difference(*spaced) <= CLOSE


def test_attention_maps_are_theirs():
    source = modernbert("Model").eval()
    source.set_attn_implementation("eager")
    ours = longspan.convert(source, window=64)
    given = batch("Model", (30, 17))
    with torch.no_grad():
        theirs = source(**plain(given), output_attentions=True).attentions
        maps = ours(**given, output_attentions=True).attentions
    for weights, mapped in zip(theirs, maps, strict=True):
        for b, length in enumerate((30, 17)):
            for i in range(length):
                positions, found = mapped.row(i, 1, b)
                row = torch.zeros(30).index_add(0, positions, found)
                torch.testing.assert_close(row, weights[b, 1, i], rtol=1e-4, atol=2e-6)


def test_the_report_compares_as_far_as_the_window_reaches():
    source = modernbert("ForMaskedLM")
    (report,) = parity(source, longspan.convert(source, window=64))
    assert report.tokens == 33
    assert report.largest <= CLOSE


def test_positions_are_only_a_limit():
    ours = longspan.convert(modernbert("Model"), max_length=64, window=16)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    tokens = torch.randint(4, 60, (1, 100))
    with pytest.raises(ValueError, match=r"positions for 64.*extend_positions\(100\) or shorten"):
        ours(tokens)
    with pytest.raises(ValueError, match=r"to 99, but the model has positions 0 to 63; model\.ext"):
        ours(tokens, position_ids=torch.arange(100)[None])
    ours.extend_positions(100)
    assert ours(tokens).last_hidden_state.isfinite().all()
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())
    with pytest.raises(ValueError, match="only ever added"):
        ours.extend_positions(50)


def test_saved_and_loaded(tmp_path):
    source = modernbert("ForSequenceClassification")
    source.save_pretrained(tmp_path / "short")
    ours = longspan.convert(tmp_path / "short", window=64).eval()
    ours.save_pretrained(tmp_path / "long")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "long")
    given = batch("ForSequenceClassification", (33, 20))
    assert torch.equal(again(**given).logits, ours(**given).logits)


def test_no_longformer_can_hold_it():
    ours = longspan.convert(modernbert("ForSequenceClassification"))
    with pytest.raises(ValueError, match="cannot express") as refusal:
        longspan.to_transformers(ours)
    for reason in (
        "positions are rotary",
        "layer 1 knows of no global tokens",
        "norm_first is True",
        "gated is True",
        "bias is False",
        "begins with a layer and a norm",
        "classifier_act is 'gelu'",
    ):
        assert reason in str(refusal.value)


def test_stretched_rotations_are_refused():
    source = modernbert("Model")
    source.config.rope_parameters["full_attention"]["rope_type"] = "yarn"
    with pytest.raises(ValueError, match="rope_type 'yarn'"):
        longspan.convert(source)
