"""The softmax of one round in one kernel, beside the same in PyTorch's operations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from longspan.ops import clustered, rounds
from longspan.ops.clustered import clustered_attention

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Also interpreted, where there is no GPU."""
    monkeypatch.setattr(clustered, "serves", lambda scores: scores.dtype != torch.float64)


def problem(tokens: int, several: int, dtype: torch.dtype) -> tuple[list[Any], Any]:
    torch.manual_seed(tokens)
    tensors = [torch.randn(2, tokens, 2, 8, dtype=torch.float64) for _ in range(3)]
    clusters = torch.randint(0, 4, (2, tokens, 2, several))
    return [t.to(dtype).requires_grad_() for t in tensors], clusters


def results(tensors: list[Any], clusters: Any, **how: Any) -> list[torch.Tensor]:
    query, key, value = tensors
    out = clustered_attention(query, key, value, clusters, **how)
    torch.manual_seed(1)
    gradient = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, gradient)]


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(1, 20),
    several=st.integers(2, 4),
    size=st.integers(1, 9),
    causal=st.booleans(),
    self_last=st.booleans(),
    padded=st.booleans(),
)
def test_it_is_the_same(tokens, several, size, causal, self_last, padded):
    tensors, clusters = problem(tokens, several, torch.float32)
    how: dict[str, Any] = {"size": size, "causal": causal, "self_last": self_last}
    if not causal:
        how |= {"before": 1, "valid": torch.rand(2, tokens) < 0.7 if padded else None}
    found = results(tensors, clusters, **how)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    for one, other in zip(found, results(exact, clusters, **how), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_no_less_precise(dtype, monkeypatch):
    tensors, clusters = problem(30, 3, dtype)
    how: dict[str, Any] = {"size": 8, "before": 1, "self_last": True}
    exact = results([t.detach().double().requires_grad_() for t in tensors], clusters, **how)
    found = results(tensors, clusters, **how)
    monkeypatch.setattr(clustered, "serves", lambda scores: False)
    plain = results(tensors, clusters, **how)
    for one, other, wanted in zip(found, plain, exact, strict=True):
        off, allowed = ((t.double() - wanted).norm() for t in (one, other))
        assert off <= 2 * allowed


def test_more_keys_than_a_program_takes_rows_of():
    scores = torch.randn(1, 1, 1, 3, 5000)
    places = torch.arange(3).view(1, 1, 1, 3)
    listed = torch.arange(5000).view(1, 1, 1, 5000)
    marks, marked = torch.zeros(1, 1, 1, 3, 2), torch.zeros(1, 1, 1, 5000, 2)
    marks, marked = marks.to(torch.int16), marked.to(torch.int16)
    weights, sums = rounds.round_softmax(scores, marks, marked, places, listed, 0, 1, False, 0.5)
    torch.testing.assert_close(weights, (scores / 2).softmax(-1))
    # In both rounds, so half of it in each.
    torch.testing.assert_close(sums, (scores / 2).logsumexp(-1) - torch.tensor(2.0).log())


def test_it_is_a_proper_operator():
    (query, _, _), clusters = problem(12, 2, torch.float32)
    scores = query.detach()[:1, :8].transpose(1, 2)[:, None].contiguous()
    marks = clusters[:1, :8].transpose(1, 2)[:, None].to(torch.int32).contiguous()
    places = torch.arange(8).expand(1, 1, 2, 8).contiguous()
    given = (scores.requires_grad_(), marks, marks, places, places, 1, 1, True, 1.0)
    torch.library.opcheck(rounds.round_softmax, given)
