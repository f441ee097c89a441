"""What a config accepts, and how it refuses."""

from typing import Any

import pytest

from longspan import LongspanConfig

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}


def test_one_setting_serves_every_layer():
    config = LongspanConfig(**SIZES, attention={"window": 8})
    assert config.attention == [{"kind": "window", "window": 8}] * 2
    assert LongspanConfig(**SIZES).attention[0]["window"] == 512


def test_layers_differ(tmp_path):
    given = [{"window": 8}, {"window": [4, 0], "dilation": [1, 2, 2], "separate_global": False}]
    config = LongspanConfig(**SIZES, attention=given)
    config.save_pretrained(tmp_path)
    loaded = LongspanConfig.from_pretrained(tmp_path)
    assert loaded.attention == [{"kind": "window", **setting} for setting in given]
    assert loaded.to_dict() == config.to_dict()


def test_rotation_has_a_usual_base():
    config = LongspanConfig(
        **SIZES, position="rotary", attention=[{"window": 8, "rotary": 9.0}, {"window": 8}]
    )
    assert [setting["rotary"] for setting in config.attention] == [9.0, 10_000.0]


def test_longest_document():
    assert LongspanConfig(**SIZES, max_position_embeddings=66).longest == 64
    assert LongspanConfig(**SIZES, position="sinusoidal").longest is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attention": [{"window": 8}]}, ValueError, "1 settings for 2 layers"),
        ({"attention": 512}, TypeError, "or a list of them, got 512"),
        ({"attention": "bp"}, TypeError, r'such as {"kind": "bigbird"}, or .*got .bp'),
        ({"attention": [{"window": 8}, {"window": 7}]}, ValueError, "layer 1: window=7"),
        ({"attention": {"kind": "magic"}}, ValueError, "choose from window"),
        ({"hidden_size": 25}, ValueError, "dim=25 is not divisible by heads=3"),
        ({"position": "astral"}, ValueError, "learned, sinusoidal, rotary"),
        ({"classifier_pooling": "max"}, ValueError, "first, mean"),
        ({"global_preset": "all"}, ValueError, "None, none, first, question, candidates"),
        ({"attention": {"window": 8, "rotary": 100.0}}, ValueError, "go with position='learned'"),
        (
            {"position": "rotary", "attention": {"window": 8, "rotary": None}},
            ValueError,
            "layer 0: rotary=None",
        ),
        ({"max_position_embeddings": 2}, ValueError, "leaves no position"),
        ({"hidden_act": "wobble"}, ValueError, "hidden_act='wobble'"),
        ({"hidden_dropout_prob": 1.5}, ValueError, "hidden_dropout_prob=1.5"),
        ({"vocab_size": 0}, ValueError, "vocab_size=0"),
        ({"max_global_tokens": -1}, ValueError, "max_global_tokens=-1"),
    ],
)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        LongspanConfig(**(SIZES | change))
