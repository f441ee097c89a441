"""Routing: centroids that follow the tokens, and take those that are nearest."""

import pytest
import torch
from layers.family import DIM, HEADS, causal_layer, encoder_layer, joined, states
from torch.nn.functional import normalize

from longspan.layers.observing import OnlineCentroids, auxiliary_loss, refresh
from longspan.ops import visibility

pytestmark = pytest.mark.usefixtures("on_device")

SETTING = {"kind": "routing", "clusters": 5, "size": 7}
CAUSAL = {"kind": "routing", "clusters": 5, "size": 4}


def parts(made, hidden):
    """Shared queries and keys of length 1, and values, [batch, heads, tokens, head_dim]."""
    shared, value = made.qkv(hidden).unflatten(-1, (2, HEADS, -1)).transpose(1, 3).unbind(2)
    return normalize(shared, dim=-1), value


def test_each_centroid_takes_the_nearest():
    made, hidden = encoder_layer(SETTING), states(1, 20)
    shared, value = parts(made, hidden)
    near = made.centroids.directions @ shared.mT  # [1, heads, clusters, tokens]
    wanted, times = torch.zeros_like(value), torch.zeros(1, HEADS, 20, 1)
    for h in range(HEADS):
        for c in range(5):
            own = near[0, h, c].argsort(descending=True)[:7]
            scores = shared[0, h, own] @ shared[0, h, own].T * 8**0.5
            scores.fill_diagonal_(-torch.inf)
            wanted[0, h, own] += scores.softmax(-1) @ value[0, h, own]
            times[0, h, own] += 1
    torch.testing.assert_close(made(hidden), joined(wanted / times.clamp(min=1)))
    assert times.min() == 0  # some are dropped
    assert times.max() > 1  # some are taken twice


def test_causally_the_last_of_the_same_cluster():
    made, hidden = causal_layer(CAUSAL), states(1, 40)
    made.base = 1e30  # one position as good as another, but for the fastest pair
    clusters = made.clusters(parts(made, hidden)[0].transpose(1, 2))[0, ..., 0]
    change = torch.zeros(40, 40, HEADS)
    out = made(hidden).out.unflatten(-1, (HEADS, -1))
    for j in range(40):
        other = hidden.clone()
        other[:, j] *= 1.5  # the same direction: the same cluster, another value
        moved = made(other).out.unflatten(-1, (HEADS, -1)) - out
        change[:, j] = moved[0].abs().amax(-1)
    for h in range(HEADS):
        for i in range(40):
            own = [j for j in range(i) if clusters[j, h] == clusters[i, h]][-4:] or [i]
            assert (change[i, :, h] > 1e-9).nonzero().flatten().tolist() == own


@torch.no_grad()
def test_centroids_move_toward_the_mean_of_their_tokens():
    torch.manual_seed(0)
    made = OnlineCentroids(1, 2, 2, decay=0.9)
    made.directions.copy_(torch.eye(2)[None])
    made.steps += 1
    points = normalize(torch.tensor([[1.0, 0.2], [1.0, 0.4]]), dim=-1)[:, None]
    made.take_in(points)
    wanted = 0.9 * torch.eye(2)[0] + 0.1 * normalize(points.sum(0)[0], dim=-1)
    torch.testing.assert_close(made.directions[0, 0], normalize(wanted, dim=-1))
    assert torch.equal(made.directions[0, 1], torch.eye(2)[1])  # had no tokens


@torch.no_grad()
def test_the_first_step_finds_them():
    torch.manual_seed(0)
    made = OnlineCentroids(2, 3, 4, decay=0.999)
    points = normalize(torch.randn(30, 2, 4), dim=-1)
    made.take_in(points)
    own = made(points[None])[0]
    assert all(len(own[:, h].unique()) == 3 for h in range(2))


@pytest.mark.parametrize("layer", [encoder_layer, causal_layer])
@torch.no_grad()
def test_a_call_changes_nothing(layer):
    made, hidden = layer(SETTING).train(), states(1, 30)
    before = made.centroids.directions.clone()
    made(hidden)
    made(hidden)
    assert torch.equal(made.centroids.directions, before)
    refresh(made)
    assert not torch.equal(made.centroids.directions, before)
    torch.testing.assert_close(
        made.centroids.directions, before, rtol=0, atol=2.1e-3
    )  # by a thousandth of the way


def test_commitment_pulls_tokens_to_their_centroids():
    made, hidden = causal_layer(CAUSAL).train(), states(1, 40)
    shared = parts(made, hidden)[0].transpose(1, 2)
    own = made.centroids.directions[torch.arange(HEADS), made.clusters(shared)[..., 0]]
    loss = made(hidden).loss
    torch.testing.assert_close(loss, 1e-4 * (shared - own).square().mean().float())
    loss.backward()
    assert made.qkv.weight.grad[:DIM].abs().sum() > 0
    assert not made.qkv.weight.grad[DIM:].any()
    assert made.eval()(hidden).loss is None
    assert causal_layer({**CAUSAL, "commitment": 0.0}).train()(hidden).loss is None


def test_an_encoder_commits_its_tokens_but_no_padding():
    made, hidden = encoder_layer(SETTING).train(), states(2, 20).requires_grad_()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 13:] = 0
    assert auxiliary_loss(made) == 0.0  # of no call
    made(hidden, seen=visibility(hidden, attention_mask=mask))
    loss = auxiliary_loss(made)
    assert isinstance(loss, torch.Tensor)
    shared = parts(made, hidden)[0].transpose(1, 2)
    near = torch.einsum("bnhd,hkd->bnhk", shared, made.centroids.directions).argmax(-1)
    own = made.centroids.directions[torch.arange(HEADS), near]
    far = (shared - own).square().mean((2, 3))[mask == 1]
    torch.testing.assert_close(loss, 1e-4 * far.mean().float())
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad[mask == 1].any(-1).all()
    assert not hidden.grad[mask == 0].any()
    assert made.qkv.weight.grad[:DIM].any()
    assert not made.qkv.weight.grad[DIM:].any()
    refresh(made)
    made.eval()(hidden)
    assert auxiliary_loss(made) == 0.0
    free = encoder_layer({**SETTING, "commitment": 0.0}).train()
    free(hidden)
    assert auxiliary_loss(free) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size=0 must be at least 1"),
        ({"clusters": 0}, "clusters=0 must be at least 1"),
        ({"decay": 1.5}, "decay=1.5 must be from 0 to 1"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    for build in (encoder_layer, causal_layer):
        with pytest.raises(ValueError, match=message):
            build({**SETTING, **change})


@pytest.mark.parametrize("build", [encoder_layer, causal_layer])
def test_a_negative_cost_is_named(build):
    with pytest.raises(ValueError, match="commitment=-1"):
        build({**CAUSAL, "commitment": -1})
