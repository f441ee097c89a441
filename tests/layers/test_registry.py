"""The parts a model is put together from."""

import pytest
import torch

from longspan.layers.base import AttentionLayer
from longspan.layers.block import Block
from longspan.layers.position import rotate, rotate_from, sinusoids, tile_positions
from longspan.layers.registry import build_attention
from longspan.layers.window import WindowAttention
from longspan.ops import visibility


def test_a_setting_becomes_a_layer():
    layer = build_attention(24, 3, {"window": [4, 0], "dilation": [1, 2, 2]}, dropout=0.1)
    assert isinstance(layer, WindowAttention)
    assert (layer.window, layer.dilation, layer.dropout) == ((4, 0), (1, 2, 2), 0.1)
    assert layer.causal


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"kind": "telepathy"}, ValueError, "'telepathy' is unknown; choose from window"),
        ({"window": 8, "colour": 1}, ValueError, "has no option 'colour'; there are window"),
        ({"window": 8, "dilaton": 2}, ValueError, "did you mean dilation"),
        ({}, ValueError, "'window' needs window"),
        ({"kind": "linformer"}, ValueError, "needs length and rank"),
        ({"kind": "refomer"}, ValueError, "did you mean reformer"),
        ({"window": 7}, ValueError, "window=7 must be even"),
        ({"window": -2}, ValueError, "not negative"),
        ({"window": [1, 2, 3]}, TypeError, r"\(left, right\)"),
        ({"window": 8, "dilation": 0}, ValueError, "at least 1"),
        ({"window": 8, "dilation": [1, 2]}, ValueError, "2 entries for 3 heads"),
        ({"window": 8, "rotary": -1.0}, ValueError, "rotary=-1.0 must be above 0"),
        ({"window": 8, "rotary": 1e4, "separate_global": True}, ValueError, "leave it out"),
        ({"window": 8, "global_tokens": False, "separate_global": True}, ValueError, "leave it"),
    ],
)
def test_a_wrong_setting_is_named(setting, error, message):
    with pytest.raises(error, match=message):
        build_attention(24, 3, setting)


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


def test_a_block_with_norms_in_front():
    torch.manual_seed(0)
    for first in (True, False):
        block = Block(
            WindowAttention(24, 3, 8, bias=False),
            24,
            32,
            activation=torch.nn.functional.gelu,
            norm_first=True,
            normed=first,
            gated=True,
            bias=False,
        )
        assert not any(name.endswith("bias") for name, _ in block.named_parameters())
        hidden = torch.randn(2, 20, 24)
        out = block(hidden, visibility(hidden))
        taken = hidden if first else torch.nn.functional.layer_norm(hidden, (24,), eps=1e-12)
        mid = hidden + block.project(block.attention(taken))
        inner, gate = block.up(block.feed_forward_norm(mid)).split(32, dim=-1)
        fed = block.down(torch.nn.functional.gelu(inner) * gate)
        torch.testing.assert_close(out, mid + fed)


def test_turned_scores_depend_on_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 9, 3, 8, dtype=torch.float64)
    scores = []
    for start in (0, 1000):
        position = torch.arange(9)[None] + start
        q, k = rotate(query, key, position=position, base=100.0)
        assert not torch.allclose(q[:, 1:], query[:, 1:])
        torch.testing.assert_close(q.norm(dim=-1), query.norm(dim=-1), rtol=1e-6, atol=1e-6)
        scores.append(torch.einsum("bihd,bjhd->bhij", q, k))
    torch.testing.assert_close(*scores, rtol=0, atol=1e-3)


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tokens_in_a_row_are_turned_as_complex_numbers(first, dtype):
    """And their gradients are turned back."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 9, 3, 8, dtype=torch.float64).to(dtype).unbind()
    query.requires_grad_()
    angle = (torch.arange(9).double() + first)[:, None] / 100.0 ** (torch.arange(4).double() / 4)

    def exact(states, angle):
        pairs = states.detach().double().unflatten(-1, (2, 4)).transpose(-1, -2).contiguous()
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        made = torch.view_as_real(torch.view_as_complex(pairs) * turn)
        return made.transpose(-1, -2).flatten(-2).to(dtype)

    q, k = rotate_from(first, query, key, base=100.0)
    torch.testing.assert_close(q, exact(query, angle))
    torch.testing.assert_close(k, exact(key, angle))
    assert not k.requires_grad
    (back,) = torch.autograd.grad(q, query, key)
    torch.testing.assert_close(back, exact(key, -angle))


def test_rotation_starts_over_in_every_document():
    torch.manual_seed(0)
    layer = WindowAttention(24, 3, 8, rotary=100.0)
    hidden = torch.randn(1, 30, 24)
    packed = layer(hidden, cu_seqlens=torch.tensor([0, 12, 30]))
    apart = torch.cat([layer(hidden[:, :12]), layer(hidden[:, 12:])], dim=1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-5)


def test_a_layer_may_know_of_no_global_tokens():
    torch.manual_seed(0)
    layer = WindowAttention(24, 3, 8, global_tokens=False)
    hidden, chosen = torch.randn(1, 40, 24), torch.zeros(1, 40).long()
    chosen[:, 0] = 1
    assert torch.equal(layer(hidden, None, chosen), layer(hidden))
    assert layer.qkv_global is None


def test_a_layer_without_a_map_says_so():
    hidden = torch.zeros(1, 2, 4)
    with pytest.raises(NotImplementedError, match="without output_attentions"):
        AttentionLayer().map(hidden, seen=visibility(hidden))
