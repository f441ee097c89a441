"""Attention within clusters by the fused kernels, beside the same in PyTorch's operations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from longspan.ops.clustered import clustered_attention, fused, routed_attention

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Also interpreted, where there is no GPU."""
    monkeypatch.setattr(fused, "serves", lambda query, *rest: query.dtype != torch.float64)


def tensors(tokens: int, dtype: torch.dtype, head_dim: int = 8) -> list[Any]:
    """Queries, keys and values; the latter two lie in memory as a projection leaves them."""
    torch.manual_seed(tokens)
    query = torch.randn(2, tokens, 2, head_dim, dtype=torch.float64)
    both = torch.randn(2, tokens, 2, 2, head_dim, dtype=torch.float64)
    return [t.to(dtype).requires_grad_() for t in (query, *both.unbind(2))]


def routes(tokens: int, count: int, size: int) -> torch.Tensor:
    """Tokens of several clusters and of none, slots without a member."""
    places = torch.rand(2, count, 2, tokens).argsort(-1)[..., : min(size, tokens)]
    return places.masked_fill(torch.rand(places.shape) < 0.2, -1)


def results(given: list[Any], by: Any, **how: Any) -> list[torch.Tensor]:
    """Output and gradients, of clusters or of places."""
    attend: Any = routed_attention if "size" not in how else clustered_attention
    out = attend(*given, by, **how)
    torch.manual_seed(1)
    gradient = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, given, gradient)]


def compare(given: list[Any], by: Any, **how: Any) -> None:
    found = results(given, by, **how)
    exact = [t.detach().double().requires_grad_() for t in given]
    for one, other in zip(found, results(exact, by, **how), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(1, 36),
    rounds=st.integers(1, 3),
    size=st.integers(1, 40),
    before=st.integers(0, 2),
    self_last=st.booleans(),
    padded=st.booleans(),
    shared=st.booleans(),
    of=st.integers(1, 6),
    head_dim=st.sampled_from([4, 8, 16, 24]),
)
def test_chunks(tokens, rounds, size, before, self_last, padded, shared, of, head_dim):
    given = tensors(tokens, torch.float32, head_dim=head_dim)
    clusters = torch.randint(0, of, (2, tokens, 1 if shared else 2, rounds))
    valid = torch.rand(2, tokens) < 0.7 if padded else None
    compare(given, clusters, size=size, before=before, self_last=self_last, valid=valid)


@settings(max_examples=7, deadline=None)
@given(
    tokens=st.integers(1, 36),
    rounds=st.integers(1, 3),
    size=st.integers(1, 40),
    self_last=st.booleans(),
    of=st.integers(1, 6),
)
def test_causally(tokens, rounds, size, self_last, of):
    given = tensors(tokens, torch.float32)
    clusters = torch.randint(0, of, (2, tokens, 2, rounds))
    compare(given, clusters, size=size, causal=True, self_last=self_last)


def test_the_last_queries_alone():
    query, key, value = tensors(40, torch.float32)
    clusters = torch.randint(0, 3, (2, 40, 2, 2))
    how: dict[str, Any] = {"size": 5, "causal": True, "self_last": True}
    whole = clustered_attention(query, key, value, clusters, **how)
    last = clustered_attention(query[:, -20:], key, value, clusters, **how)
    torch.testing.assert_close(last, whole[:, -20:])


@settings(max_examples=7, deadline=None)
@given(
    tokens=st.integers(1, 36),
    count=st.integers(1, 5),
    size=st.integers(1, 40),
    self_last=st.booleans(),
)
def test_members(tokens, count, size, self_last):
    given = tensors(tokens, torch.float32)
    compare(given, routes(tokens, count, size), self_last=self_last)


def test_padding_and_who_is_in_no_cluster():
    """Rows of zeros, without gradients."""
    given = tensors(20, torch.float32)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[0, 7:], valid[1] = False, False
    clusters = torch.randint(0, 3, (2, 20, 2, 2))
    for one in results(given, clusters, size=4, before=1, self_last=True, valid=valid):
        assert not one[~valid].any()
        assert one[0, :7].any()
    places = torch.full((2, 3, 2, 4), -1)
    places[0, 0] = torch.arange(4)
    for one in results(given, places):
        assert not one[0, 4:].any()
        assert not one[1].any()
        assert one[0, :4].any()


CASES: dict[str, dict[str, Any]] = {
    "one round": {"rounds": 1, "size": 16, "self_last": True},
    "rounds": {"rounds": 3, "size": 8, "before": 1, "self_last": True},
    "causal": {"rounds": 2, "size": 8, "causal": True},
    "routed": {"self_last": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("case", CASES)
def test_it_is_no_less_precise(case, head_dim, dtype, device, monkeypatch):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    if device.type == "cpu" and (head_dim, dtype) not in ((16, torch.float32), (80, torch.float16)):
        pytest.skip("interpreted, every size and every precision once")
    given, how = tensors(50, dtype, head_dim=head_dim), dict(CASES[case])
    rounds = how.pop("rounds", None)
    by = torch.randint(0, 4, (2, 50, 2, rounds)) if rounds else routes(50, 4, 20)
    exact = results([t.detach().double().requires_grad_() for t in given], by, **how)
    found = results(given, by, **how)
    monkeypatch.setattr(fused, "serves", lambda *given: False)
    plain = results(given, by, **how)
    for one, other, wanted in zip(found, plain, exact, strict=True):
        off, allowed = ((t.double() - wanted).norm() for t in (one, other))
        # And the last bits of float32, in which both add up: three products make one there.
        assert off <= 2 * allowed + 4 * torch.finfo(torch.float32).eps * wanted.norm()


@pytest.mark.parametrize("shape", [(1,), (4, 3, 2, 50, 2, 7), (2, 3, 1, 1000)])
def test_parts_are_added_up(shape, device):
    """Whole numbers, so that no order of adding matters."""
    parts = torch.randint(-99, 100, (4, *shape), device=device).to(torch.float16)
    assert torch.equal(fused._added(parts), parts.sum(0))


@pytest.mark.parametrize("case", CASES)
def test_dropout(case):
    """Weights are dropped or made larger, as many as was asked for, backward the same ones."""
    how: dict[str, Any] = CASES[case] | {"dropout_p": 0.4}
    rounds = how.pop("rounds", None)
    query, key, _ = tensors(16, torch.float32, head_dim=16)
    by = torch.randint(0, 2, (2, 16, 2, rounds)) if rounds else routes(16, 3, 8)
    attend = clustered_attention if rounds else routed_attention
    value = torch.eye(16)[None, :, None].expand(2, -1, 2, -1).clone().requires_grad_()

    def weights(**more: Any) -> torch.Tensor:
        torch.manual_seed(3)
        return attend(query, key, value, by, **how | more)

    whole, found = weights(dropout_p=0.0), weights()
    torch.testing.assert_close(found, weights())
    if rounds == 1:  # else several have a part in one weight
        kept = found != 0
        torch.testing.assert_close(found[kept], whole[kept] / 0.6)
        assert 0.5 < float(kept.sum() / (whole != 0).sum()) < 0.7
    assert 0.9 < float(found.detach().sum() / whole.detach().sum()) < 1.1
    gradient = torch.randn(found.shape)
    grads = torch.autograd.grad(found, (query, key, value), gradient)
    # Linear in the values; a small step along the gradient of the others.
    torch.testing.assert_close((grads[2] * value).sum(), (gradient * found).sum())
    with torch.no_grad():
        for tensor, slope in zip((query, key), grads, strict=False):
            step = slope / slope.norm() * 1e-2
            ends = []
            for sign in (1, -1):
                tensor += sign * step
                ends.append((weights() * gradient).double().sum())
                tensor -= sign * step
            wanted = (ends[0] - ends[1]) / 2e-2
            torch.testing.assert_close(slope.norm().double(), wanted, rtol=1e-2, atol=1e-4)


def test_it_is_a_proper_operator():
    given = tensors(12, torch.float32)
    clusters = torch.randint(0, 3, (2, 2, 2, 12), dtype=torch.int32)
    values, order = clusters.sort(dim=-1, stable=True)
    torch.library.opcheck(fused._settle, (values, order, 4, False))
    places, marks = fused._settle(values, order, 4, False)
    numbers = (4, 1, 1, False, True, 0.0, 0.5)
    arguments = (*given, places, marks, None, None, None, *numbers)
    torch.library.opcheck(fused._attend, arguments)
    out, _, lse = fused._attend(*arguments)
    saved = [t.detach() for t in (out, *given, out, lse)]
    torch.library.opcheck(fused._backward, (*saved, places, marks, None, None, None, *numbers))
    torch.library.opcheck(fused._slots_of, (torch.randint(0, 9, (2, 3, 12), dtype=torch.int32), 9))


@pytest.mark.parametrize("case", CASES)
def test_it_compiles_as_one_graph(case):
    how = dict(CASES[case])
    rounds = how.pop("rounds", None)
    given = tensors(12, torch.float32)
    by = torch.randint(0, 4, (2, 12, 2, rounds)) if rounds else routes(12, 5, 6)
    attend = clustered_attention if rounds else routed_attention
    compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager")
    wanted = results(given, by, **how)
    found = compiled(*given, by, **how)
    torch.manual_seed(1)
    gradient = torch.randn(found.shape, dtype=torch.float64).to(found.dtype)
    grads = torch.autograd.grad(found, given, gradient)
    for one, other in zip((found, *grads), wanted, strict=True):
        torch.testing.assert_close(one, other)
