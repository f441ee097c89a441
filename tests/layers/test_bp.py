"""The layers of BP-Transformer around their op."""

import pytest
import torch
from layers.family import HEADS, causal_layer, encoder_layer, heads_of, joined, states

pytestmark = pytest.mark.usefixtures("on_device")


def test_with_everything_near_a_layer_is_dense():
    made, hidden = encoder_layer({"kind": "bp", "near": 40}), states(2, 33)
    query, key, value = heads_of(made, hidden)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    torch.testing.assert_close(made(hidden), joined(weights @ value))


def test_a_state_grows_with_the_logarithm():
    made, hidden = causal_layer({"kind": "bp", "near": 2}), states(1, 600)
    sizes = []
    for tokens in (150, 300, 600):
        sizes.append(made(hidden[:, :tokens], keep_state=True).state.both.shape[1])
    assert sizes[2] - sizes[1] <= 8
    assert sizes[2] < 600 / HEADS / 3


@pytest.mark.parametrize(
    ("near", "why"), [(0, " must be a whole number"), (True, ": expected int"), (1.5, ": expected")]
)
def test_a_wrong_setting_is_named(near, why):
    for make in (encoder_layer, causal_layer):
        with pytest.raises(ValueError, match=f"near={near!r}{why}"):
            make({"kind": "bp", "near": near})
