"""The spans of a tree made by fused kernels, beside the same in PyTorch's operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

pytest.importorskip("triton", reason="Triton is not installed")

from longspan.ops import listed, spans, tree
from longspan.ops.tree import causal_tree_attention, tree_attention

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Also interpreted, where there is no GPU."""
    monkeypatch.setattr(tree, "serves", lambda key: key.dtype != torch.float64)
    monkeypatch.setattr(listed, "serves", lambda query: False)


def problem(tokens: int, head_dim: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    stacked = torch.randn(2, tokens, 3, 2, head_dim)
    return [t.requires_grad_() for t in stacked.unbind(2)]


def gradients(out: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.autograd.grad(out, tensors, torch.randn(out.shape).to(out.dtype))


@settings(max_examples=10)
@given(
    tokens=some.integers(1, 100),
    near=some.integers(1, 6),
    padded=some.booleans(),
    causal=some.booleans(),
)
def test_it_is_the_same(tokens, near, padded, causal):
    tensors = problem(tokens)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    if causal:
        (found, kept), (wanted, right) = (
            causal_tree_attention(*own, near=near) for own in (tensors, exact)
        )
        torch.testing.assert_close(kept.both.double(), right.both, rtol=1e-4, atol=1e-5)
    else:
        valid = torch.rand(2, tokens) < 0.6 if padded else None
        found, wanted = (tree_attention(*own, near=near, valid=valid) for own in (tensors, exact))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    both = gradients(found, tensors), gradients(wanted, exact)
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_more_levels_than_a_program_makes(whole):
    torch.manual_seed(0)
    key, value = torch.randn(2, 1, 2100, 1, 2)
    both = spans.span_means(key, value, None, 14, whole)[:2]
    offset = 0
    for level, count in enumerate(spans.count_spans(2100, 14, whole)):
        for tensor, found in zip((key, value), both, strict=True):
            pieces = tensor.double().split(2**level, 1)[:count]
            own = found[:, offset : offset + count].double()
            wanted = [one.mean(1) for one in pieces]
            wanted = torch.stack(wanted, 1) if wanted else own
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)
        offset += count
    assert offset == both[0].shape[1]


def test_it_is_a_proper_operator():
    _, key, value = problem(20)
    valid = torch.rand(2, 20) < 0.7
    for mask, whole in ((None, True), (valid, False)):
        torch.library.opcheck(spans.span_means, (key, value, mask, 4, whole))
