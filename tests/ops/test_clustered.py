"""Sort, chunk, attend, unsort: against a mask written out token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.ops import clustered as module
from longspan.ops.clustered import clustered_attention, routed_attention


def mask(clusters, *, size, before=0, causal=False, self_last=False, valid=None):
    """[tokens, tokens] of one row and head, of clusters [tokens, rounds]: who sees whom."""
    tokens, rounds = clusters.shape
    real = [True] * tokens if valid is None else valid.tolist()
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for number in range(rounds):
        own = clusters[:, number].tolist()
        order = sorted((i for i in range(tokens) if real[i]), key=lambda i: (own[i], i))
        for at, i in enumerate(order):
            for to, j in enumerate(order):
                if causal:
                    seen[i, j] |= own[i] == own[j] and 0 <= at - to <= size
                else:
                    seen[i, j] |= 0 <= at // size - to // size <= before
    if self_last:
        for i in range(tokens):
            if seen[i].sum() > 1:
                seen[i, i] = False
    return seen


def dense(query, key, value, clusters, *, scale=None, **how):
    """The same with n x n scores, in float64."""
    batch, tokens, heads, d = query.shape
    clusters = clusters.expand(-1, -1, heads, -1)
    valid = how.pop("valid", None)
    seen = torch.stack(
        [
            torch.stack(
                [
                    mask(clusters[b, :, h], valid=None if valid is None else valid[b], **how)
                    for h in range(heads)
                ]
            )
            for b in range(batch)
        ]
    )
    return by_mask(query, key, value, seen, d**-0.5 if scale is None else scale)


def by_mask(query, key, value, seen, scale):
    query, key, value = (t.double() for t in (query, key, value))
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhij,bjhd->bihd", weights, value)


def problem(tokens, rounds, *, batch=2, heads=3, of=4, shared=False, dtype=torch.float64):
    torch.manual_seed(tokens)
    tensors = [torch.randn(batch, tokens, heads, 4, dtype=torch.float64) for _ in range(3)]
    clusters = torch.randint(0, of, (batch, tokens, 1 if shared else heads, rounds))
    return [t.to(dtype).requires_grad_() for t in tensors], clusters


def compare(tensors, clusters, **how):
    found = clustered_attention(*tensors, clusters, **how)
    wanted = dense(*tensors, clusters, **how)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, tensors, gradient),
        torch.autograd.grad(wanted, tensors, gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 30),
    rounds=st.integers(1, 3),
    size=st.integers(1, 9),
    before=st.integers(0, 2),
    self_last=st.booleans(),
    padded=st.booleans(),
    shared=st.booleans(),
    of=st.integers(1, 6),
    together=st.sampled_from([1, 200, 2**23]),
)
def test_chunks_against_a_mask(
    tokens, rounds, size, before, self_last, padded, shared, of, together
):
    """Outputs and gradients; all at once, and a few chunks at a time, computed twice."""
    tensors, clusters = problem(tokens, rounds, of=of, shared=shared)
    valid = torch.rand(2, tokens) < 0.7 if padded else None
    how = {"size": size, "before": before, "self_last": self_last, "valid": valid}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCORES", together)
        compare(tensors, clusters, **how)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 30),
    rounds=st.integers(1, 3),
    size=st.integers(1, 9),
    self_last=st.booleans(),
    of=st.integers(1, 6),
    together=st.sampled_from([1, 2**23]),
)
def test_causally_against_a_mask(tokens, rounds, size, self_last, of, together):
    tensors, clusters = problem(tokens, rounds, of=of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCORES", together)
        compare(tensors, clusters, size=size, causal=True, self_last=self_last)
