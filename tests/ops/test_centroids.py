"""Centroids: the nearest, the strongest, and k-means, on points whose clusters are known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.ops import centroids as module
from longspan.ops.centroids import hashed, nearest, spherical_kmeans, strongest, sums_of

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(request, monkeypatch):
    """Whether by the kernels: interpreted, where there is no GPU."""
    if request.param:
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(module, "serves", lambda tensor: request.param)


@pytest.mark.parametrize("together", [1, 2**24])
def test_nearest_is_the_largest_product(together, monkeypatch):
    monkeypatch.setattr(module, "_SCORES", together)
    torch.manual_seed(0)
    points, directions = torch.randn(2, 9, 3, 4), torch.randn(3, 5, 4)
    products = torch.einsum("bnhd,hkd->bnhk", points, directions)
    assert torch.equal(nearest(points, directions), products.argmax(-1))


@pytest.mark.parametrize("dim", [4, 100])
@pytest.mark.usefixtures("fused")
def test_directions_and_their_opposites(dim):
    torch.manual_seed(0)
    points, directions = torch.randn(2, 37, 3, dim), torch.randn(2, 3, 21, dim)
    products = torch.einsum("bnhd,rhkd->bnhrk", points, directions)
    wanted = torch.cat((products, -products), dim=-1).argmax(-1)
    assert torch.equal(hashed(points, directions), wanted)
    # As a projection leaves them; and of another precision than the directions.
    both = torch.stack((points, points), dim=2).half()
    found = nearest(both[:, :, 1], directions[0])
    products = torch.einsum("bnhd,hkd->bnhk", points.half().float(), directions[0])
    assert torch.equal(found, products.argmax(-1))


@pytest.mark.usefixtures("fused")
def test_of_equals_the_first_is_nearest():
    points = torch.ones(1, 3, 1, 2)
    assert nearest(points, torch.ones(1, 40, 2)).eq(0).all()
    assert hashed(torch.zeros(1, 3, 1, 2), torch.ones(1, 1, 40, 2)).eq(0).all()
    # Whole numbers: many products are equal, directions' and opposites'.
    torch.manual_seed(0)
    points = torch.randint(-2, 3, (2, 50, 2, 3)).float()
    directions = torch.randint(-2, 3, (4, 2, 7, 3)).float()
    products = torch.einsum("bnhd,rhkd->bnhrk", points, directions)
    wanted = torch.cat((products, -products), dim=-1).argmax(-1)
    assert torch.equal(hashed(points, directions), wanted)


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(1, 20),
    size=st.integers(1, 12),
    padded=st.booleans(),
    distinct=st.integers(1, 20),
    together=st.sampled_from([1, 2**24]),
)
def test_the_strongest_are_chosen_and_of_equals_the_earlier(
    tokens, size, padded, distinct, together
):
    torch.manual_seed(tokens)
    # Few distinct points among many tokens: ties everywhere.
    points = torch.randn(2, distinct, 3, 4)[:, torch.randint(distinct, (tokens,))]
    directions = torch.randn(3, 5, 4)
    valid = torch.rand(2, tokens) < 0.6 if padded else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCORES", together)
        found = strongest(points, directions, size, valid)
    assert found.shape == (2, 5, 3, min(size, tokens))
    products = (points.transpose(1, 2)[:, :, None] * directions[None, :, :, None]).sum(-1)
    for b in range(2):
        real = [i for i in range(tokens) if valid is None or valid[b, i]]
        for c in range(5):
            for h in range(3):
                row = products[b, h, c].tolist()
                wanted = sorted(real, key=lambda i, row=row: (-round(row[i], 4), i))[:size]
                own = [i for i in found[b, c, h].tolist() if i >= 0]
                assert own == sorted(wanted)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 600),
    share=st.floats(0, 1),
    distinct=st.sampled_from([1, 2, 3, 50, 10**6]),
    spread=st.sampled_from([1e-3, 1.0, 1e30]),
    none=st.floats(0, 1),
)
def test_the_largest_are_found_without_sorting(tokens, share, distinct, spread, none):
    pytest.importorskip("triton", reason="Triton is not installed")
    torch.manual_seed(tokens)
    scores = torch.randint(-distinct, distinct + 1, (2, 3, tokens)) / distinct * spread
    scores = scores.masked_fill(torch.rand(scores.shape) < none, -torch.inf)
    scores = torch.where((scores == 0) & (torch.rand(scores.shape) < 0.5), -0.0, scores)
    size = max(1, round(share * tokens))
    assert torch.equal(module._select(scores, size), module._largest(scores, size))


def test_they_are_proper_operators():
    pytest.importorskip("triton", reason="Triton is not installed")
    points, directions = torch.randn(1, 9, 2, 4), torch.randn(3, 2, 5, 4)
    torch.library.opcheck(module._nearest, (points, directions, True))
    torch.library.opcheck(module._select, (torch.randn(2, 20), 7))


def test_kmeans_finds_well_separated_clusters():
    torch.manual_seed(0)
    wanted = torch.eye(4)[:3]
    points = (wanted.repeat(50, 1) + 0.05 * torch.randn(150, 4))[:, None]
    best = 0.0
    for _ in range(5):  # from an unlucky start two of them share a centroid
        found = spherical_kmeans(points, 3)[0]
        torch.testing.assert_close(found.norm(dim=-1), torch.ones(3))
        best = max(best, float((wanted @ found.mT).amax(-1).min()))
    assert best > 0.99


def test_kmeans_does_without_points_for_every_cluster():
    """Equal points: all belong to the first, the others stay where they are."""
    points = torch.ones(6, 2, 3)
    found = spherical_kmeans(points, 4)
    torch.testing.assert_close(found, torch.full((2, 4, 3), 3**-0.5))
    assert spherical_kmeans(points[:2], 4).shape == (2, 4, 3)


def test_kmeans_goes_on_from_a_start():
    """Each direction stays with its points; one that is nearest to none is drawn anew."""
    torch.manual_seed(0)
    ways = torch.eye(4)
    points = (ways[:3].repeat(50, 1) + 0.05 * torch.randn(150, 4))[:, None]
    start = ways[[2, 0, 3, 1]] + 0.1
    start[2] = -1.0
    found = spherical_kmeans(points, 4, start[None])[0]
    assert float((ways[[2, 0, 1]] * found[[0, 1, 3]]).sum(-1).min()) > 0.9
    assert float((ways[:3] @ found[2]).max()) > 0.9


def test_kmeans_follows_the_generator():
    torch.manual_seed(0)
    points = torch.randn(40, 2, 3)
    one, two = (spherical_kmeans(points, 4) for _ in range(2) if torch.manual_seed(7))
    assert torch.equal(one, two)


def test_sums_are_by_head_and_cluster():
    points = torch.arange(12.0).view(3, 2, 2)
    sums, counts = sums_of(points, torch.tensor([[0, 1], [0, 1], [2, 0]]), 3)
    assert counts.tolist() == [[2, 0, 1], [1, 2, 0]]
    assert sums[0, 0].tolist() == [4.0, 6.0]
    assert sums[1, 1].tolist() == [8.0, 10.0]
    assert not sums[0, 1].any()
