"""Funnel: its layer against its formula, and models that grow shorter and whole again."""

from typing import Any

import pytest
import torch
from layers.family import (
    DIM,
    HEADS,
    compiles_anywhere,
    encoder_layer,
    heads_of,
    joined,
    states,
)

import longspan
from longspan.layers.position import rotate
from longspan.ops import visibility
from longspan.ops.shorten import shorten
from longspan.ops.window import Visibility

pytestmark = pytest.mark.usefixtures("on_device")


def softmax(query, key, value):
    return joined((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value)


@pytest.mark.parametrize("tokens", [1, 2, 3, 18])
@pytest.mark.parametrize("rotary", [None, 100.0])
def test_means_ask_and_tokens_answer(tokens, rotary):
    made, hidden = (
        encoder_layer({"kind": "funnel", "stride": 3, "rotary": rotary}),
        states(2, tokens),
    )
    groups = [hidden[:, :1]]
    groups += [hidden[:, i : i + 3] for i in range(1, tokens, 3)]
    coarse = torch.stack([group.mean(1) for group in groups], 1)
    query, (_, key, value) = heads_of(made, coarse)[0], heads_of(made, hidden)
    if rotary is not None:
        first = torch.tensor([[0, *range(1, tokens, 3)]])
        query, key = (
            rotate(t.transpose(1, 2), position=at, base=rotary)[0].transpose(1, 2)
            for t, at in ((query, first), (key, torch.arange(tokens)[None]))
        )
    torch.testing.assert_close(made(hidden), softmax(query, key, value))


def test_without_pooling_it_is_dense_attention():
    made, hidden = encoder_layer({"kind": "funnel", "stride": 1}), states(2, 18)
    torch.testing.assert_close(made(hidden), softmax(*heads_of(made, hidden)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_padding_are_zero(dtype):
    made, hidden = encoder_layer({"kind": "funnel"}, dtype), states(2, 9, dtype)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = mask[1] = 0
    out = made(hidden, seen=visibility(hidden, attention_mask=mask))
    assert out.isfinite().all()
    assert out[0, :3].any(-1).all()
    assert not out[0, 3:].any()
    assert not out[1].any()
    alone = made(hidden[1:], seen=visibility(hidden[1:], attention_mask=mask[1:]))
    assert not alone.any()


def model(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = longspan.LongspanConfig(
        **{
            "vocab_size": 30,
            "hidden_size": DIM,
            "num_hidden_layers": 5,
            "num_attention_heads": HEADS,
            "intermediate_size": 32,
            "max_position_embeddings": 66,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "attention": [
                {"window": 4},
                {"kind": "funnel", "stride": 2},
                {"window": 4},
                {"kind": "funnel", "stride": 3},
                {"kind": "bp", "near": 2},
            ],
        }
        | changes
    )
    made = longspan.LongspanForMaskedLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.double().eval()


every_form = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "rotary"},
        {
            "restored_layers": 2,
            "attention": [{"window": 4}, {"kind": "funnel"}, *[{"window": 4}] * 3],
        },
    ],
)


@every_form
def test_a_document_gives_the_same_wherever_it_stands(changes):
    made = model(**changes)
    ids = torch.randint(3, 30, (1, 23))
    alone = made(ids).logits
    assert alone.shape == (1, 23, 30)
    for left, right in ((0, 8), (7, 0), (2, 4)):
        row = torch.cat((torch.ones(1, left), ids, torch.ones(1, right)), 1).long()
        both = torch.cat((row, torch.randint(3, 30, row.shape)))
        mask = torch.ones_like(both)
        mask[0, :left] = mask[0, left + 23 :] = 0
        places = (torch.arange(row.shape[1]) + 2).repeat(2, 1)
        places[0] = (places[0] - left).clamp(min=0)
        found = made(both, attention_mask=mask, position_ids=places).logits[:1, left : left + 23]
        torch.testing.assert_close(found, alone)
        found = made(row, attention_mask=mask[:1], position_ids=places[:1]).logits
        torch.testing.assert_close(found[:, left : left + 23], alone)
    # One of another length, and one that shares a batch with it.
    others = [torch.randint(3, 30, (1, tokens)) for tokens in (10, 20)]
    bounds = torch.tensor([0, 10, 33, 53])
    packed = made(torch.cat((others[0], ids, others[1]), 1), cu_seqlens=bounds).logits
    first, last = (made(other).logits for other in others)
    torch.testing.assert_close(packed, torch.cat((first, alone, last), 1))


def test_the_layers_of_a_model_one_after_the_other():
    made = model()
    ids = torch.randint(3, 30, (2, 20))
    encoder = made.encoder
    states = encoder(ids, output_hidden_states=True).hidden_states
    assert [one.shape[1] for one in states] == [20, 20, 11, 11, 5, 20]
    hidden, pools = states[1], []
    for layer, stride in ((1, 2), (3, 3)):
        pools.append(shorten(hidden, Visibility(), stride))
        hidden = encoder.layers[layer](hidden, Visibility(), pools=pools[-1])
        hidden = encoder.layers[layer + 1](hidden, Visibility())
    wanted = states[1] + pools[0].spread(pools[1].spread(hidden))
    torch.testing.assert_close(states[-1], wanted)


def test_global_tokens_stay_global():
    made = model()
    ids = torch.randint(3, 30, (2, 40))
    chosen = torch.zeros_like(ids)
    chosen[:, 0] = 1
    found = made(ids, global_attention_mask=chosen).logits
    assert not torch.allclose(found, made(ids).logits)
    given = {"global_attention_mask": chosen, "attention_mask": torch.ones_like(ids)}
    torch.testing.assert_close(made(ids, **given).logits, found)


@every_form
def test_it_learns_and_is_saved(changes, tmp_path):
    made = model(**changes).float()
    ids = torch.randint(3, 30, (2, 21))
    chosen = (torch.arange(21) == 0).long().expand(2, -1)  # so that windows use all they have
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    losses = []
    for checkpointed in (False, True):
        if checkpointed:
            made.train().gradient_checkpointing_enable()
        loss = made(ids, labels=ids, global_attention_mask=chosen).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
        optimizer.step()
    assert losses[1] < losses[0]
    made.eval().save_pretrained(tmp_path)
    again = longspan.LongspanForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(made(ids).logits, again(ids).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"restored_layers": 5}, "restored_layers=5 must be from 0 to 4"),
        ({"restored_layers": -1}, "restored_layers=-1 must be from 0 to 4"),
        ({"restored_layers": 2}, "layer 3 makes documents shorter, but restored_layers=2"),
        ({"attention": {"kind": "funnel", "stride": 0}}, "stride=0 must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        model(**changes)


@compiles_anywhere
def test_it_compiles_as_one_graph():
    made = model()
    ids = torch.randint(3, 30, (2, 21))
    mask = torch.ones_like(ids)
    mask[0, 15:] = 0
    compiled: Any = torch.compile(made, fullgraph=True, backend="aot_eager")
    found = compiled(ids, attention_mask=mask).logits
    torch.testing.assert_close(found, made(ids, attention_mask=mask).logits)
