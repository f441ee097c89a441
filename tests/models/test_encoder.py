"""The encoder by itself: packing, positions, compilation, and input it refuses."""

from typing import Any, cast

import pytest
import torch
from models.small import MODERN, VOCAB, batch, short_sizes, spread

from longspan import (
    LongspanConfig,
    LongspanForSequenceClassification,
    LongspanModel,
    pad,
    unpad,
)


def encoder(**changes):
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 66, "attention": [{"window": 8}, {"window": 4}]}
    config = LongspanConfig(**short_sizes(**(settings | changes)))
    return spread(LongspanModel(config))


def ids(*shape):
    return torch.randint(4, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def test_global_projections_start_as_copies():
    model = LongspanModel(encoder().config)
    for block in cast(Any, model.layers):
        assert torch.equal(block.attention.qkv.weight, block.attention.qkv_global.weight)
    assert model.embeddings.words.weight.std() < 0.03


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "learned", "position_offset": 0},
        {"position": "learned", "position_offset": 2},
        {"position": "sinusoidal"},
        MODERN,
    ],
    ids=["bert", "roberta", "sinusoidal", "modern"],
)
def test_packed_is_separate(changes):
    model = encoder(**changes)
    lengths = [9, 30, 1, 17]
    rows = [ids(1, length) for length in lengths]
    chosen = [torch.zeros_like(row) for row in rows]
    for mask in chosen[:2]:
        mask[:, [0, 5]] = 1
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    packed = model(
        torch.cat(rows, 1), global_attention_mask=torch.cat(chosen, 1), cu_seqlens=bounds
    )
    alone = [model(row, global_attention_mask=mask) for row, mask in zip(rows, chosen, strict=True)]
    together = torch.cat([output.last_hidden_state for output in alone], 1)
    torch.testing.assert_close(packed.last_hidden_state, together, rtol=0, atol=2e-5)
    pooled = torch.cat([output.pooler_output for output in alone])
    torch.testing.assert_close(packed.pooler_output, pooled, rtol=0, atol=2e-5)


def test_unpadded_is_padded():
    """Outputs and gradients."""
    model, given = encoder(), batch("Model", lengths=(37, 1, 20))
    weight = torch.randn(3, 37, 24) * given["attention_mask"][..., None]
    found = []
    for packed in (False, True):
        if packed:
            packing, (tokens, chosen) = unpad(
                given["attention_mask"], given["input_ids"], given["global_attention_mask"]
            )
            assert tokens.shape == (1, 58)
            output = model(tokens, global_attention_mask=chosen, cu_seqlens=packing.cu_seqlens)
            hidden = pad(packing, output.last_hidden_state)
        else:
            hidden = model(**given).last_hidden_state
        grads = torch.autograd.grad((hidden * weight).sum(), model.layers[0].up.weight)
        found.append((hidden[given["attention_mask"].bool()], *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_pad_undoes_unpad():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    tensor = torch.randn(3, 3, 2) * mask[..., None]
    packing, (packed,) = unpad(mask, tensor)
    assert packing.cu_seqlens.tolist() == [0, 2, 2, 4]
    assert torch.equal(pad(packing, packed), tensor)
    told, (same,) = unpad(mask, tensor, total=4)
    assert torch.equal(told.place, packing.place)
    assert torch.equal(same, packed)
    with pytest.raises(ValueError, match="total=5 is not the number of real tokens"):
        unpad(mask, tensor, total=5)
    with pytest.raises(ValueError, match="does not fit"):
        unpad(mask, tensor[:2])
    with pytest.raises(ValueError, match="one row of 4 tokens"):
        pad(packing, packed[:, 1:])


def test_unpad_compiles_where_it_is_told_how_many_tokens_there_are():
    """Nothing is read back, so nothing breaks the graph."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    compiled = torch.compile(lambda m: unpad(m, m, total=4), fullgraph=True, backend="eager")
    packing, (packed,) = compiled(mask)
    assert packing.place.tolist() == [0, 1, 4, 5]
    assert packed.tolist() == [[1, 1, 1, 1]]


def test_more_padding_changes_nothing():
    model, given = encoder(), batch("Model")
    longer = {
        name: torch.nn.functional.pad(tensor, (0, 9), value=1 if name == "input_ids" else 0)
        for name, tensor in given.items()
    }
    real = given["attention_mask"].bool()
    one, other = (model(**inputs).last_hidden_state for inputs in (given, longer))
    torch.testing.assert_close(one[real], other[:, :37][real], rtol=0, atol=1e-6)


def test_a_row_of_padding_is_refused_and_else_finite():
    """Where values cannot be looked at, in a graph or on a GPU, it gives nothing but zeros."""
    mask = torch.ones(2, 10).long()
    mask[1] = 0
    model = encoder(max_global_tokens=10)
    with pytest.raises(ValueError, match=r"rows \[1\] are padding alone; leave them out"):
        model(ids(2, 10), mask)
    with pytest.raises(ValueError, match=r"documents \[1\] have no token"):
        model(ids(1, 10), cu_seqlens=torch.tensor([0, 4, 4, 10]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(ids(2, 10), mask, global_attention_mask=torch.ones_like(mask))
    output.last_hidden_state.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert output.last_hidden_state.isfinite().all()
    assert output.global_attention_mask[1].sum() == 0


def test_embeddings_instead_of_ids():
    model, tokens = encoder(), ids(2, 20)
    by_ids = model(tokens).last_hidden_state
    assert torch.equal(model(inputs_embeds=model.embeddings.words(tokens))[0], by_ids)
    places = torch.arange(20).expand(2, 20) + 2
    types = torch.zeros_like(tokens)
    assert torch.equal(model(tokens, position_ids=places, token_type_ids=types)[0], by_ids)


def test_hidden_states_and_tuples():
    model, tokens = encoder(), ids(1, 12)
    output = model(tokens, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    assert torch.equal(model(tokens, return_dict=False)[0], output.last_hidden_state)


def test_positions_are_extended():
    model, tokens = encoder(), ids(1, 100)
    with pytest.raises(ValueError, match=r"100 tokens.*positions for 64.*extend_positions\(100\)"):
        model(tokens)
    before = model(tokens[:, :64])[0]
    model.extend_positions(100)
    assert model.config.longest == 100
    assert model(tokens)[0].shape == (1, 100, 24)
    assert torch.equal(model(tokens[:, :64])[0], before)
    table = model.embeddings.positions.weight
    assert torch.equal(table[66:], table[2:38])
    assert table.requires_grad
    model.extend_positions(100)
    with pytest.raises(ValueError, match="only ever added"):
        model.extend_positions(99)
    for wrong in (150.5, "150"):
        with pytest.raises(TypeError, match=r"length must be a whole number of tokens, got .*150"):
            model.extend_positions(wrong)
    assert model.config.longest == 100


def test_extended_positions_are_saved(tmp_path):
    model = encoder()
    model.extend_positions(90)
    model.save_pretrained(tmp_path)
    loaded = LongspanModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids(1, 90))[0], model(ids(1, 90))[0])


def test_sinusoidal_positions_have_no_end():
    model = encoder(position="sinusoidal")
    model.extend_positions(10**6)
    assert model(ids(1, 300))[0].shape == (1, 300, 24)


def test_a_packed_document_may_not_exceed_the_positions():
    model = encoder()
    assert model(ids(1, 100), cu_seqlens=torch.tensor([0, 50, 100]))[0].shape[1] == 100
    with pytest.raises(ValueError, match="80 tokens"):
        model(ids(1, 100), cu_seqlens=torch.tensor([0, 20, 100]))


def wrong(**inputs):
    return inputs


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (wrong(), "either input_ids or inputs_embeds"),
        (wrong(input_ids=ids(1, 9), inputs_embeds=torch.zeros(1, 9, 24)), "either"),
        (wrong(input_ids=ids(9)), r"\[batch, tokens\], got \(9,\)"),
        (wrong(input_ids=ids(0, 9)), "empty batch"),
        (wrong(input_ids=ids(2, 0)), "empty batch"),
        (wrong(input_ids=torch.tensor([[5, VOCAB]])), "from 5 to 60.*tokenizer"),
        (wrong(input_ids=torch.tensor([[-1, 5]])), "from -1 to 5"),
        (wrong(inputs_embeds=torch.zeros(1, 9, 23)), r"\[batch, tokens, 24\]"),
        (wrong(input_ids=ids(2, 9), attention_mask=torch.ones(2, 8)), r"attention_mask.*\(2, 9\)"),
        (
            wrong(input_ids=ids(2, 9), global_attention_mask=torch.ones(1, 9)),
            "global_attention_mask",
        ),
        (wrong(input_ids=ids(2, 9), attention_mask=-torch.ones(2, 9)), "1 = yes, 0 = no"),
        (wrong(input_ids=ids(2, 9), attention_mask=-ids(2, 9)), "1 = yes, 0 = no.* from -"),
        (wrong(input_ids=ids(2, 9), attention_mask=torch.full((2, 9), torch.nan)), "from nan"),
        (wrong(input_ids=ids(1, 2), attention_mask=torch.tensor([[2, 1]])), "from 1 to 2.*global_"),
        (wrong(input_ids=ids(2, 9), position_ids=torch.zeros(9).long()), "position_ids"),
        (wrong(input_ids=ids(1, 2), position_ids=torch.tensor([[3, 66]])), "3 to 66.*0 to 65"),
        (wrong(input_ids=ids(1, 2), token_type_ids=torch.tensor([[0, 1]])), "types 0 to 0"),
        (wrong(input_ids=ids(2, 9), cu_seqlens=torch.tensor([0, 9])), "batch is 2"),
        (wrong(input_ids=ids(1, 9), cu_seqlens=torch.tensor([0, 8])), "from 0 to tokens = 9"),
    ],
)
def test_wrong_input_is_named(inputs, message):
    with pytest.raises(ValueError, match=message):
        encoder()(**inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (wrong(input_ids=[[5, 6]]), r"input_ids must be a tensor, got list.*return_tensors"),
        (wrong(input_ids=ids(1, 2).numpy()), "input_ids must be a tensor, got ndarray"),
        (wrong(input_ids=ids(1, 2).float()), "int64 or int32, got torch.float32"),
        (wrong(input_ids=ids(1, 2).bool()), "int64 or int32, got torch.bool"),
        (wrong(input_ids=ids(1, 2), attention_mask=[[1, 1]]), "attention_mask must be a tensor"),
        (wrong(input_ids=ids(1, 2), position_ids=[[2, 3]]), "position_ids must be a tensor"),
        (wrong(input_ids=ids(1, 2), position_ids=torch.ones(1, 2)), "position_ids must be int64"),
        (
            wrong(input_ids=ids(1, 2), token_type_ids=torch.zeros(1, 2)),
            "token_type_ids must be",
        ),
    ],
)
def test_what_is_no_tensor_of_ids_is_named(inputs, message):
    heads = LongspanForSequenceClassification(encoder().config)
    for model in (encoder(), heads):
        with pytest.raises(TypeError, match=message):
            model(**inputs)


def test_one_row_of_positions_serves_all_documents():
    tokens, place = ids(2, 9), torch.arange(20, 29)
    one, each = (encoder()(tokens, position_ids=place.expand(n, -1)) for n in (1, 2))
    assert torch.equal(one.last_hidden_state, each.last_hidden_state)


def test_no_token_types_at_all():
    model = encoder(type_vocab_size=0)
    with pytest.raises(ValueError, match="no token types"):
        model(ids(1, 3), token_type_ids=torch.zeros(1, 3).long())


def test_a_backend_for_all_layers(tmp_path):
    """Of this model: it is not saved, but one that the config names is."""
    model = LongspanForSequenceClassification(encoder().config).eval()
    model.set_backend("chunks")
    assert [block.attention.backend for block in cast(Any, model.encoder.layers)] == ["chunks"] * 2
    model.save_pretrained(tmp_path)
    loaded = LongspanForSequenceClassification.from_pretrained(tmp_path)
    assert [block.attention.backend for block in loaded.encoder.layers] == ["auto"] * 2
    torch.testing.assert_close(loaded.eval()(ids(2, 21)).logits, model(ids(2, 21)).logits)
    named = encoder(attention={"window": 8, "backend": "chunks"})
    named.save_pretrained(tmp_path)
    kept = LongspanModel.from_pretrained(tmp_path).eval()
    assert torch.equal(kept(ids(1, 21))[0], named(ids(1, 21))[0])
    assert [block.attention.backend for block in cast(Any, kept.layers)] == ["chunks"] * 2
    with pytest.raises(ValueError, match="backend='chunk' is unknown; choose from auto, triton"):
        model.set_backend("chunk")
    with pytest.raises(ValueError, match="for windows, and no layer here has any"):
        encoder(attention={"kind": "performer"}).set_backend("native")


def test_by_another_backend_packed_documents_stay_packed():
    model, bounds = encoder(), torch.tensor([0, 9, 21])
    wanted = model(ids(1, 21), cu_seqlens=bounds)
    model.set_backend("chunks")
    found = model(ids(1, 21), cu_seqlens=bounds)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found.pooler_output, wanted.pooler_output)


def test_too_many_global_tokens_are_named():
    with pytest.raises(ValueError, match="9 global tokens in one row, but room for only 4"):
        encoder()(ids(1, 9), global_attention_mask=torch.ones(1, 9).long(), max_global_tokens=4)
