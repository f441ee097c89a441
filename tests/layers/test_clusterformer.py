"""Cluster-Former: chunks of what is alike, and centroids found while training."""

from typing import Any

import pytest
import torch
from layers.family import DIM, HEADS, encoder_layer, heads_of, joined, states

import longspan
from longspan.layers.observing import refresh
from longspan.layers.registry import build_attention
from longspan.ops import visibility

pytestmark = pytest.mark.usefixtures("on_device")

SETTING = {"kind": "clusterformer", "clusters": 4, "chunk": 6, "bank": 32, "every": 4}


def chunked(made, hidden, order):
    """Attention within chunks of a row sorted into `order`, one token after the other."""
    query, key, value = heads_of(made, hidden)
    seen = torch.zeros(hidden.shape[1], hidden.shape[1], dtype=torch.bool)
    for a, i in enumerate(order):
        for b, j in enumerate(order):
            seen[i, j] = a // made.chunk == b // made.chunk
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return joined(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value)


def test_before_the_first_kmeans_order_is_that_of_positions():
    torch.manual_seed(0)
    made: Any = build_attention(DIM, HEADS, {**SETTING, "every": 6}).double()
    hidden = states(1, 20)
    torch.testing.assert_close(made(hidden), chunked(made, hidden, range(20)))
    made.train()(hidden)
    refresh(made)  # one step short of 3/8
    torch.testing.assert_close(made(hidden), chunked(made, hidden, range(20)))
    # A checkpoint of a run that clustered later has more steps, but no centroids either.
    made.centroids.steps.fill_(5)
    torch.testing.assert_close(made(hidden), chunked(made, hidden, range(20)))


def test_kmeans_go_on_from_where_centroids_were():
    """So that the number of a cluster, by which tokens are sorted, stays the same."""
    torch.manual_seed(0)
    made: Any = build_attention(DIM, HEADS, {**SETTING, "bank": 200, "every": 6})
    directions, found = made.centroids.directions, []
    ways = torch.nn.functional.normalize(torch.randn(4, DIM), dim=-1)
    for _ in range(16):
        before = directions.clone()
        made.train()((ways.repeat(25, 1) + 0.1 * torch.randn(100, DIM))[None])
        refresh(made)
        found.append(torch.equal(before, directions))
        if not found[-1] and found.count(False) > 1:
            assert float((before * directions).sum(-1).min()) > 0.9
    assert [step + 1 for step, same in enumerate(found) if not same] == [2, 8, 14]


def test_kmeans_do_not_come_right_before_an_evaluation():
    """Which would judge a model by an order of tokens that it never saw; they are at round numbers
    of steps, mostly."""
    made: Any = build_attention(DIM, HEADS, {"kind": "clusterformer"})
    steps = [made.centroids.first + made.centroids.every * k for k in range(100)]
    assert not any(step % round == 0 for step in steps for round in (50, 80, 100, 250, 333))


def test_tokens_are_sorted_by_their_nearest_centroid():
    made, hidden = encoder_layer(SETTING), states(1, 20)
    own = (hidden[0] @ made.centroids.directions[0].mT).argmax(-1).tolist()
    assert len(set(own)) > 1
    order = sorted(range(20), key=lambda i: (own[i], i))
    torch.testing.assert_close(made(hidden), chunked(made, hidden, order))


def test_clusters_that_nobody_is_in_change_nothing():
    """Centroids that are nearest to none: before, between and behind those of others."""
    made, hidden = encoder_layer({**SETTING, "clusters": 7, "bank": 32}), states(1, 20)
    side = torch.nn.functional.normalize(states(1, 1)[0, 0], dim=-1)
    nobody = -hidden[0].sum(0) - 100.0 * side  # all are on the other side
    hidden = hidden + 100.0 * side
    with torch.no_grad():
        made.centroids.directions[0, [0, 3, 6]] = torch.nn.functional.normalize(nobody, dim=-1)
        made.centroids.directions[0, [1, 2, 4, 5]] += side
    own = (hidden[0] @ made.centroids.directions[0].mT).argmax(-1).tolist()
    assert set(own) <= {1, 2, 4, 5}
    order = sorted(range(20), key=lambda i: (own[i], i))
    torch.testing.assert_close(made(hidden), chunked(made, hidden, order))


@torch.no_grad()
def test_tokens_of_other_chunks_do_not_matter():
    made, hidden = encoder_layer(SETTING), states(1, 20)
    own = made.clusters(hidden)[0, :, 0, 0].tolist()
    order = sorted(range(20), key=lambda i: (own[i], i))
    other = hidden.clone()
    other[:, order[0]] *= 1.5  # another length: the same cluster
    change = (made(other) - made(hidden)).abs().amax((0, 2))
    assert all((float(change[i]) > 1e-9) == (at < 6) for at, i in enumerate(order))


def test_the_bank_holds_tokens_of_the_last_steps_and_no_padding():
    torch.manual_seed(0)
    made: Any = build_attention(DIM, HEADS, {**SETTING, "every": 6})
    for step in range(4):
        hidden = torch.full((2, 9, DIM), float(step + 1))
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[0, 3:] = 0
        hidden[0, 3:] = 99.0
        made.train()(hidden, seen=visibility(hidden, attention_mask=mask))
        refresh(made)
        if step == 1:
            assert sorted(set(made.centroids.bank[:, 0].tolist())) == [1.0, 2.0]
    counts = torch.unique(made.centroids.bank[:, 0], return_counts=True)
    assert [t.tolist() for t in counts] == [[3.0, 4.0], [16, 16]]


@torch.no_grad()
def test_a_call_changes_nothing():
    made, hidden = encoder_layer(SETTING).train(), states(1, 30)
    before = {name: buffer.clone() for name, buffer in made.named_buffers()}
    first = made(hidden)
    assert torch.equal(made(hidden), first)
    assert all(torch.equal(buffer, before[name]) for name, buffer in made.named_buffers())
    refresh(made)
    assert int(made.centroids.steps) == int(before["centroids.steps"]) + 1
    made.eval()(hidden)
    refresh(made)  # nothing was noted
    assert int(made.centroids.steps) == int(before["centroids.steps"]) + 1


def test_windows_around_it():
    """As the paper has it: one layer of clusters, the others of windows."""
    torch.manual_seed(0)
    config = longspan.LongspanConfig(
        vocab_size=30,
        hidden_size=DIM,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        intermediate_size=32,
        max_position_embeddings=66,
        attention=[{"window": 8}, SETTING, {"window": 8}],
    )
    model = longspan.LongspanModel(config)
    ids = torch.randint(3, 30, (2, 25))
    for _ in range(4):
        model.train()(ids)
        refresh(model)
    assert model(ids).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clusters": 0}, "clusters=0 must be at least 1"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"bank": 3}, "bank=3 must hold a token for each of clusters=4"),
        ({"every": 0}, "every=0"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        encoder_layer({**SETTING, **change})
