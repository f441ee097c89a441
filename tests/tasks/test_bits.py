"""Bits per character: every byte scored once, each with what it should have before it."""

import math

import numpy as np
import pytest
import torch

from longspan.models import LongspanDecoderConfig, LongspanForCausalLM
from longspan.tasks.bits import bits, sliding_nats, streamed_nats
from longspan.tasks.charlm import by_document, with_attention
from longspan.train.recipe import Evaluation

TEXT = np.random.default_rng(0).integers(97, 107, 101).astype(np.uint8)


def model(attention=None):
    torch.manual_seed(0)
    config = LongspanDecoderConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        attention=attention or {"left": 3},
    )
    made = LongspanForCausalLM(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def at_once(made, text=TEXT):
    ids = torch.from_numpy(text.astype(np.int64))[None]
    logits = made(ids[:, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").detach()


@pytest.mark.parametrize(("length", "stride"), [(100, 1), (30, 7), (30, 30), (500, 10), (16, 1)])
def test_windows_score_every_byte_once(length, stride):
    made = model()
    found = sliding_nats(made, TEXT, length=length, stride=stride, batch=3)
    assert found.shape == (100,)
    whole = at_once(made)
    # Layers reach back 2 * 3 tokens: what has that before it is scored as in one pass.
    if length - stride >= 6 or length >= 100:
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    else:
        assert not torch.allclose(found, whole)


@pytest.mark.parametrize(
    "attention", [{"left": 3}, {"kind": "full"}, {"kind": "xl", "memory": 200}]
)
@pytest.mark.parametrize("length", [1, 13, 200])
def test_a_stream_is_one_pass(attention, length):
    made = model(attention)
    found = streamed_nats(made, TEXT, length=length)
    torch.testing.assert_close(found, at_once(made), rtol=1e-4, atol=1e-4)


def test_several_streams_score_every_byte_once():
    made = model()
    found = streamed_nats(made, TEXT, length=9, batch=3)
    whole = at_once(made)
    assert found.shape == whole.shape
    for begin, end in ((0, 33), (33 + 6, 66), (66 + 6, 100)):  # less what starts without memory
        torch.testing.assert_close(found[begin:end], whole[begin:end], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["streamed", "sliding"])
def test_documents_start_afresh(kind):
    made = model({"kind": "full"})
    text = TEXT.copy()
    text[40] = 0
    found = by_document(made, text, Evaluation(kind, length=100, stride=8, batch=2))
    assert [size for size, _ in found] == [41, 60]
    assert found[1][1] == pytest.approx(bits(at_once(made, text[41:])), rel=1e-4)


def test_documents_are_measured_as_the_recipe_says():
    """With the memory that it evaluates with, and no more context than its windows."""
    made, longer = model({"kind": "xl", "memory": 2}), {"memory": 200}
    streamed = Evaluation("streamed", length=7, batch=3, attention=longer)
    ((_, found),) = by_document(made, TEXT, streamed)
    assert found == pytest.approx(bits(at_once(made)), rel=1e-4)
    dense = model({"kind": "full"})
    ((_, found),) = by_document(dense, TEXT, Evaluation("sliding", length=16, stride=4, batch=3))
    windows = sliding_nats(dense, TEXT, length=16, stride=4, batch=3)
    assert found == pytest.approx(bits(windows), rel=1e-6)
    assert found != pytest.approx(bits(at_once(dense)), rel=1e-4)


def test_knowing_nothing_costs_eight_bits():
    made = model()
    torch.nn.init.zeros_(made.embeddings.weight)
    found = sliding_nats(made, TEXT, length=20, stride=10, batch=2)
    assert bits(found) == pytest.approx(8.0)
    assert found.mean().item() == pytest.approx(math.log(256))


def test_wrong_strides_are_refused():
    with pytest.raises(ValueError, match="stride=9 must be from 1 to length=8"):
        sliding_nats(model(), TEXT, length=8, stride=9, batch=1)


def test_other_attention_same_weights():
    made = model({"kind": "xl", "memory": 2})
    longer = with_attention(made, {"memory": 200}).eval()
    assert made.config.attention[0]["memory"] == 2
    assert longer.embeddings.weight.data_ptr() == made.embeddings.weight.data_ptr()
    torch.testing.assert_close(
        streamed_nats(longer, TEXT, length=7), at_once(made), rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(streamed_nats(made, TEXT, length=7), at_once(made))
    assert with_attention(made, {}) is made
