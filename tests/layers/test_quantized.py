"""int8 weights: what they stand for, what the products of integers give, and who is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from longspan.layers import quantized
from longspan.layers.quantized import QuantizedLinear, has_int8_products, quantize_layers

needs_int8 = pytest.mark.skipif(not has_int8_products(), reason="this CPU multiplies no int8")


def made(bias: bool = True) -> tuple[nn.Linear, QuantizedLinear]:
    torch.manual_seed(0)
    layer = nn.Linear(72, 136, bias=bias).eval()
    return layer, QuantizedLinear.of(layer)


def test_codes_are_the_nearest() -> None:
    layer, ours = made()
    assert ours.codes.dtype == torch.int8
    step = layer.weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((ours.weight - layer.weight).abs() <= 0.5001 * step).all()
    assert (ours.codes.abs().amax(dim=1) == 127).all()


@needs_int8
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(72,), (1, 72), (2, 700, 72), (0, 72)])
@torch.no_grad()
def test_products_of_integers(bias: bool, shape: tuple[int, ...]) -> None:
    """Equal to the same rounding written out in float64, but for float32's own."""
    _, ours = made(bias)
    x = torch.randn(shape) * 10 ** torch.randn(*shape[:-1], 1)
    step = x.double().abs().amax(dim=-1, keepdim=True) / 127
    # In float32, as the layer rounds: a tie must fall to the same side.
    codes = (x / (x.abs().amax(dim=-1, keepdim=True) / 127)).round().double()
    exact = linear(codes, ours.codes.double()) * step * ours.scale.double()
    exact = exact if ours.bias is None else exact + ours.bias.double()
    out = ours(x)
    assert out.dtype == torch.float32
    assert out.shape == (*shape[:-1], 136)
    largest = exact.abs().amax(dim=-1, keepdim=True)
    assert ((out.double() - exact).abs() <= 1e-6 * largest).all()


@torch.no_grad()
def test_near_the_layer_it_was_made_of() -> None:
    layer, ours = made()
    x = torch.randn(3, 50, 72)
    wanted = layer(x)
    assert (ours(x) - wanted).norm() < 0.02 * wanted.norm()
    assert (ours(x.bfloat16()).float() - wanted).norm() < 0.03 * wanted.norm()
    assert ours(x.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_elsewhere_weights_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = made()
    x = torch.randn(3, 72)
    monkeypatch.setattr(quantized, "has_int8_products", lambda: False)
    torch.testing.assert_close(ours(x), linear(x, ours.weight, ours.bias))


@needs_int8
@torch.no_grad()
def test_rows_of_zeros_and_what_is_not_finite() -> None:
    _, ours = made()
    x = torch.randn(4, 72)
    x[1] = 0
    x[2, 5] = torch.nan
    out = ours(x)
    torch.testing.assert_close(out[1], ours.bias)
    assert not out[2].isfinite().any()
    assert out[[0, 3]].isfinite().all()


@torch.no_grad()
def test_new_codes_are_noticed() -> None:
    """A copy, and weights loaded into a layer that has been used."""
    (_, first), x = made(), torch.randn(3, 72)
    before = first(x)
    other = QuantizedLinear.of(nn.Linear(72, 136).eval())
    twin = copy.deepcopy(first)
    first.load_state_dict(other.state_dict())
    assert torch.equal(first(x), other(x))
    assert torch.equal(twin(x), before)


def test_what_int8_cannot_do_is_refused() -> None:
    _, ours = made()
    with pytest.raises(ValueError, match="for inference"):
        ours(torch.randn(3, 72, requires_grad=True))
    with pytest.raises(ValueError, match=r"use model\.eval"):
        ours.train()(torch.randn(3, 72))
    with pytest.raises(ValueError, match="run on a CPU, not on cuda"):
        quantized.refuse_use(False, torch.device("cuda"))


def test_only_plain_linear_layers_are_replaced() -> None:
    class Special(nn.Linear): ...

    parent = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Special(4, 4), nn.LayerNorm(4)))
    quantize_layers(parent)
    assert isinstance(parent[0], QuantizedLinear)
    assert isinstance(parent[1][0], Special)  # pyright: ignore[reportIndexIssue]
