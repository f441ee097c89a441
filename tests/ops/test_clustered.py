"""Sort, chunk, attend, unsort: against a mask written out token by token."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.ops.clustered import clustered_attention, plain, routed_attention
from longspan.ops.clustered import rounds as rounds_of

pytestmark = pytest.mark.usefixtures("on_device")


def mask(clusters, *, size, before=0, causal=False, self_last=False, valid=None):
    """[tokens, tokens] of one row and head, of clusters [tokens, rounds]: who sees whom."""
    tokens, rounds = clusters.shape
    real = [True] * tokens if valid is None else valid.tolist()
    seen = torch.zeros(tokens, tokens, dtype=torch.bool, device="cpu")  # pair by pair
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
    return seen.to(clusters.device)


def dense(query, key, value, clusters, *, scale=None, **how):
    """The same with n x n scores, in float64."""
    batch, _, heads, d = query.shape
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


def problem(
    tokens, rounds, *, batch=2, heads=3, of=4, shared=False, dtype=torch.float64
) -> tuple[Any, Any]:
    torch.manual_seed(tokens)
    tensors = [torch.randn(batch, tokens, heads, 4, dtype=torch.float64) for _ in range(3)]
    clusters = torch.randint(0, of, (batch, tokens, 1 if shared else heads, rounds))
    return [t.to(dtype).requires_grad_() for t in tensors], clusters


def at_a_time(patch, scores):
    for module, name in (
        (plain, "_SCORES"),
        (rounds_of, "_SCORES"),
        (rounds_of, "_SCORES_ON_CPU"),
    ):
        patch.setattr(module, name, scores)


def compare(tensors, clusters, **how):
    found = clustered_attention(*tensors, clusters=clusters, **how)
    wanted = dense(*tensors, clusters=clusters, **how)
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
        at_a_time(patch, together)
        compare(tensors, clusters, **how)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 30),
    rounds=st.integers(1, 3),
    size=st.integers(1, 9),
    chunk=st.integers(1, 9),
    self_last=st.booleans(),
    of=st.integers(1, 6),
    together=st.sampled_from([1, 2**23]),
)
def test_causally_against_a_mask(tokens, rounds, size, chunk, self_last, of, together):
    tensors, clusters = problem(tokens, rounds, of=of)
    with pytest.MonkeyPatch.context() as patch:
        at_a_time(patch, together)
        patch.setattr(plain, "_CAUSAL", chunk)
        compare(tensors, clusters, size=size, causal=True, self_last=self_last)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(2, 30),
    new=st.integers(1, 12),
    rounds=st.integers(1, 3),
    size=st.integers(1, 9),
    self_last=st.booleans(),
)
def test_the_last_queries_alone(tokens, new, rounds, size, self_last):
    """Few against all keys, more by sorting these: as if all had been asked."""
    (query, key, value), clusters = problem(tokens, rounds)
    new = min(new, tokens - 1)
    how = {"size": size, "causal": True, "self_last": self_last}
    whole = clustered_attention(query, key, value, clusters, **how)
    last = clustered_attention(query[:, -new:], key, value, clusters, **how)
    torch.testing.assert_close(last, whole[:, -new:])


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 24),
    count=st.integers(1, 5),
    size=st.integers(1, 8),
    self_last=st.booleans(),
    together=st.sampled_from([1, 2**23]),
)
def test_members_against_a_mask(tokens, count, size, self_last, together):
    """The mean over a token's clusters of what it makes of each; zero for a token of none."""
    tensors, _ = problem(tokens, 1)
    size = min(size, tokens)
    places = torch.rand(2, count, 3, tokens).argsort(-1)[..., :size]
    places = places.masked_fill(torch.rand(places.shape) < 0.2, -1)
    wanted = torch.zeros_like(tensors[0])
    times = torch.zeros(2, tokens, 3, 1, dtype=torch.float64)
    for number in range(count):
        seen = torch.zeros(2, 3, tokens, tokens, dtype=torch.bool, device="cpu")
        for b in range(2):
            for h in range(3):
                own = [i for i in places[b, number, h].tolist() if i >= 0]
                for i in own:
                    for j in own:
                        seen[b, h, i, j] = not self_last or i != j or len(own) == 1
                    times[b, i, h] += 1
        wanted = wanted + by_mask(*tensors, seen=seen.to(places.device), scale=0.5)
    wanted = wanted / times.clamp(min=1)
    with pytest.MonkeyPatch.context() as patch:
        at_a_time(patch, together)
        found = routed_attention(*tensors, places=places, self_last=self_last)
        assert not found[(times == 0).expand_as(found)].any()
        torch.testing.assert_close(found, wanted)
        for one, other in zip(
            torch.autograd.grad(found.square().sum(), tensors),
            torch.autograd.grad(wanted.square().sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_lower_precision(dtype, rounds, causal):
    """At most twice as far from float64 as dense attention in the same dtype."""
    tensors, clusters = problem(33, rounds, dtype=dtype)
    valid: Any = None if causal else torch.rand(2, 33) < 0.8
    how = {"size": 7, "causal": causal, "self_last": True, "valid": valid}
    wanted = dense(*tensors, clusters=clusters, **how)
    query, key, value = (t.detach().transpose(1, 2) for t in tensors)
    seen = torch.stack(
        [
            torch.stack(
                [
                    mask(clusters[b, :, h], **{**how, "valid": None if causal else valid[b]})
                    for h in range(3)
                ]
            )
            for b in range(2)
        ]
    )
    scores = (query @ key.mT * 0.5).masked_fill(~seen, -torch.inf)
    usually = (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)
    found = clustered_attention(*tensors, clusters=clusters, **how)
    assert found.dtype == dtype
    error, usual = ((one.double() - wanted).abs().max().detach() for one in (found, usually))
    assert float(error) <= max(2 * float(usual), 8 * torch.finfo(dtype).eps)
    found.float().sum().backward()
    assert all(t.grad.isfinite().all() for t in tensors)


@pytest.mark.parametrize("rounds", [1, 2])
def test_large_scores_do_not_overflow(rounds):
    (query, key, value), clusters = problem(40, rounds, dtype=torch.float16)
    out = clustered_attention(query * 100, key * 100, value, clusters, size=5, self_last=True)
    assert out.isfinite().all()
    out.float().sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_that_are_dropped_are_dropped_backward(rounds, causal, monkeypatch):
    """All at once and in pieces: gradients against finite differences; everything and nothing
    dropped."""
    tensors, clusters = problem(11, rounds, batch=1, heads=2)
    how = {"size": 3, "before": 0 if causal else 1, "causal": causal, "self_last": True}

    def call(query, key, value):
        torch.manual_seed(0)
        return clustered_attention(query, key, value, clusters, dropout_p=0.4, **how)

    for together in (2**23, 1):
        at_a_time(monkeypatch, together)
        assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    whole = clustered_attention(*tensors, clusters=clusters, **how)
    assert not torch.equal(call(*tensors), whole)
    assert not clustered_attention(*tensors, clusters=clusters, dropout_p=1.0, **how).any()
    at_a_time(monkeypatch, 2**16)
    often = (t.detach().expand(4000, -1, -1, -1) for t in (*tensors, clusters))
    mean = clustered_attention(*often, dropout_p=0.4, **how).mean(0)
    torch.testing.assert_close(mean, whole[0], atol=0.1, rtol=0)


def test_one_cluster_and_one_chunk_is_full_attention():
    (query, key, value), clusters = problem(20, 1, of=1)
    found = clustered_attention(query, key, value, clusters, size=20)
    seen = torch.ones(2, 3, 20, 20, dtype=torch.bool)
    torch.testing.assert_close(found, by_mask(query, key, value, seen, 0.5))


def test_sorting_and_back_is_nothing():
    """Chunks of one token give each its own value."""
    (query, key, value), clusters = problem(23, 1)
    found = clustered_attention(query, key, value, clusters, size=1)
    assert torch.equal(found, value)


def test_equal_clusters_stay_in_order():
    """All ties: chunks are blocks of neighbours."""
    (query, key, value), clusters = problem(23, 1, of=1)
    found = clustered_attention(query, key, value, clusters, size=5)
    place = torch.arange(23) // 5
    seen = (place[:, None] == place).expand(2, 3, -1, -1)
    torch.testing.assert_close(found, by_mask(query, key, value, seen, 0.5))


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear(causal):
    """No tensor on the way has more than so many elements for each token."""
    largest = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest[tokens] = max(largest.get(tokens, 0), out.numel())
            return out

    for tokens in (512, 2048):
        tensors, clusters = problem(tokens, 2, batch=1, heads=1, of=8)
        with pytest.MonkeyPatch.context() as patch, Watch():
            at_a_time(patch, 2**12)
            clustered_attention(
                *tensors, clusters=clusters, size=16, causal=causal
            ).sum().backward()
    assert largest[2048] <= 4 * largest[512]


def test_what_does_not_fit_is_named():
    (query, key, value), clusters = problem(20, 1)
    with pytest.raises(ValueError, match="5 queries for 20 keys"):
        clustered_attention(query[:, :5], key, value, clusters, size=4)
    with pytest.raises(ValueError, match=r"clusters must be \[2, 20, 3 or 1, rounds\]"):
        clustered_attention(query, key, value, clusters[:, :7], size=4)
    with pytest.raises(ValueError, match="neither with before nor with valid"):
        clustered_attention(query, key, value, clusters, size=4, before=1, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_no_number_stays_in_its_document(causal):
    query, key, value = (torch.randn(2, 13, 2, 4) for _ in range(3))
    clusters = torch.randint(0, 3, (2, 13, 2, 3))
    how: Any = {"size": 4, "before": 0 if causal else 1, "causal": causal}
    right = clustered_attention(query, key, value, clusters, **how)[1]
    value[0, 0] = torch.inf
    assert torch.equal(clustered_attention(query, key, value, clusters, **how)[1], right)


def test_second_derivatives_are_refused():
    """Not left out, as they would be of a sum of which another part has them."""
    query, key, value = (torch.randn(1, 12, 2, 4, requires_grad=True) for _ in range(3))
    clusters = torch.randint(0, 3, (1, 12, 2, 2))
    out = clustered_attention(query, key, value, clusters, size=4)
    with pytest.raises(RuntimeError, match="gradients can be taken once"):
        torch.autograd.grad(out.sum(), query, create_graph=True)
