"""Heads: presets of global tokens, losses, packing, compilation, saving."""

import pytest
import torch
import transformers
from models.small import HEADS, SEP, VOCAB, batch, labels, results, short_sizes, spread

import longspan
from longspan import LongspanConfig
from longspan.models.presets import choose_global

AUTO = {
    "Model": "AutoModel",
    **{head: f"AutoModel{head}" for head in HEADS if head != "Model"},
}


def build(head, **changes):
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 66, "attention": {"window": 8}, "sep_token_id": SEP}
    config = LongspanConfig(**short_sizes(**(settings | changes)))
    return spread(getattr(longspan, f"Longspan{head}")(config))


@pytest.mark.parametrize("head", HEADS)
def test_saved_and_loaded(head, tmp_path):
    model, given = build(head), batch(head)
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    loaded = getattr(transformers, AUTO[head]).from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    for name, value in results(model(**given), given).items():
        assert torch.equal(results(loaded(**given), given)[name], value)


def test_a_head_starts_from_a_saved_encoder(tmp_path):
    encoder = build("Model")
    encoder.save_pretrained(tmp_path)
    head = longspan.LongspanForTokenClassification.from_pretrained(tmp_path, num_labels=5)
    given = batch("Model")
    assert head(**given).logits.shape == (2, 37, 5)
    assert torch.equal(head.encoder(**given)[0], encoder(**given)[0])


def test_words_are_tied_to_the_decoder():
    model = build("ForMaskedLM")
    assert model.lm_head.decoder.weight is model.encoder.embeddings.words.weight
    model.resize_token_embeddings(VOCAB + 3)
    assert model(torch.tensor([[VOCAB + 2, 5]])).logits.shape == (1, 2, VOCAB + 3)


def chosen(preset, rows, **more):
    tokens = torch.tensor(rows)
    mask, most = choose_global(preset, tokens, input_ids=tokens, sep_token_id=SEP, **more)
    return None if mask is None else mask.long().tolist(), most


def test_presets():
    rows = [[0, 5, 2, 2, 7, 8, 2], [0, 2, 2, 5, 7, 2, 1]]
    assert chosen("none", rows) == (None, None)
    assert chosen("first", rows) == ([[1, 0, 0, 0, 0, 0, 0]] * 2, 1)
    assert chosen("question", rows)[0] == [[1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    assert chosen("candidates", rows)[0] == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]]
    # Without a separator nobody knows where the question ends.
    assert chosen("question", [[0, 5, 6]])[0] == [[1, 0, 0]]
    with pytest.raises(ValueError, match="choose from none, first, question, candidates"):
        chosen("all", rows)


def test_presets_of_packed_documents():
    row, bounds = [[0, 5, 2, 2, 7, 0, 2, 2, 8, 0, 9]], torch.tensor([0, 5, 9, 11])
    assert chosen("first", row, cu_seqlens=bounds) == ([[1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0]], 3)
    question = chosen("question", row, cu_seqlens=bounds)[0]
    assert question == [[1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0]]
    candidates = chosen("candidates", row, cu_seqlens=bounds)[0]
    assert candidates == [[0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        ("ForMaskedLM", None),
        ("ForTokenClassification", None),
        ("ForSequenceClassification", [1, 1]),
        ("ForQuestionAnswering", [5, 6]),
        ("ForMultipleChoice", [1, 1, 1, 1]),
    ],
)
def test_the_choice_is_in_the_output(head, wanted):
    given = batch(head)
    given.pop("global_attention_mask")
    mask = build(head)(**given).global_attention_mask
    assert wanted == (None if mask is None else mask.sum(1).tolist())
    assert build(head, global_preset="none")(**given).global_attention_mask is None


def test_losses_follow_the_kind_of_label():
    given = batch("Model")
    for count, target, loss in (
        (1, torch.tensor([0.5, 2.0]), torch.nn.functional.mse_loss),
        (3, torch.tensor([2, 0]), torch.nn.functional.cross_entropy),
        (3, torch.rand(2, 3), torch.nn.functional.binary_cross_entropy_with_logits),
    ):
        output = build("ForSequenceClassification", num_labels=count)(**given, labels=target)
        torch.testing.assert_close(
            output.loss,
            loss(output.logits.view_as(target) if count == 1 else output.logits, target),
        )


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForQuestionAnswering"])
def test_packed_is_separate(head):
    """The presets included."""
    model, given = build(head), batch(head)
    given.pop("global_attention_mask")
    packing, (tokens,) = longspan.unpad(given["attention_mask"], given["input_ids"])
    packed, padded = model(tokens, cu_seqlens=packing.cu_seqlens), model(**given)
    if head == "ForQuestionAnswering":
        one, other = longspan.pad(packing, packed.start_logits), padded.start_logits
        real = given["attention_mask"].bool()
        torch.testing.assert_close(one[real], other[real], rtol=0, atol=2e-5)
        with pytest.raises(ValueError, match=r"pad\(\) the logits"):
            model(tokens, cu_seqlens=packing.cu_seqlens, **labels(head, given))
    else:
        torch.testing.assert_close(packed.logits, padded.logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("head", HEADS[1:])
def test_compiles_without_a_graph_break(head):
    model, given = build(head, max_global_tokens=12), batch(head)
    given |= labels(head, given)
    given.pop("global_attention_mask")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given).loss, model(**given).loss, rtol=0, atol=2e-5)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForQuestionAnswering"])
def test_exports_with_any_length(head):
    model = build(head, max_global_tokens=12)
    given, other = (
        {k: v for k, v in batch(head, lengths).items() if k != "global_attention_mask"}
        for lengths in ((37, 20), (51, 30))
    )
    length = torch.export.Dim("length", min=8, max=64)
    exported = torch.export.export(
        model, (), kwargs=given, dynamic_shapes={name: {1: length} for name in given}
    ).module()
    for name, value in results(model(**other), other).items():
        torch.testing.assert_close(results(exported(**other), other)[name], value)


def test_choices_need_three_dimensions():
    with pytest.raises(ValueError, match=r"\[batch, choices, tokens\], got \(2, 5\)"):
        build("ForMultipleChoice")(torch.ones(2, 5).long())


def test_unknown_names_are_not_attributes():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = longspan.nonsense
    assert "convert" in dir(longspan)
