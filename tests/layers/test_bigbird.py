"""BigBird: against a mask written out block by block."""

from itertools import combinations
from typing import Any

import pytest
import torch
from layers.family import (
    DIM,
    HEADS,
    causal_layer,
    encoder_layer,
    heads_of,
    joined,
    states,
    written_out,
)

import longspan
from longspan.ops import visibility
from longspan.ops.listed import earlier_random_blocks, random_blocks

pytestmark = pytest.mark.usefixtures("on_device")

SETTING = {"kind": "bigbird", "block": 4, "window": 3, "random": 2, "global_blocks": 1}


def mask(tokens, chosen=()):
    """[heads, tokens, tokens]: who sees whom."""
    blocks = -(-tokens // 4)
    picked = random_blocks(torch.tensor([blocks]), blocks, HEADS, 2, 1, 0)[0].tolist()
    seen = torch.zeros(HEADS, tokens, tokens, dtype=torch.bool)
    for head in range(HEADS):
        for i in range(tokens):
            for j in range(tokens):
                near = abs(i // 4 - j // 4) <= 1
                some = j // 4 in picked[head][i // 4]
                everywhere = min(i, j) < 4 or i in chosen or j in chosen
                seen[head, i, j] = near or some or everywhere
    return seen


@pytest.mark.parametrize("tokens", [3, 30, 45])
@pytest.mark.parametrize("chosen", [(), (2, 21)])
def test_the_mask_written_out(tokens, chosen):
    made, hidden = encoder_layer(SETTING), states(2, tokens)
    chosen = [one for one in chosen if one < tokens]
    global_mask = torch.zeros(2, tokens, dtype=torch.long)
    global_mask[:, chosen] = 1
    seen = visibility(hidden, global_mask=global_mask) if chosen else None
    query, key, value = heads_of(made, hidden)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask(tokens, chosen), -torch.inf).softmax(-1)
    torch.testing.assert_close(made(hidden, seen=seen), joined(weights @ value))


def test_a_layer_that_was_exported_still_runs():
    """Blocks of a call that was traced, and had no numbers, are not remembered."""
    made, hidden = encoder_layer(SETTING), states(2, 37)
    wanted = made(hidden)
    exported = torch.export.export(made, (hidden[:, :30],), strict=False).module()
    torch.testing.assert_close(made(hidden), wanted)
    torch.testing.assert_close(exported(hidden[:, :30]), made(hidden[:, :30]))


def test_layers_draw_different_blocks():
    config = longspan.LongspanConfig(
        vocab_size=30,
        hidden_size=DIM,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        intermediate_size=32,
        attention=SETTING,
    )
    blocks: Any = longspan.LongspanModel(config).layers
    assert [block.attention.number for block in blocks] == [0, 1, 2]
    lists = [block.attention._listed(torch.zeros(1, 100, DIM), None) for block in blocks]
    assert not any(torch.equal(one, other) for one, other in combinations(lists, 2))


@pytest.mark.parametrize("tokens", [3, 16, 45])
@pytest.mark.parametrize("window", [1, 3])
def test_the_causal_mask_written_out(tokens, window):
    made, hidden = causal_layer({**SETTING, "window": window}), states(2, tokens)
    picked = earlier_random_blocks(torch.arange(-(-tokens // 4)), HEADS, 2, window, 0).tolist()
    seen = torch.zeros(HEADS, tokens, tokens, dtype=torch.bool)
    for head in range(HEADS):
        for i in range(tokens):
            for j in range(i + 1):
                near = i // 4 - j // 4 < window
                seen[head, i, j] = near or j < 4 or j // 4 in picked[head][i // 4]
    torch.testing.assert_close(made(hidden).out, written_out(made, hidden, seen))


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_text_shorter_than_its_global_blocks(tokens):
    """Blocks of one token, and more of them global than there are."""
    made, hidden = causal_layer({**SETTING, "block": 1, "global_blocks": 5}), states(2, tokens)
    seen = torch.ones(HEADS, tokens, tokens, dtype=torch.bool).tril()
    torch.testing.assert_close(made(hidden).out, written_out(made, hidden, seen))


def test_layers_of_a_decoder_draw_different_blocks():
    config = longspan.LongspanDecoderConfig(
        vocab_size=30,
        hidden_size=DIM,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        intermediate_size=32,
        attention=SETTING,
    )
    model: Any = longspan.LongspanForCausalLM(config)
    lists = [block.attention.blocks_seen(torch.zeros(1), 0, 25) for block in model.layers]
    assert not any(torch.equal(one, other) for one, other in combinations(lists, 2))


@pytest.mark.parametrize("seed", [2**40, -(2**62)])
@pytest.mark.parametrize("build", [encoder_layer, causal_layer])
def test_seeds_of_any_size(build, seed):
    """Those that are equal in their last 32 bits draw the same."""
    hidden = states(1, 60)
    one, other = (build({**SETTING, "seed": own})(hidden) for own in (seed, 0))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"window": 0}, "window=0 blocks must be at least 1"), ({"random": -1}, "random=-1")],
)
def test_a_wrong_causal_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        causal_layer({**SETTING, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 2}, "window=2 blocks must be an odd number"),
        ({"block": 0}, "block=0 must be at least 1"),
        ({"random": -1}, "random=-1"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        encoder_layer({**SETTING, **change})
