"""Adaptive span: against its formula, and spans that learn."""

import pytest
import torch
from layers.family import DIM, HEADS, causal_layer, joined, states

import longspan
from longspan.layers.observing import refresh
from longspan.layers.position import rotate

pytestmark = pytest.mark.usefixtures("on_device")

SETTING = {"kind": "adaptive_span", "longest": 12, "ramp": 4}


def layer(shares):
    made = causal_layer(SETTING)
    with torch.no_grad():
        made.share.copy_(torch.tensor(shares))
    return made


def dense(made, hidden):
    tokens = hidden.shape[1]
    query, key, value = made.qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)
    query, key = rotate(query, key, position=torch.arange(tokens).double()[None], base=10000.0)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    place = torch.arange(tokens)
    distance = place[:, None] - place
    span = made.share.clamp(0, 1)[:, None, None] * 12
    mask = ((4 + span - distance) / 4).clamp(0, 1) * (distance >= 0) * (distance <= 12)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).exp() * mask
    return joined(weights / weights.sum(-1, keepdim=True) @ value)


@pytest.mark.parametrize("shares", [[0.0, 0.0, 0.0], [0.1, 0.55, 1.0], [-0.3, 0.2, 0.2]])
@pytest.mark.parametrize("tokens", [1, 9, 600])
def test_the_formula_and_its_gradient(shares, tokens):
    made, hidden = layer(shares), states(1, tokens)
    found, wanted = made(hidden).out, dense(made, hidden)
    torch.testing.assert_close(found, wanted)
    inside = [head for head, share in enumerate(shares) if 0 < share < 1]
    out = torch.randn_like(found)
    (one,) = torch.autograd.grad(found, made.share, out)
    (other,) = torch.autograd.grad(wanted, made.share, out)
    torch.testing.assert_close(one[inside], other[inside])


def test_only_what_a_span_reaches_is_computed():
    assert layer([0.0, 0.1, 0.25]).cpu().reach == 3 + 4 - 1
    assert layer([0.0, 0.0, 0.0]).cpu().reach == 3
    assert layer([0.0, 0.0, 1.0]).cpu().reach == 12


def test_spans_pay_in_training_alone():
    made = layer([0.0, 0.5, 1.0])
    assert made(states(1, 9)).loss is None
    loss = made.train()(states(1, 9)).loss
    assert loss.item() == pytest.approx(4e-3 * 0.5)
    loss.backward()
    assert bool((made.share.grad > 0).all())


def test_a_span_that_only_cost_grows_again_at_once():
    """Steps take it no further than to the ends of its range."""
    made = layer([0.1, 0.5, 0.9]).train()
    optimizer = torch.optim.SGD([made.share], lr=1.0)
    for slope in (1.0, 1.0, 1.0, -0.2):
        optimizer.zero_grad()
        (slope * made.spans().sum() / made.longest).backward()
        optimizer.step()
        refresh(made)
    torch.testing.assert_close(made.share.detach(), torch.full((HEADS,), 0.2).to(made.share))


def test_a_model_pays_for_its_spans():
    torch.manual_seed(0)
    config = longspan.LongspanDecoderConfig(
        vocab_size=30,
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=32,
        attention={**SETTING, "start": 0.5, "cost": 1.0},
    )
    ids = torch.randint(0, 30, (1, 9))
    done = longspan.LongspanForCausalLM(config)(ids, labels=ids)
    assert float(done.auxiliary_loss) == pytest.approx(2 * 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"longest": -1}, "longest=-1"), ({"ramp": 0}, "ramp=0"), ({"start": 2.0}, "start=2.0")],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        causal_layer({**SETTING, **change})
