"""One product for a projection and its activation: as exact as torch's own, and no surprise."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, relu
from transformers.activations import ACT2FN

from longspan.layers import dense
from longspan.layers.block import Block
from longspan.layers.dense import one_product, project
from longspan.layers.window import WindowAttention
from longspan.ops import visibility

needs_onednn = pytest.mark.skipif(not dense.has_onednn(), reason="no oneDNN with AVX-512 here")


def layer_and_input(dtype: torch.dtype, *, bias: bool = True) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(72, 136, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(4)  # so that the activation is tried on both of its sides
    return layer.to(dtype), torch.randn(3, 50, 72).to(dtype)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, gelu, ACT2FN["gelu"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_within_the_error_budget(dtype: torch.dtype, activation: Any, bias: bool) -> None:
    layer, x = layer_and_input(dtype, bias=bias)
    assert one_product(layer, x)
    act = (lambda y: y) if activation is None else activation
    exact = torch.nn.functional.linear(
        x.double(), layer.weight.double(), layer.bias.double() if bias else None
    )
    exact = act(exact)
    ours = (project(layer, x, activation).double() - exact).abs().max()
    plain = (act(layer(x)).double() - exact).abs().max()
    assert ours <= 2 * plain


@needs_onednn
def test_who_notices_gets_the_layer_itself() -> None:
    layer, x = layer_and_input(torch.float32)
    assert not one_product(layer, x)  # gradients are wanted
    with torch.no_grad():
        assert one_product(layer, x)
        assert not one_product(layer, x.double())
        assert not one_product(layer, x[:0])
        assert not one_product(nn.utils.parametrizations.weight_norm(nn.Linear(72, 8)), x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not one_product(layer, x)
        with torch.backends.mkldnn.flags(enabled=False):
            assert not one_product(layer, x)
        seen = []
        layer.register_forward_hook(lambda *arguments: seen.append(1))
        project(layer, x)
        assert seen == [1]


@torch.no_grad()
def test_other_activations_are_applied() -> None:
    layer, x = layer_and_input(torch.float32)
    torch.testing.assert_close(project(layer, x, relu), relu(layer(x)), rtol=0, atol=0)


@pytest.mark.parametrize("gated", [False, True])
def test_a_block_without_gradients_is_the_same_block(gated: bool) -> None:
    """There the feed-forward part takes some tokens at a time."""
    torch.manual_seed(0)
    block = Block(WindowAttention(24, 3, 16), 24, 40, activation=gelu, gated=gated).eval()
    hidden = torch.randn(2, 700, 24)
    seen = visibility(hidden)
    with torch.no_grad():
        ours = block(hidden, seen)
    whole = block(hidden, seen)
    exact = block.double()(hidden.double(), seen)
    assert ours.shape == hidden.shape
    assert (ours - exact).abs().max() <= 2 * (whole - exact).abs().max()
