"""Random features in fused kernels, beside the same in PyTorch's operations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from longspan.ops import linear
from longspan.ops.features import autograd, triton
from longspan.ops.linear import draw_features, linear_attention
from longspan.ops.window.triton import Tile

pytestmark = pytest.mark.usefixtures("on_device")

# The interpreter's products of bfloat16 are wrong.
HALF = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Also interpreted, where there is no GPU, and in float32."""
    monkeypatch.setattr(linear, "serves", lambda query, key, value: query.dtype != torch.float64)


@pytest.fixture
def small(monkeypatch):
    """Tiles so small that short texts have several, and pieces to be joined."""
    tile = Tile(16, 16, 4, 2)
    for name in ("TILES", "WIDE_TILES"):
        monkeypatch.setattr(triton, name, dict.fromkeys(triton.TILES, tile))


def problem(tokens, head_dim, features, dtype, size=1.0, batch=2) -> list[Any]:
    torch.manual_seed(tokens)
    about = (torch.randn(batch, tokens, 2, head_dim, dtype=torch.float64) for _ in range(4))
    query, key, value, grad = about
    # Values of one mean, as they often are, and a projection that needs no rounding.
    tensors = [size * query, size * key, value + 1.0]
    tensors = [t.to(dtype).requires_grad_() for t in tensors]
    return [*tensors, draw_features(features, head_dim).to(dtype), grad.to(dtype)]


def results(given: list[Any], **how: Any) -> list[torch.Tensor]:
    query, key, value, projection, grad = given
    tensors = [query, key, value]
    out = linear_attention(query, key, value, projection, **how)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def widened(given: list[Any]) -> list[Any]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in given]


@settings(max_examples=7, deadline=None)
@given(
    tokens=st.integers(1, 50),
    head_dim=st.integers(16, 36),
    features=st.integers(1, 50),
    size=st.sampled_from([0.1, 1.0, 3.0]),
    eps=st.sampled_from([0.0, 1e-6, 1e-2]),
    padded=st.booleans(),
)
@pytest.mark.usefixtures("small")
def test_it_is_the_same(tokens, head_dim, features, size, eps, padded):
    tensors = problem(tokens, head_dim, features, torch.float32, size)
    how: dict[str, Any] = {"eps": eps}
    if padded:
        how["valid"] = torch.rand(2, tokens) < 0.7
        how["valid"][:, 0] = True
    found = results(tensors, **how)
    for one, other in zip(found, results(widened(tensors), **how), strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.parametrize(("head_dim", "features"), [(64, 256), (128, 96), (80, 300)])
def test_in_the_tiles_of_every_day(head_dim, features):
    tensors = problem(150, head_dim, features, torch.float32, batch=1)
    for one, other in zip(results(tensors), results(widened(tensors)), strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", [0.3, 1.0, 2.0])
def test_it_is_no_less_precise(dtype, size, monkeypatch):
    """Than the same with everything but inputs and results in float32."""
    tensors = problem(200, 64, 256, dtype, size, batch=1)
    exact, found = results(widened(tensors)), results(tensors)
    monkeypatch.setattr(linear, "serves", lambda *tensors: False)
    for one, other, wanted in zip(found, results(tensors), exact, strict=True):
        off, allowed = ((t.double() - wanted).norm() for t in (one, other))
        assert off <= 2 * allowed


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_rows_without_a_token_are_zero(eps):
    tensors = problem(20, 16, 20, torch.float32)
    valid = torch.tensor([[True], [False]]).expand(2, 20)
    out, *grads = results(tensors, valid=valid, eps=eps)
    for one in (out, *grads):
        assert one.isfinite().all()
        assert one[0].abs().min() > 0
        assert not one[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_large_and_small_inputs_stay_finite(dtype, size, eps):
    for one in results(problem(40, 16, 40, dtype, size, batch=1), eps=eps):
        assert one.isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
def test_large_gradients_of_many_tokens_stay_finite(dtype):
    """float16 ends at 65,504, and the gradients of all tokens are summed up."""
    *tensors, projection, grad = problem(3000, 16, 20, dtype, 0.1, batch=1)
    for one in results([*tensors, projection, 300.0 + grad]):
        assert one.isfinite().all()


@pytest.mark.usefixtures("small")
def test_tensors_may_lie_anywhere():
    *tensors, projection, grad = problem(40, 16, 20, torch.float32)
    stacked = torch.stack(tensors, 2).detach()
    turned = grad.transpose(1, 3).contiguous().transpose(1, 3)
    apart = [t.requires_grad_() for t in stacked.unbind(2)]
    again = results([*apart, projection.mT.contiguous().mT, turned])
    for one, other in zip(again, results([*tensors, projection, grad]), strict=True):
        assert torch.equal(one, other)


def test_a_projection_that_learns_is_served_elsewhere():
    query, key, value, projection, grad = problem(20, 16, 20, torch.float32)
    out = linear_attention(query, key, value, projection.requires_grad_())
    (found,) = torch.autograd.grad(out, projection, grad)
    assert found.abs().min() > 0


@pytest.mark.usefixtures("small")
def test_it_is_a_proper_operator():
    query, key, value, projection, _ = problem(24, 16, 20, torch.float32)
    valid = torch.rand(2, 24) < 0.7
    torch.library.opcheck(autograd.forward_op, (query, key, value, projection, valid, 1e-6))


def test_who_is_served():
    query, key, value, *_ = problem(4, 16, 20, torch.bfloat16)
    assert autograd.serves(query, key, value) == query.is_cuda
    assert not autograd.serves(query.float(), key.float(), value.float())
    assert not autograd.serves(query, key, value.float())
    assert not autograd.serves(query[..., :8], key[..., :8], value[..., :8])
