"""Heads: presets of global tokens, losses, packing, attention maps, saving."""

import pytest
import torch
import transformers
from models.small import HEADS, MODERN, SEP, VOCAB, batch, build, labels, results

import longspan
from longspan.models import presets
from longspan.models.presets import choose_global

AUTO = {
    "Model": "AutoModel",
    **{head: f"AutoModel{head}" for head in HEADS if head != "Model"},
}


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
    # BERT's tokenizer sets one separator between the two texts; so may whoever sets three of them,
    # but then Longformer takes what is behind the first for a second one.
    single = [[0, 5, 2, 7, 8, 2], [0, 5, 6, 2, 7, 2]]
    assert chosen("candidates", single)[0] == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert chosen("candidates", [[0, 5, 2, 7, 2, 8, 2]])[0] == [[0, 0, 0, 0, 1, 1, 1]]
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
        ("ForMultipleChoice", [30, 12, 12, 30]),
    ],
)
def test_the_choice_is_in_the_output(head, wanted):
    given = batch(head)
    given.pop("global_attention_mask")
    output = build(head)(**given)
    mask = output.global_attention_mask
    assert wanted == (None if mask is None else mask.sum(1).tolist())
    assert build(head, global_preset="none")(**given).global_attention_mask is None
    assert longspan.explain_global(output).count("row") == len(wanted or [])


class Words:
    """A tokenizer as far as decoding goes."""

    def decode(self, ids):
        return " ".join(f"w{one}" for one in ids)


def test_the_choice_is_explained():
    tokens = torch.tensor([[0, 5, 6, 2, 7], [0, 8, 2, 9, 1], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert longspan.explain_global(mask).splitlines() == [
        "row 0: 4 of 5 tokens are global: 0-2, 4",
        "row 1: 1 of 5 tokens are global: 0",
        "row 2: 0 of 5 tokens are global",
    ]
    first, second, _ = longspan.explain_global(mask, tokens, Words(), width=8).splitlines()
    assert first.endswith("global: 0-2 'w0 w5 w6', 4 'w7'")
    assert second.endswith("global: 0 'w0'")
    assert "'w0...'" in longspan.explain_global(mask, tokens, Words(), width=5)
    assert longspan.explain_global({"global_attention_mask": None}) == "no token is global"
    with pytest.raises(ValueError, match=r"\(3, 4\) are not those of the mask \(3, 5\)"):
        longspan.explain_global(mask, tokens[:, :4])


@pytest.mark.parametrize("head", HEADS[1:])
def test_a_task_without_global_tokens_is_warned_of_once(head, monkeypatch):
    said = []
    monkeypatch.setattr(presets.logger, "warning_once", said.append)
    given = batch(head)
    model = build(head)
    model(**given)
    assert not said
    model(**given | {"global_attention_mask": torch.zeros_like(given["input_ids"])})
    given.pop("global_attention_mask")
    build(head, global_preset="none")(**given)
    meant = head not in ("ForMaskedLM", "ForTokenClassification")
    assert ["no token is global" in one for one in said] == [True, True] * meant


@pytest.mark.parametrize("changes", [{}, MODERN], ids=["bert", "modern"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_has_attention_maps(head, changes):
    model, given = build(head, **changes), batch(head)
    maps = model(**given, output_attentions=True).attentions
    assert len(maps) == 2
    assert model(**given).attentions is None
    mask = given["attention_mask"].flatten(0, -2)
    for b in range(len(mask)):
        for i in range(int(mask[b].sum())):
            assert maps[1].row(i, 2, b)[1].sum().item() == pytest.approx(1.0, abs=1e-5)


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


@pytest.mark.parametrize("changes", [{}, MODERN], ids=["bert", "modern"])
@pytest.mark.parametrize("head", HEADS[1:])
def test_packed_is_separate(head, changes):
    """The presets and the mean over a document included."""
    model, given = build(head, **changes), batch(head)
    given.pop("global_attention_mask")
    tokens, more = packed_rows(head, given)
    padded = results(model(**given), given)
    for name, found in results(model(tokens, **more), more).items():
        torch.testing.assert_close(found, padded[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("head", HEADS[1:])
def test_losses_of_packed_documents(head):
    """The same as those of a batch without padding, with which transformers compares places."""
    model, given = build(head), batch(head, (20, 20))
    given.pop("global_attention_mask")
    told = labels(head, given)
    if head == "ForQuestionAnswering":
        told["end_positions"] = torch.tensor([7, 25])  # behind its document, but not the row
    wanted = model(**given, **told).loss
    if head in ("ForMaskedLM", "ForTokenClassification"):
        told = {"labels": told["labels"].flatten()[None]}
    tokens, more = packed_rows(head, given)
    torch.testing.assert_close(model(tokens, **more, **told).loss, wanted)


def test_a_position_for_each_document():
    model, tokens = build("ForQuestionAnswering"), torch.randint(4, VOCAB, (1, 12))
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="1 positions of answers for the 2 documents"):
        model(tokens, cu_seqlens=torch.tensor([0, 4, 12]), start_positions=one, end_positions=one)
    with pytest.raises(ValueError, match="choices=5, but input_ids has 2"):
        build("ForMultipleChoice")(torch.randint(4, VOCAB, (1, 2, 12)), choices=5)


def packed_rows(head, given):
    """A padded batch packed, and how to call a head with it."""
    mask, ids = (given[name].flatten(0, -2) for name in ("attention_mask", "input_ids"))
    packing, (tokens,) = longspan.unpad(mask, ids)
    more = {"cu_seqlens": packing.cu_seqlens, "attention_mask": torch.ones_like(tokens)}
    return tokens, more | ({"choices": 2} if head == "ForMultipleChoice" else {})


def test_documents_that_make_up_no_questions():
    model, tokens = build("ForMultipleChoice"), torch.randint(4, VOCAB, (1, 12))
    bounds = torch.tensor([0, 4, 8, 12])
    assert model(tokens, cu_seqlens=bounds).logits.shape == (1, 3)
    with pytest.raises(ValueError, match="3 documents are no questions of choices=2 each"):
        model(tokens, cu_seqlens=bounds, choices=2)


def test_choices_need_three_dimensions():
    with pytest.raises(ValueError, match=r"\[batch, choices, tokens\], got \(2, 5\)"):
        build("ForMultipleChoice")(torch.ones(2, 5).long())


def test_choices_come_in_one_shape():
    """Flattened, [choices, batch, tokens] would look like [batch, choices, tokens]."""
    model, tokens = build("ForMultipleChoice"), torch.full((2, 3, 9), 5)
    for name in ("attention_mask", "global_attention_mask", "token_type_ids", "position_ids"):
        for shape in ((3, 2, 9), (9,), (2, 3, 9, 1)):
            with pytest.raises(ValueError, match=rf"{name} must be .*choices.* = \(2, 3, 9\)"):
                model(tokens, **{name: torch.ones(shape, dtype=torch.long)})
    with pytest.raises(ValueError, match=r"attention_mask must be .*choices"):
        model(tokens, attention_mask=torch.ones(2, 9))
    place = torch.arange(20, 29)
    one, each = (model(tokens, position_ids=p) for p in (place[None], place.expand(2, 3, 9)))
    assert torch.equal(one.logits, each.logits)


def test_unknown_names_are_not_attributes():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = longspan.nonsense
    assert "convert" in dir(longspan)


def spoil(given, name, change):
    return given | {name: change(given[name])}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("input_ids", lambda ids: ids + VOCAB, "is the tokenizer another model's"),
        ("input_ids", lambda ids: ids - 9, "token ids from -"),
        ("input_ids", lambda ids: ids[:0], "empty batch|attention_mask must be"),
        ("input_ids", lambda ids: ids[..., :0], "empty batch|attention_mask must be"),
        ("attention_mask", lambda mask: mask[..., :-1], "attention_mask must be"),
        ("attention_mask", lambda mask: mask * 0, "are padding alone"),
        ("attention_mask", lambda mask: (mask - 1) * 1e4, "1 = yes, 0 = no"),
        ("global_attention_mask", lambda mask: mask[..., 1:], "global_attention_mask must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("head", HEADS)
def test_bad_input_is_named(head, name, change, message):
    with pytest.raises(ValueError, match=message):
        build(head)(**spoil(batch(head), name, change))


@pytest.mark.parametrize("head", HEADS)
def test_lists_instead_of_tensors_are_named(head):
    model, given = build(head), batch(head)
    given.pop("global_attention_mask")
    with pytest.raises(TypeError, match="attention_mask must be a tensor, got list"):
        model(given["input_ids"], attention_mask=given["attention_mask"].tolist())
    with pytest.raises(TypeError, match=r"cu_seqlens must be a torch\.Tensor, got list"):
        model(torch.full((1, 6), 5), cu_seqlens=[0, 6])
    with pytest.raises(TypeError, match="global_attention_mask must be a tensor, got list"):
        model(given["input_ids"], global_attention_mask=[1])


@pytest.mark.parametrize("head", HEADS)
def test_bad_boundaries_are_named(head):
    """Also by heads that look for questions between them."""
    model, row = build(head), torch.full((1, 6), 5)
    for bounds, message in (
        ([0, 3, 7], "must rise from 0 to tokens = 6"),
        ([0, 4, 2, 6], "must rise from 0 to tokens = 6"),
        ([0, 3, 3, 6], r"documents \[1\] have no token"),
        ([], r"must be \[documents \+ 1\] boundaries"),
    ):
        with pytest.raises(ValueError, match=message):
            model(row, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


def test_no_warning_of_global_tokens_comes_before_an_error(monkeypatch):
    said = []
    monkeypatch.setattr(presets.logger, "warning_once", said.append)
    with pytest.raises(ValueError, match="empty batch"):
        build("ForSequenceClassification")(torch.full((0, 6), 5))
    assert not said


@pytest.mark.parametrize("head", HEADS)
def test_tuples_instead_of_names(head):
    model, given = build(head), batch(head, (9, 6))
    named = model(**given)
    model.config.return_dict = False
    found = model(**given)
    assert isinstance(found, tuple)
    for one, other in zip(found, named.to_tuple(), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("head", HEADS)
def test_nothing_is_cut_silently(head):
    given = batch(head, (70, 30))
    with pytest.raises(ValueError, match=r"70 tokens.*positions for 64.*extend_positions\(70\)"):
        build(head)(**given)
    model = build(head)
    model.extend_positions(70)
    assert model(**given)[0].isfinite().all()
