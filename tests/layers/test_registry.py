"""The parts a model is put together from."""

import pytest
import torch

from longspan.layers.block import Block
from longspan.layers.position import sinusoids, tile_positions
from longspan.layers.registry import build_attention
from longspan.layers.window import WindowAttention
from longspan.ops import visibility


def test_a_setting_becomes_a_layer():
    layer = build_attention(24, 3, 0.1, {"window": [4, 0], "dilation": [1, 2, 2]})
    assert isinstance(layer, WindowAttention)
    assert (layer.window, layer.dilation, layer.dropout) == ((4, 0), (1, 2, 2), 0.1)
    assert layer.causal


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"kind": "telepathy"}, ValueError, "'telepathy' is unknown; choose from window"),
        ({"window": 8, "colour": 1}, TypeError, "colour"),
        ({}, TypeError, "window"),
        ({"window": 7}, ValueError, "window=7 must be even"),
        ({"window": -2}, ValueError, "not negative"),
        ({"window": [1, 2, 3]}, TypeError, r"\(left, right\)"),
        ({"window": 8, "dilation": 0}, ValueError, "at least 1"),
        ({"window": 8, "dilation": [1, 2]}, ValueError, "2 entries for 3 heads"),
    ],
)
def test_a_wrong_setting_is_named(setting, error, message):
    with pytest.raises(error, match=message):
        build_attention(24, 3, 0.0, setting)


def test_tiled_positions_keep_the_reserved_rows():
    table = torch.arange(7.0)[:, None]
    grown = tile_positions(table, 2, 12).flatten().tolist()
    assert grown == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 2, 3]
    with pytest.raises(ValueError, match="only ever added"):
        tile_positions(table, 2, 4)


def test_sinusoids_are_the_well_known_ones():
    found = sinusoids(torch.tensor([0, 3]), 4, torch.float64)
    angles = [3.0, 3.0 / 100.0]
    wanted = [f(torch.tensor(a)) for a in angles for f in (torch.sin, torch.cos)]
    assert found[0].tolist() == [0, 1, 0, 1]
    torch.testing.assert_close(found[1].float(), torch.stack(wanted))
    assert sinusoids(torch.arange(3), 5, torch.float32).shape == (3, 5)


def test_a_block_is_post_norm():
    torch.manual_seed(0)
    block = Block(WindowAttention(24, 3, 8), 24, 32, activation=torch.nn.functional.gelu)
    hidden = torch.randn(2, 20, 24)
    out = block(hidden, visibility(hidden))
    mid = block.attention_norm(hidden + block.project(block.attention(hidden)))
    fed = block.down(torch.nn.functional.gelu(block.up(mid)))
    torch.testing.assert_close(out, block.feed_forward_norm(mid + fed))
