"""One product for a projection and its activation: as exact as torch's own, and no surprise."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, relu
from transformers.activations import ACT2FN

from longspan.layers import dense, window
from longspan.layers.block import Block
from longspan.layers.dense import in_pieces, one_product, prepared, project
from longspan.layers.window import WindowAttention
from longspan.ops import visibility

needs_onednn = pytest.mark.skipif(not dense.has_onednn(), reason="no oneDNN with AVX-512 here")


@pytest.fixture(params=["onednn", "mkl", "mkl, no bf16"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the ways to multiply, whoever made this CPU."""
    mkl = request.param != "onednn"
    if mkl and not dense.has_onednn():
        pytest.skip("no AVX-512 here")
    if mkl and not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")):
        pytest.skip("this torch has no MKL, or not its operators")
    monkeypatch.setattr(dense, "has_mkl", lambda: mkl)
    monkeypatch.setattr(dense, "has_bf16_products", lambda: request.param == "mkl")
    return request.param


def layer_and_input(dtype: torch.dtype, *, bias: bool = True) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(72, 136, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(4)  # so that the activation is tried on both of its sides
    return layer.to(dtype), torch.randn(3, 50, 72).to(dtype)


@needs_onednn
@pytest.mark.usefixtures("way")
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


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2048, 2100])
@torch.no_grad()
def test_pieces_and_weights_laid_out(
    tokens: int, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of one size, the last one shorter or not; weights in any order, changed in between."""
    torch.manual_seed(0)
    layer = nn.Linear(72, 136, dtype=dtype)
    layer.weight = nn.Parameter(torch.randn(72, 136, dtype=dtype).t() / 4)
    x = torch.randn(72, tokens, dtype=dtype).t()
    used = []
    for name in ("_by_mkl", "_by_onednn"):
        build = getattr(dense, name)
        spy = lambda *a, build=build, name=name, **b: used.append((name, b)) or build(*a, **b)  # noqa: E731
        monkeypatch.setattr(dense, name, spy)
    for _ in range(2):
        exact = gelu(layer.double()(x.double()))
        layer.to(dtype)
        apply = prepared(layer, x, in_pieces=True)
        ours = in_pieces(lambda some, apply=apply: apply(some, gelu), x)
        assert ours.dtype == dtype
        error = (ours - exact).abs().max()
        assert error <= 2 * (gelu(layer(x)) - exact).abs().max()
        layer.weight.data.mul_(-0.5)
    by_mkl = way == "mkl, no bf16" or (way == "mkl" and dtype == torch.float32)
    assert used == [("_by_mkl" if by_mkl else "_by_onednn", {"laid_out": True})] * 2


@torch.no_grad()
def test_in_pieces_of_several_tensors() -> None:
    x, y = torch.randn(2, 1100, 3), torch.randn(2, 1100, 3)
    sizes = []

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sizes.append(len(a))
        return torch.cat([a - b, a], dim=-1)

    made = in_pieces(function, x, y)
    torch.testing.assert_close(made, torch.cat([x - y, x], dim=-1), rtol=0, atol=0)
    assert sizes == [512, 512, 512, 512, 152]


@torch.no_grad()
def test_rounded_as_elsewhere_all_tokens_are_one_product() -> None:
    torch.manual_seed(0)
    attention = WindowAttention(128, 2, 8, backend="chunks")
    block = Block(attention, 128, 512, activation=gelu).eval()
    hidden = torch.randn(2, 1040, 128)
    seen = visibility(hidden)
    with torch.no_grad():
        found = block(hidden, seen)
    assert torch.equal(found, block(hidden, seen))


def test_who_watches_a_block_sees_all_tokens_at_once() -> None:
    block = Block(WindowAttention(24, 3, 16), 24, 40, activation=gelu).eval()
    hidden = torch.randn(1, 700, 24)
    shapes = []
    block.attention_norm.register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    block(hidden, visibility(hidden))
    assert shapes == [hidden.shape]


@torch.no_grad()
def test_what_looks_along_the_tokens_is_given_all_of_them() -> None:
    """Parts that somebody has replaced, or whose call somebody has replaced."""
    block: Any = Block(WindowAttention(24, 3, 16), 24, 40, activation=gelu).eval()
    hidden = torch.randn(1, 700, 24)
    seen = visibility(hidden)
    seen_by: list[torch.Size] = []

    class Adapter(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen_by.append(x.shape)
            return self.inner(x) + x.mean(dim=1, keepdim=True)

    plain = block(hidden, seen)
    block.project = Adapter(block.project)
    adapted = block(hidden, seen)
    assert seen_by == [hidden.shape]
    assert not torch.equal(adapted, plain)
    block.project = block.project.inner
    inner = block.up.forward
    block.up.forward = lambda x: seen_by.append(x.shape) or inner(x)
    torch.testing.assert_close(block(hidden, seen), plain, rtol=1e-4, atol=1e-5)
    assert seen_by == [hidden.shape, hidden.shape]


@torch.no_grad()
def test_what_a_watcher_of_a_block_keeps_stays_as_it_was() -> None:
    """Though residuals are added in place where nobody watches."""
    block = Block(WindowAttention(24, 3, 16), 24, 40, activation=gelu).eval()
    hidden = torch.randn(1, 700, 24)
    seen = []
    block.dropout.register_forward_hook(lambda _, __, out: seen.append((out, out.clone())))
    block(hidden, visibility(hidden))
    assert len(seen) == 2
    assert all(torch.equal(out, then) for out, then in seen)


@torch.no_grad()
def test_other_activations_are_applied() -> None:
    layer, x = layer_and_input(torch.float32)
    torch.testing.assert_close(project(layer, x, relu), relu(layer(x)), rtol=0, atol=0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_block_without_gradients_is_the_same_block(gated: bool, norm_first: bool) -> None:
    """There all behind the attention takes some tokens at a time."""
    torch.manual_seed(0)
    block = Block(
        WindowAttention(24, 3, 16), 24, 40, activation=gelu, gated=gated, norm_first=norm_first
    ).eval()
    hidden = torch.randn(2, 700, 24)
    given, seen = hidden.clone(), visibility(hidden)
    with torch.no_grad():
        ours = block(hidden, seen)
    assert torch.equal(hidden, given)
    whole = block(hidden, seen)
    exact = block.double()(hidden.double(), seen)
    assert ours.shape == hidden.shape
    assert (ours - exact).abs().max() <= 2 * (whole - exact).abs().max()


@needs_onednn
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rotary", [None, 10_000.0])
@pytest.mark.parametrize("tokens", [90, 2100])
@torch.no_grad()
def test_a_few_heads_at_a_time(
    tokens: int, rotary: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five heads two, two and one, with all that differs from head to head."""
    torch.manual_seed(0)
    layer = WindowAttention(40, 5, 16, dilation=(1, 2, 1, 3, 4), rotary=rotary).eval()
    hidden = torch.randn(2, tokens, 40)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, -30:] = False
    is_global = torch.zeros_like(mask)
    is_global[:, [0, 7]] = True
    whole = layer(hidden, mask, is_global)
    monkeypatch.setattr(window, "_BYTES", 3 * hidden.nbytes // 2)
    calls = []
    attend = window.window_attention
    monkeypatch.setattr(
        window, "window_attention", lambda *a, **b: calls.append(b["dilation"]) or attend(*a, **b)
    )
    torch.testing.assert_close(layer(hidden, mask, is_global), whole)
    assert calls == [(1, 2), (1, 3), (4,)]
