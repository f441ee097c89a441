"""RECL of models whose losses are known."""

import numpy as np
import pytest
import torch

from longspan.analyze.recl import losses_of, recl
from longspan.models import LongspanDecoderConfig, LongspanForCausalLM

OPTIONS = {"start": 100, "step": 100, "longest": 1000}


def until(limit, start=3.0, gain=0.02, tokens=50):
    """Loses `gain` nats per 100 tokens of context, up to `limit`."""
    return lambda context: np.full(tokens, start - gain * min(context, limit) / 100)


def test_a_constant_model_needs_no_more_than_it_has():
    assert recl([until(0)], **OPTIONS) == [100]


def test_a_model_that_ignores_its_context_needs_none():
    """A real one, whose every prediction is the same; beside it one that is better nowhere."""
    config = LongspanDecoderConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        attention={"kind": "xl", "memory": 8},
    )
    model = LongspanForCausalLM(config).eval()
    torch.nn.init.zeros_(model.embeddings.weight)  # the output's too: all bytes are as likely
    text = np.random.default_rng(0).integers(0, 256, 60).astype(np.uint8)
    own = losses_of(model, text, count=10, segment=4)
    assert own(5) == pytest.approx(np.full(10, np.log(256)))
    options = {"start": 5, "step": 5, "longest": 40}
    assert recl([own, lambda context: own(context) + 1.0 / context], **options) == [5, 5]


def test_it_ends_where_the_gain_does():
    assert recl([until(400)], **OPTIONS) == [400]
    assert recl([until(5000)], **OPTIONS) == [1000]
    assert recl([until(400, gain=0.009)], **OPTIONS) == [100]  # less than 1% a step


def test_only_what_beats_the_group_counts():
    """A weak model that improves, but never on the strong one, gains nothing."""
    assert recl([until(900, start=4.0), until(300, start=3.0)], **OPTIONS) == [100, 300]


def test_only_hard_tokens_count():
    def losses(context):
        easy = np.full(90, 1.0 - context / 5_000)
        return np.concatenate([easy, np.full(10, 5.0)])

    assert recl([losses], **OPTIONS, fraction=0.1) == [100]
    assert recl([lambda context: losses(context)[:90]], **OPTIONS, fraction=1.0) == [1000]


def test_losses_have_exactly_the_context_asked_for():
    torch.manual_seed(0)
    config = LongspanDecoderConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        attention={"kind": "full"},
    )
    model = LongspanForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    text = np.random.default_rng(0).integers(97, 107, 40).astype(np.uint8)
    found = losses_of(model, text, count=5, batch=3)(7)
    for place, nats in zip(range(35, 40), found, strict=True):
        before = torch.from_numpy(text[place - 7 : place].astype(np.int64))[None]
        logits = model(before).logits[0, -1]
        assert nats == pytest.approx(-logits.log_softmax(-1)[int(text[place])].item(), rel=1e-4)
    with pytest.raises(ValueError, match="the text has 40"):
        losses_of(model, text, count=5)(36)


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="start=0"):
        recl([until(0)], start=0, step=1, longest=5)
    with pytest.raises(ValueError, match="fraction=2"):
        recl([until(0)], **OPTIONS, fraction=2)
