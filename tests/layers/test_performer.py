"""Performer's random vectors: kept, drawn anew, or new in every call."""

from itertools import pairwise

import pytest
import torch
from layers.family import causal_layer, encoder_layer, states

from longspan.layers.observing import refresh

pytestmark = pytest.mark.usefixtures("on_device")

SETTING = {"kind": "performer", "features": 20}


@torch.no_grad()
def test_vectors_stay_until_they_are_redrawn():
    made, hidden = encoder_layer(SETTING), states(1, 20)
    out = made(hidden)
    assert torch.equal(made.train()(hidden), out)
    made.features.redraw(torch.Generator().manual_seed(1))
    other = made(hidden)
    assert not torch.equal(other, out)
    made.features.redraw(torch.Generator().manual_seed(1))
    assert torch.equal(made(hidden), other)


@torch.no_grad()
def test_fresh_vectors_are_new_in_every_call_of_training_alone():
    made, hidden = encoder_layer({**SETTING, "fresh": True}), states(1, 20)
    before = made.features.projection.clone()
    assert torch.equal(made(hidden), made(hidden))
    made.train()
    torch.manual_seed(3)
    first, second = made(hidden), made(hidden)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(made(hidden), first)
    assert torch.equal(made.features.projection, before)


def test_vectors_are_redrawn_after_so_many_steps():
    """By `refresh` alone, which stands between steps, never by a call."""
    made = encoder_layer({**SETTING, "redraw": 3}).train()
    seen = []
    for _ in range(9):
        made(states(1, 5))
        refresh(made)
        seen.append(made.features.projection.clone())
    changed = [not torch.equal(one, two) for one, two in pairwise(seen)]
    assert changed == [False, True, False, False, True, False, False, True]
    assert int(made.features.steps) == 9
    refresh(plain := encoder_layer(SETTING).train())
    assert "features.steps" not in plain.state_dict()


@pytest.mark.parametrize("changing", [{"fresh": True}, {"redraw": 7}])
def test_vectors_that_change_and_a_state_do_not_go_together(changing):
    made = causal_layer({**SETTING, **changing}).train()
    with pytest.raises(ValueError, match="train without state, or with fresh=False, redraw=0"):
        made(states(1, 5), keep_state=True)
    made(states(1, 5))
    made.eval()(states(1, 5), keep_state=True)


def test_the_state_does_not_grow():
    made = causal_layer(SETTING)
    sizes = [made(states(1, n), keep_state=True).state.sums.shape for n in (1, 300)]
    assert sizes[0] == sizes[1] == (1, 3, 20, 9)


def test_dropout_falls_on_the_output():
    torch.manual_seed(0)
    made = encoder_layer({**SETTING, "dropout": 0.5}).train()
    out = made(states(1, 400))
    assert 0.4 < float((out == 0).double().mean()) < 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": 0}, "features=0 must be at least 1"),
        ({"redraw": -1}, "redraw=-1 must be a number of steps"),
        ({"redraw": 5, "fresh": True}, "redraw=5 must be .* 0 for never, as with fresh=True"),
        ({"kernel": "tanh"}, "kernel='tanh' is unknown; choose from softmax, relu, elu"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    for build in (encoder_layer, causal_layer):
        with pytest.raises(ValueError, match=message):
            build({**SETTING, **change})


@pytest.mark.parametrize("eps", [-1.0, float("nan")])
def test_what_is_added_to_features_is_not_negative(eps):
    with pytest.raises(ValueError, match=f"eps={eps} must not be negative"):
        encoder_layer({**SETTING, "eps": eps})


def test_positions_are_rotary_or_none():
    with pytest.raises(ValueError, match="position='relative': choose from rotary, none"):
        causal_layer({**SETTING, "position": "relative"})
