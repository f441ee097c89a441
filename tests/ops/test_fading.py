"""Attention that fades out with the distance: against its formula, in blocks, and by lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.ops import fading as module
from longspan.ops.fading import fading_attention
from longspan.ops.listed import listed_attention

pytestmark = pytest.mark.usefixtures("on_device")


def problem(queries, memory, dtype=torch.float64):
    torch.manual_seed(0)
    query = torch.randn(2, queries, 3, 4, dtype=dtype)
    key, value = torch.randn(2, 2, queries + memory, 3, 4, dtype=dtype)
    return [t.requires_grad_() for t in (query, key, value)]


def dense(query, key, value, spans, *, ramp, reach):
    tokens = key.shape[1]
    place = torch.arange(tokens)
    distance = place[tokens - query.shape[1] :, None] - place
    fade = ((ramp + spans[:, None, None] - distance) / ramp).clamp(0, 1)
    fade = (fade * (distance >= 0) * (distance <= reach)).to(query.dtype)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / query.shape[3] ** 0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * fade
    return torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), value)


def both(operation, tensors, spans, options):
    out = operation(*tensors, spans, **options)
    torch.manual_seed(1)
    return out, *torch.autograd.grad(
        out, [*tensors, spans], torch.randn(out.shape, dtype=out.dtype)
    )


@given(
    queries=st.integers(1, 21),
    memory=st.integers(0, 9),
    reach=st.integers(0, 12),
    block=st.integers(1, 8),
    ramp=st.integers(1, 6),
    spans=st.lists(st.floats(0, 14), min_size=3, max_size=3),
)
def test_the_formula_and_its_gradients(queries, memory, reach, block, ramp, spans):
    """Blocks join without a seam, whatever was read before."""
    spans = torch.tensor(spans, dtype=torch.float64)
    # Where a weight just reaches 0 or 1 its gradient is anybody's choice.
    spans = (spans.floor() + 0.37).requires_grad_()
    options = {"ramp": ramp, "reach": reach}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        found = both(fading_attention, problem(queries, memory), spans, options)
    wanted = both(dense, problem(queries, memory), spans, options)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_lists_give_the_same():
    """What a GPU does is what is done elsewhere."""
    query, key, value = problem(37, 11)
    spans = torch.tensor([0.0, 3.3, 8.0], dtype=torch.float64, requires_grad=True)

    def by_lists(query, key, value, spans, *, ramp, reach):
        listed, first, last = module._lists(query, 11, 48, 5, reach)
        given = {"first": first, "last": last, "spans": spans, "ramp": ramp}
        return listed_attention(query, key, value, listed[None, None], size=5, **given)

    options = {"ramp": 4, "reach": 12}
    found = both(fading_attention, (query, key, value), spans, options)
    wanted = both(by_lists, (query, key, value), spans, options)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_budget(dtype):
    """At most twice as far from float64 as plain PyTorch in the same precision."""
    options = {"ramp": 8, "reach": 60}
    spans = torch.tensor([5.2, 30.4, 52.0], dtype=torch.float32, requires_grad=True)
    tensors = problem(300, 0, dtype)
    exact = both(dense, [t.detach().double().requires_grad_() for t in tensors], spans, options)
    plain, found = (both(one, tensors, spans, options) for one in (dense, fading_attention))
    for one, other, wanted in zip(found, plain, exact, strict=True):
        assert (one - wanted).abs().max() <= 2 * (other - wanted).abs().max() + 1e-7
