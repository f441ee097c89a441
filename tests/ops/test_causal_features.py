"""Random features in fused kernels where tokens see those before them, beside the same in PyTorch's
operations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers.family import compiles_anywhere

pytest.importorskip("triton", reason="Triton is not installed")

from longspan.ops import linear
from longspan.ops.features import causal
from longspan.ops.linear import (
    Sums,
    causal_linear_attention,
    draw_features,
    linear_attention,
    softmax_exponents,
)

pytestmark = pytest.mark.usefixtures("on_device")

# The interpreter's products of bfloat16 are wrong.
HALF = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Also interpreted, where there is no GPU, and in float32."""
    monkeypatch.setattr(linear, "serves", lambda query, key, value: query.dtype != torch.float64)


@pytest.fixture
def small(monkeypatch):
    """Chunks so small that short texts have several, pieces of several, and one pair at a time."""
    monkeypatch.setattr(causal, "_WIDE_TILES", causal.Tiles(16, 32, 16, 4, 1))
    monkeypatch.setattr(causal, "_PROGRAMS", 24)
    monkeypatch.setattr(causal, "AT_A_TIME", 1)


def problem(tokens, head_dim, features, dtype, size=1.0, batch=2) -> list[Any]:
    torch.manual_seed(tokens)
    about = (torch.randn(batch, tokens, 2, head_dim, dtype=torch.float64) for _ in range(4))
    query, key, value, grad = about
    # Values of one mean, as they often are, and a projection that needs no rounding.
    tensors = [size * query, size * key, value + 1.0]
    tensors = [t.to(dtype).requires_grad_() for t in tensors]
    return [*tensors, draw_features(features, head_dim).to(dtype), grad.to(dtype)]


def results(given: list[Any], before: Sums | None = None) -> list[torch.Tensor]:
    query, key, value, projection, grad = given
    tensors = [query, key, value]
    out, after = causal_linear_attention(query, key, value, projection, before=before)
    logs = after.sums.double().log() + after.reference.double()[..., None, None]
    return [out, *torch.autograd.grad(out, tensors, grad), logs[..., -1]]


def widened(given: list[Any]) -> list[Any]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in given]


def agree(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5 * scale)


@settings(max_examples=7, deadline=None)
@given(
    tokens=st.integers(1, 70),
    head_dim=st.integers(16, 36),
    features=st.integers(1, 50),
    size=st.sampled_from([0.1, 1.0, 3.0]),
)
@pytest.mark.usefixtures("small")
def test_it_is_the_same(tokens, head_dim, features, size):
    tensors = problem(tokens, head_dim, features, torch.float32, size)
    agree(results(tensors), results(widened(tensors)))


@pytest.mark.parametrize(("head_dim", "features"), [(64, 256), (128, 96), (80, 300)])
def test_in_the_tiles_of_every_day(head_dim, features):
    tensors = problem(150, head_dim, features, torch.float32, batch=1)
    agree(results(tensors), results(widened(tensors)))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("size", "head_dim", "features"),
    [(0.3, 64, 256), (1.0, 64, 256), (2.0, 64, 256), (1.0, 128, 96), (1.0, 96, 200)],
)
def test_it_is_no_less_precise(dtype, size, head_dim, features, monkeypatch):
    """Than the same with everything but inputs and results in float32."""
    tensors = problem(300, head_dim, features, dtype, size, batch=1)
    exact, found = results(widened(tensors)), results(tensors)
    monkeypatch.setattr(linear, "serves", lambda *tensors: False)
    plain = results(tensors)
    for one, other, wanted in zip(found[:4], plain[:4], exact[:4], strict=True):
        off, allowed = ((t.double() - wanted).norm() for t in (one, other))
        assert off <= 2 * allowed


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "features"), [(64, 256), (128, 256), (96, 200), (16, 40)])
def test_every_run_gives_the_same_bits(head_dim, features, dtype):
    """Of a text in many pieces, which threads put together in place."""
    tensors = problem(3000, head_dim, features, dtype, batch=1)
    first = results(tensors)
    for _ in range(10):
        for one, other in zip(results(tensors), first, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_unlike_features_do_not_vanish(dtype):
    """The largest features of a query and of a key are others where both are long. Against all n x
    n, in logarithms: PyTorch's operations lose rows here."""
    query, key, value, projection, grad = problem(150, 64, 256, dtype, 6.0, batch=1)
    found = results([query, key, value, projection, grad])
    given = query, key, value, wide, gradient = widened([query, key, value, projection, grad])
    of_query, of_key = (softmax_exponents(t.transpose(1, 2), wide) for t in (query, key))
    logs = (of_query[:, :, :, None] + of_key[:, :, None]).logsumexp(-1)
    logs = logs.masked_fill(torch.ones(150, 150).triu(1).bool(), -torch.inf)
    out = (logs.softmax(-1) @ value.transpose(1, 2)).transpose(1, 2)
    wanted = [out, *torch.autograd.grad(out, given[:3], gradient)]
    eps = torch.finfo(dtype).eps + 1e-5
    for one, other in zip(found[:4], wanted, strict=True):
        assert (one.double() - other).norm() < 4 * eps * other.norm()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("first", [1, 16, 41])
def test_it_goes_on_where_it_ended(first):
    *tensors, projection, grad = problem(60, 16, 40, torch.float32)
    wanted = results(widened([*tensors, projection, grad]))
    early, late = (
        [t[:, own].detach().requires_grad_() for t in tensors]
        for own in (slice(0, first), slice(first, None))
    )
    _, before = causal_linear_attention(*early, projection=projection)
    assert before.sums.dtype == before.reference.dtype == torch.float32
    found = results([*late, projection, grad[:, first:]], before)
    # Gradients of what comes later are whole; those of what was before are not asked for.
    agree(found, [*(t[:, first:] for t in wanted[:4]), wanted[4]])


@pytest.mark.usefixtures("small")
def test_sums_of_pytorch_s_operations_are_gone_on_with(monkeypatch):
    *tensors, projection, _ = problem(60, 16, 40, torch.float32)
    tensors = [t.detach() for t in tensors]
    whole, _ = causal_linear_attention(*tensors, projection=projection)
    early, late = ([t[:, own] for t in tensors] for own in (slice(0, 30), slice(30, None)))
    with monkeypatch.context() as patch:
        patch.setattr(linear, "serves", lambda *tensors: False)
        _, before = causal_linear_attention(*early, projection=projection)
    out, after = causal_linear_attention(*late, projection=projection, before=before)
    torch.testing.assert_close(out, whole[:, 30:], rtol=1e-4, atol=1e-5)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "serves", lambda *tensors: False)
        nothing = [t[:, :1] for t in tensors]
        torch.testing.assert_close(
            causal_linear_attention(*nothing, projection=projection, before=after)[0],
            causal_linear_attention(*nothing, projection=projection, before=Sums(*after))[0],
        )


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_what_comes_later_changes_no_bit(dtype):
    """Not even by the exponents that features are relative to, within a chunk or beyond."""
    query, key, value, projection, _ = problem(200, 16, 40, dtype, batch=1)
    out, _ = causal_linear_attention(query, key, value, projection)
    for token in (1, 70, 199):
        others = []
        for tensor, size in ((query, 3.0), (key, 20.0), (value, 100.0)):
            other = tensor.detach().clone()
            other[:, token:] = size * torch.randn_like(other[:, token:])
            others.append(other)
        again, _ = causal_linear_attention(*others, projection=projection)
        assert torch.equal(out[:, :token], again[:, :token])
        assert not torch.equal(out[:, token:], again[:, token:])


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
def test_large_and_small_inputs_stay_finite(dtype, size):
    tensors = problem(100, 16, 40, dtype, size, batch=1)
    found = results(tensors)
    for one in found[:4]:
        assert one.isfinite().all()
    if size < 30.0:  # else features of a query and a key can be so unlike that nothing is left
        torch.testing.assert_close(found[0][:, 0], tensors[2][:, 0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", HALF)
def test_large_gradients_of_many_tokens_stay_finite(dtype):
    """float16 ends at 65,504, and the gradients of all later tokens are summed up."""
    *tensors, projection, grad = problem(3000, 16, 20, dtype, 0.1, batch=1)
    for one in results([*tensors, projection, 10.0 + grad]):
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


def test_no_tokens():
    query, key, value, projection, _ = problem(3, 16, 20, torch.float32)
    _, before = causal_linear_attention(query, key, value, projection)
    none = [t[:, :0] for t in (query, key, value)]
    out, after = causal_linear_attention(*none, projection=projection, before=before)
    assert out.shape == (2, 0, 2, 16)
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other)
    _, nothing = causal_linear_attention(*none, projection=projection)
    again, _ = causal_linear_attention(query, key, value, projection, before=nothing)
    torch.testing.assert_close(again, causal_linear_attention(query, key, value, projection)[0])


@compiles_anywhere
@pytest.mark.usefixtures("small")
def test_one_graph_serves_all_lengths():
    def loss(*given):
        out, after = causal_linear_attention(*given)
        return out.sum() + after.sums.sum()

    graph: Any = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (33, 70):
        *tensors, projection, _ = problem(tokens, 16, 20, torch.float32)
        found, wanted = graph(*tensors, projection), loss(*tensors, projection)
        torch.testing.assert_close(found, wanted)
        for one, other in zip(
            torch.autograd.grad(found, tensors), torch.autograd.grad(wanted, tensors), strict=True
        ):
            assert torch.equal(one, other)


def test_a_projection_that_learns_is_served_elsewhere():
    query, key, value, projection, grad = problem(20, 16, 20, torch.float32)
    out, _ = causal_linear_attention(query, key, value, projection.requires_grad_())
    (found,) = torch.autograd.grad(out, projection, grad)
    assert found.abs().min() > 0


@pytest.mark.parametrize(
    "attend", [linear_attention, lambda *given: causal_linear_attention(*given)[0]]
)
def test_values_of_another_width_are_served_elsewhere(attend):
    query, key, value, projection, _ = problem(20, 16, 20, torch.float32)
    found = attend(query, key, value[..., :12], projection)
    whole = attend(query, key, value, projection)
    torch.testing.assert_close(found, whole[..., :12], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small")
def test_it_is_a_proper_operator():
    query, key, value, projection, _ = problem(40, 16, 20, torch.float32)
    torch.library.opcheck(causal._forward, (query, key, value, projection, None, None))
