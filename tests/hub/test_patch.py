"""A patched transformers model computes what it computed before."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import is_patched, patch, unpatch

SIZES = {
    "vocab_size": 60,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "attention_window": [8, 4],
    "max_position_embeddings": 200,
}


def longformer(name: str = "LongformerModel", **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LongformerConfig(**(SIZES | changes))
    return getattr(transformers, name)(config).eval()


def led() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LEDConfig(
        vocab_size=60,
        d_model=24,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        attention_window=[8, 4],
        max_encoder_position_embeddings=200,
        max_decoder_position_embeddings=40,
    )
    return transformers.LEDForConditionalGeneration(config).eval()


def batch(tokens, share, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (2, tokens), generator=draw)
    mask = (torch.arange(tokens) < torch.tensor([[tokens], [max(1, tokens // 2)]])).long()
    chosen = (torch.rand(2, tokens, generator=draw) < share).long() * mask
    return {"input_ids": ids, "attention_mask": mask, "global_attention_mask": chosen}


@given(st.integers(1, 60), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 1000))
@settings(max_examples=15)
def test_outputs_stay_the_same(tokens, share, seed):
    model = longformer()
    inputs = batch(tokens, share, seed)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        before = model(**inputs)
        after = patch(model)(**inputs)
    torch.testing.assert_close(
        after.last_hidden_state[real], before.last_hidden_state[real], rtol=0, atol=2e-5
    )
    torch.testing.assert_close(after.pooler_output, before.pooler_output, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "name",
    [
        "LongformerForMaskedLM",
        "LongformerForSequenceClassification",
        "LongformerForTokenClassification",
    ],
)
def test_training_stays_the_same(name):
    zero = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = longformer(name, **zero).train()
    inputs = batch(37, 0.1, 1)
    short = name.endswith("SequenceClassification")
    labels = torch.tensor([0, 1]) if short else inputs["input_ids"] % model.config.num_labels
    if name.endswith("MaskedLM"):
        labels = inputs["input_ids"]
    grads = []
    for make in (lambda m: m, patch):
        model = make(model)
        model.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for n in grads[1]:
        torch.testing.assert_close(grads[1][n], grads[0][n], rtol=1e-3, atol=2e-5)


def test_attentions_come_from_transformers():
    model = longformer()
    inputs = batch(30, 0.2, 2)
    with torch.no_grad():
        before = model(**inputs, output_attentions=True)
        after = patch(model)(**inputs, output_attentions=True)
    for a, b in zip(after.attentions, before.attentions, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(after.global_attentions, before.global_attentions, strict=True):
        assert torch.equal(a, b)


def test_led_generates_the_same_tokens():
    model = led()
    inputs = batch(45, 0.0, 3)
    inputs["global_attention_mask"][:, 0] = 1
    options = {"num_beams": 2, "max_new_tokens": 8, "do_sample": False}
    before = model.generate(**inputs, **options)
    states = model.led.encoder(**inputs).last_hidden_state
    patch(model)
    assert torch.equal(model.generate(**inputs, **options), before)
    real = inputs["attention_mask"].bool()
    after = model.led.encoder(**inputs).last_hidden_state
    torch.testing.assert_close(after[real], states[real], rtol=0, atol=2e-5)


def test_the_model_stays_itself(tmp_path):
    model = longformer()
    before, weights = str(model), {n: p.clone() for n, p in model.state_dict().items()}
    assert patch(model) is model
    assert is_patched(model)
    assert str(model) == before
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert is_patched(twin)
    model.save_pretrained(tmp_path)
    assert not is_patched(type(model).from_pretrained(tmp_path))
    assert patch(model) is model  # twice does no harm
    assert unpatch(model) is model
    assert not is_patched(model)
    inputs = batch(20, 0.1, 4)
    torch.testing.assert_close(model(**inputs)[0], twin(**inputs)[0], rtol=0, atol=2e-5)


def test_a_changed_mask_is_seen():
    """What is remembered of a mask is forgotten when the mask changes."""
    module = patch(longformer()).encoder.layer[0].attention.self
    hidden = torch.randn(1, 16, 24)
    masked, chosen = torch.zeros(1, 16).bool(), torch.zeros(1, 16).bool()

    def call():
        return module(hidden, None, masked, chosen, bool(chosen.any()))[0]

    first = call()
    masked[:, 10:] = True
    assert (call()[:, 10:] == 0).all()
    assert not torch.equal(call()[:, 9], first[:, 9])
    chosen[:, 0] = True
    second = call()
    assert not torch.equal(second[:, 9], first[:, 9])


def test_a_new_mask_is_seen():
    """Also where one that was thrown away stood in memory."""
    stock, fast = (m.encoder.layer[0].attention.self for m in (longformer(), patch(longformer())))
    hidden, masked = torch.randn(1, 16, 24), torch.zeros(1, 16).bool()
    for step in range(200):
        chosen = torch.zeros(1, 16).bool()
        chosen[:, step % 16] = True
        given = hidden, chosen * 1e4, masked, chosen, True
        torch.testing.assert_close(fast(*given)[0], stock(*given)[0], rtol=0, atol=2e-5)
        del chosen, given


def test_inference_mode():
    stock, fast = longformer(), patch(longformer())
    ids = torch.randint(3, 30, (1, 20))
    with torch.inference_mode():
        given = {"input_ids": ids, "attention_mask": (torch.arange(20) < 15).long()[None]}
        ours, theirs = (model(**given).last_hidden_state for model in (fast, stock))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_others_are_refused():
    with pytest.raises(TypeError, match=r"Linear has no Longformer attention.*LED"):
        patch(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="takes a transformers model, got str"):
        patch("allenai/longformer-base-4096")  # pyright: ignore[reportArgumentType]
