"""Checkpoints in and out, compared with transformers on the same weights."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from models.small import (
    HEADS,
    batch,
    labels,
    largest_difference,
    longformer,
    results,
    short_sizes,
    spread,
)

import longspan
from longspan.hub.exchange import gather
from longspan.hub.families import FAMILIES, modules

CLOSE = 2e-5
# How far outputs may be from transformers': by all but one, rounding may differ.
BACKENDS = pytest.mark.parametrize(("backend", "allowed"), [("auto", CLOSE), ("chunks", 0.0)])
SHORT = ("Roberta", "XLMRoberta", "Camembert", "Bert", "DistilBert", "Electra")


def short(family, head="Model", **changes):
    torch.manual_seed(0)
    if family == "DistilBert":
        sizes = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "pad_token_id": 1}
        sizes |= {"vocab_size": 60, "max_position_embeddings": 40, "dropout": 0.0}
    else:
        # BERT's own tokenizer pads with 0; any other id must work as well.
        sizes = short_sizes(pad_token_id=1, type_vocab_size=2)
        if family == "Electra":
            sizes |= {"embedding_size": 16, "summary_last_dropout": 0.0}
        if family == "Bert":
            sizes["hidden_act"] = "relu"
    config = getattr(transformers, f"{family}Config")(**(sizes | changes))
    return spread(getattr(transformers, f"{family}{head}")(config))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lengths", [(37, 20), (64, 33)])
@BACKENDS
def test_longformer_comes_over_as_it_is(head, lengths, backend, allowed):
    """Outputs, losses and all gradients; ragged global sets, padding, odd lengths."""
    source, given = longformer(head), batch(head, lengths)
    ours = longspan.convert(source)
    ours.set_backend(backend)
    given_labels = labels(head, given)
    found = []
    for model in (source, ours):
        output = model(**given, **given_labels)
        numbers = results(output, given)
        torch.stack([value.square().mean() for value in numbers.values()]).sum().backward()
        found.append(numbers)
    assert largest_difference(*found) <= allowed

    bare = head == "Model"
    table = modules(FAMILIES["longformer"], 2, head, "" if bare else "longformer")
    theirs = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in source.named_parameters(remove_duplicate=False)
    }
    mine = {name: p.grad for name, p in ours.named_parameters(remove_duplicate=False)}
    assert all(grad is not None for grad in mine.values())
    assert largest_difference(gather(mine, table, theirs), mine) <= CLOSE


@BACKENDS
def test_layers_of_base_size(backend, allowed):
    """With numbers as large as they are there, in outputs and in gradients."""
    torch.manual_seed(0)
    zero: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.LongformerConfig(
        num_hidden_layers=2, attention_window=[128, 64], vocab_size=60, pad_token_id=1, **zero
    )
    source = transformers.LongformerModel(config, add_pooling_layer=False)
    ours, given = longspan.convert(source), batch("Model", (331, 200))
    ours.set_backend(backend)
    both: Any = source, ours
    real = given["attention_mask"].bool()
    wanted = torch.randn(2, 331, 768) * real[..., None] / real.sum()
    found = []
    for model in both:
        states = model(**given).last_hidden_state
        (states * wanted).sum().backward()
        found.append({"states": states[real]})
    assert largest_difference(*found) <= allowed
    theirs, mine = ({n: p.grad for n, p in m.named_parameters()} for m in both)
    table = modules(FAMILIES["longformer"], 2, "Model", "")
    assert largest_difference(gather(mine, table, theirs), mine) <= CLOSE
    assert max(float(grad.abs().max()) for grad in mine.values()) > 1


@pytest.mark.parametrize("tokens", [1, 2, 8, 15])
def test_rounded_alike_all_that_is_returned_is_as_long_as_the_input(tokens):
    """To the bit, padding included, whatever is given; windows are 8 and 4 tokens."""
    source = longformer("Model", type_vocab_size=2)
    # With room for global tokens that none takes, which transformers has not.
    ours: Any = longspan.convert(source)
    ours.config.max_global_tokens = 5
    ours.set_backend("chunks")
    draw = torch.Generator().manual_seed(0)
    ids, types, places = (
        torch.randint(low, high, (2, tokens), generator=draw)
        for low, high in ((4, 60), (0, 2), (2, 150))
    )
    mask, chosen = torch.ones_like(ids), torch.zeros_like(ids)
    mask[1, tokens // 2 + 1 :] = 0
    chosen[0, tokens // 2] = 1
    for given in (
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": types},
        {"input_ids": ids, "global_attention_mask": chosen, "position_ids": places},
        {"inputs_embeds": torch.randn(2, tokens, 24), "attention_mask": mask},
        {"inputs_embeds": torch.randn(2, tokens, 24), "global_attention_mask": chosen},
    ):
        theirs, mine = (model(**given, output_hidden_states=True) for model in (source, ours))
        for name in ("last_hidden_state", "pooler_output"):
            assert torch.equal(mine[name], theirs[name])
        for one, other in zip(mine.hidden_states, theirs.hidden_states, strict=True):
            assert torch.equal(one, other)
        maps = ours(**given, output_attentions=True).attentions
        ours.set_backend("auto")
        wanted = ours(**given, output_attentions=True).attentions
        ours.set_backend("chunks")
        for one, other in zip(maps, wanted, strict=True):
            torch.testing.assert_close(one.band, other.band)
            assert (one.rows is None) == (one.columns is None) == ("global" not in str([*given]))
            for token in range(tokens):
                for here, there in zip(one.row(token, 1), other.row(token, 1), strict=True):
                    torch.testing.assert_close(here, there)
        if "global_attention_mask" in given:
            assert torch.equal(mine.global_attention_mask, chosen.bool())


@pytest.mark.parametrize("head", HEADS)
def test_longformer_keeps_its_choice_of_global_tokens(head):
    source, given = longformer(head), batch(head)
    given.pop("global_attention_mask")
    ours = longspan.convert(source)
    numbers = [results(model(**given), given) for model in (source, ours)]
    assert largest_difference(*numbers) <= CLOSE


@pytest.mark.parametrize("head", HEADS)
def test_back_to_a_stock_longformer(head):
    ours, given = longspan.convert(longformer(head)), batch(head)
    theirs = longspan.to_transformers(ours)
    assert type(theirs).__name__ == f"Longformer{head}"
    numbers = [results(model(**given), given) for model in (ours, theirs)]
    assert largest_difference(*numbers) <= CLOSE


@pytest.mark.parametrize(
    ("family", "head"),
    [*(("Roberta", head) for head in HEADS), ("Bert", "Model"), ("DistilBert", "Model")],
)
def test_a_short_model_leaves_as_a_longformer(family, head):
    """With the tokens global that each of the two chooses by itself."""
    ours, given = longspan.convert(short(family, head), window=8), batch(head)
    given.pop("global_attention_mask")
    theirs = longspan.to_transformers(ours)
    numbers = [results(model(**given), given) for model in (ours, theirs)]
    assert largest_difference(*numbers) <= CLOSE


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", SHORT)
def test_a_short_model_agrees_within_the_window(family, head):
    """Whatever is global: the copied projections compute the same."""
    source, given = short(family, head), batch(head, (33, 20))
    ours = longspan.convert(source, window=64)
    given_labels = labels(head, given)
    if head == "ForQuestionAnswering":
        # Its loss compares with the scores of padding, which here sees nothing, itself included.
        given_labels = {}
    plain = {name: given[name] for name in ("input_ids", "attention_mask")}
    wanted = results(source(**plain, **given_labels), given)
    for inputs in (plain, given):
        assert largest_difference(wanted, results(ours(**inputs, **given_labels), given)) <= CLOSE


@pytest.mark.parametrize("family", SHORT)
def test_positions_are_tiled(family):
    source = short(family)
    ours = longspan.convert(source, window=8)
    reserved = 2 if "ober" in family or "ember" in family else 0
    trained = 40 - reserved
    assert ours.config.longest == 8 * trained
    table = ours.get_parameter("embeddings.positions.weight")
    old = source.embeddings.position_embeddings.weight
    assert torch.equal(table[:40], old)
    assert torch.equal(table[40 : 40 + trained], old[reserved:])
    assert longspan.convert(source, max_length=50).config.longest == 50
    with pytest.raises(ValueError, match=f"max_length=9 is below the {trained} positions"):
        longspan.convert(source, max_length=9)
    with pytest.raises(TypeError, match=r"max_length must be a whole number of tokens, got 99\.5"):
        longspan.convert(source, max_length=cast(int, 99.5))


@pytest.mark.parametrize("family", ["Longformer", "Roberta", "Bert"])
def test_padding_may_stand_in_front(family):
    source = longformer("Model") if family == "Longformer" else short(family)
    ours = longspan.convert(source, window=64)
    given = {name: tensor.flip(1) for name, tensor in batch("Model", (33, 20)).items()}
    theirs = (
        given
        if family == "Longformer"
        else {name: given[name] for name in ("input_ids", "attention_mask")}
    )
    real = given["attention_mask"].bool()
    one, other = source(**theirs).last_hidden_state, ours(**given).last_hidden_state
    assert float((one - other)[real].abs().max().detach()) <= CLOSE


def test_token_types_come_along():
    source, given = short("Bert"), batch("Model", (33, 20))
    types = given["input_ids"] % 2
    ours = longspan.convert(source, window=64)
    plain = {name: given[name] for name in ("input_ids", "attention_mask")}
    numbers = [results(m(**plain, token_type_ids=types), given) for m in (source, ours)]
    assert largest_difference(*numbers) <= CLOSE


def test_labels_dtype_and_mode_come_along():
    source = short("Roberta", "ForSequenceClassification", id2label={0: "a", 1: "b", 2: "c"})
    ours = longspan.convert(source.to(torch.bfloat16).train())
    assert ours.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert ours.dtype == torch.bfloat16
    assert ours.training
    assert ours(torch.tensor([[0, 5, 2]])).logits.shape == (1, 3)


def test_heads_without_an_equivalent_lose_what_has_none():
    with pytest.warns(UserWarning, match="becomes LongspanForMaskedLM"):
        ours = longspan.convert(short("Bert", "ForPreTraining"))
    assert isinstance(ours, longspan.LongspanForMaskedLM)
    with pytest.warns(UserWarning, match="becomes LongspanModel"):
        ours = longspan.convert(short("Electra", "ForPreTraining"))
    assert isinstance(ours, longspan.LongspanModel)


def saved(tmp_path, model=None):
    (model or short("Roberta")).save_pretrained(tmp_path)
    return tmp_path


def test_from_a_folder(tmp_path):
    source, given = short("Roberta"), batch("Model", (33, 20))
    ours = longspan.convert(saved(tmp_path, source), window=64)
    given.pop("global_attention_mask")
    assert largest_difference(*(results(m(**given), given) for m in (source, ours))) <= CLOSE


def test_a_checkpoint_without_a_pooler_gets_none(tmp_path):
    source = short("Roberta")
    source.pooler = None
    assert longspan.convert(saved(tmp_path, source)).pooler is None


def test_the_separator_comes_from_the_tokenizer(tmp_path):
    """Where BERT's question ends is not in its config."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", "[SEP]", "what", "is", "long"]
    saved(tmp_path, short("Bert", "ForQuestionAnswering"))
    assert longspan.convert(tmp_path).config.sep_token_id is None
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary)
    tokenizer.save_pretrained(tmp_path)
    ours = longspan.convert(tmp_path)
    assert ours.config.sep_token_id == 4
    inputs = tokenizer("what is", "long", return_tensors="pt")
    assert ours(**inputs).global_attention_mask.tolist() == [[True] * 3 + [False] * 3]


def rewrite(folder, change):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["encoder.layer.1.output.dense.weight", "pooler.dense.bias"])
def test_missing_weights_are_named(name, tmp_path):
    rewrite(saved(tmp_path), lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=rf"lacks 1 of its weights, among them \['{name}'\]"):
        longspan.convert(tmp_path)


def test_weights_left_over_are_named(tmp_path):
    rewrite(saved(tmp_path), lambda weights: weights.update(surplus=torch.ones(2)))
    with pytest.warns(UserWarning, match=r"1 weights are not used: \['surplus'\]"):
        longspan.convert(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or cut off"):
        longspan.convert(tmp_path)


def test_weights_of_another_size_are_named(tmp_path):
    name = "encoder.layer.1.output.dense.weight"
    rewrite(saved(tmp_path), lambda weights: weights.update({name: weights[name][:9].clone()}))
    with pytest.raises(ValueError, match=rf"{name}: \(9, .* in the file"):
        longspan.convert(tmp_path)


def test_what_holds_no_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no model: there is no config\.json$"):
        longspan.convert(tmp_path)
    saved(tmp_path / "checkpoints" / "step-1")
    with pytest.raises(ValueError, match=r"there is one in .*step-1$"):
        longspan.convert(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is a file; give the folder"):
        longspan.convert(tmp_path / "checkpoints" / "step-1" / "config.json")
    with pytest.raises(TypeError, match=r"transformers model, a folder or the name.*got Linear"):
        longspan.convert(cast(Any, torch.nn.Linear(2, 2)))


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_never_loaded(tmp_path):
    (saved(tmp_path) / "model.safetensors").unlink()
    torch.save({"weight": Trap(tmp_path / "sprung")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no safetensors, but \['pytorch_model.bin'\]"):
        longspan.convert(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_other_architectures_are_refused_by_name(tmp_path):
    config = transformers.GPT2Config(n_embd=24, n_layer=1, n_head=3, vocab_size=60)
    model = transformers.GPT2Model(config)
    wanted = r"GPT2Model \(model_type 'gpt2'\); supported are Longformer, Roberta.*ForMaskedLM"
    with pytest.raises(ValueError, match=wanted):
        longspan.convert(model)
    with pytest.raises(ValueError, match=wanted):
        longspan.convert(saved(tmp_path, model))
    with pytest.raises(ValueError, match="BertForNextSentencePrediction"):
        longspan.convert(short("Bert", "ForNextSentencePrediction"))
    with pytest.raises(ValueError, match="is_decoder"):
        longspan.convert(short("Bert", is_decoder=True))


def test_architectures_that_transformers_does_not_know_are_refused_as_well(tmp_path):
    config = {"model_type": "unheard", "architectures": ["UnheardModel"]}
    (tmp_path / "code.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path)!r}, 'ran').touch()"
    )
    for code in ({}, {"auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | code))
        wanted = r"UnheardModel \(model_type 'unheard'\); supported are Longformer"
        with pytest.raises(ValueError, match=wanted):
            longspan.convert(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attention": {"window": 8, "dilation": 2}}, "layer 0 is dilated"),
        ({"attention": {"window": [8, 0]}}, "no symmetric window"),
        ({"position": "sinusoidal"}, "positions are sinusoidal"),
        ({"embedding_size": 12}, "embeddings have size 12"),
        ({"classifier_act": "relu"}, "classifier_act is 'relu'"),
        ({"pad_token_id": None}, "no padding token"),
    ],
)
def test_what_a_longformer_cannot_express(settings, reason):
    config = longspan.LongspanConfig(**short_sizes(**({"attention": {"window": 8}} | settings)))
    with pytest.raises(ValueError, match=reason):
        longspan.to_transformers(longspan.LongspanForSequenceClassification(config))


def test_shared_projections_leave_as_copies():
    attention = {"window": 8, "separate_global": False}
    config = longspan.LongspanConfig(**short_sizes(attention=attention))
    ours, given = spread(longspan.LongspanModel(config)), batch("Model")
    theirs = longspan.to_transformers(ours)
    assert largest_difference(*(results(m(**given), given) for m in (ours, theirs))) <= CLOSE
