"""Reformer: buckets, and attention as transformers' Reformer has it on the same ones."""

import pytest
import torch
from layers.family import DEVICE, DIM, HEADS, causal_layer, encoder_layer, states
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

pytestmark = pytest.mark.usefixtures("on_device")

SETTING = {"kind": "reformer", "buckets": 4, "rounds": 2, "chunk": 5}
CAUSAL = {"kind": "reformer", "buckets": 4, "rounds": 2, "reach": 5}


def theirs(made, hidden, clusters, rounds, chunk):
    """What transformers' layer of the same weights makes of the same buckets."""
    config = ReformerConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        attention_head_size=DIM // HEADS,
        num_hashes=rounds,
        num_buckets=4,
        lsh_attn_chunk_length=chunk,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=False,
    )
    other = LSHSelfAttention(config).double().eval()
    with torch.no_grad():
        for own, weight in zip(
            (other.query_key, other.value), made.qkv.weight.split(DIM), strict=True
        ):
            own.weight.copy_(weight)
    buckets = clusters.permute(0, 2, 3, 1) + 4 * torch.arange(rounds)[:, None]
    return other(hidden, buckets=buckets.flatten(2)).hidden_states


def sets(clusters, chunk):
    """Of clusters [tokens, rounds]: which others each token sees in each round, and whether any
    of these is seen twice or lies in a chunk that has none before it."""
    tokens, rounds = clusters.shape
    plain = torch.ones(tokens, dtype=torch.bool)
    seen = torch.zeros(tokens, tokens, dtype=torch.long)
    for number in range(rounds):
        own = clusters[:, number].tolist()
        order = sorted(range(tokens), key=lambda i, own=own: (own[i], i))
        at = torch.empty(tokens, dtype=torch.long)
        at[order] = torch.arange(tokens) // chunk
        plain &= at > 0
        apart = at[:, None] - at
        seen += (apart >= 0) & (apart <= 1)
    seen.fill_diagonal_(0)
    return plain & (seen.amax(-1) < 2)


@torch.no_grad()
@pytest.mark.parametrize(("rounds", "chunk"), [(1, 8), (1, 4), (2, 4)])
def test_transformers_reformer_on_the_same_buckets(rounds, chunk):
    """But for the first chunk, which there looks at the last, and for keys that two rounds have
    in common, which there count twice."""
    made = encoder_layer({**SETTING, "rounds": rounds, "chunk": chunk, "bias": False})
    hidden = states(2, 64)
    shared = made.qkv(hidden).unflatten(-1, (2, HEADS, -1))[:, :, 0]
    clusters = made.clusters(shared)
    found = made(hidden).unflatten(-1, (HEADS, -1))
    wanted = theirs(made, hidden, clusters, rounds, chunk).unflatten(-1, (HEADS, -1))
    compared = 0
    for b in range(2):
        for h in range(HEADS):
            rows = sets(clusters[b, :, h], chunk)
            compared += int(rows.sum())
            # Their keys have a small number added to their length.
            torch.testing.assert_close(found[b, rows, h], wanted[b, rows, h], rtol=1e-4, atol=1e-5)
    assert compared > 40


@torch.no_grad()
def test_a_bucket_is_the_nearest_of_directions_and_their_opposites():
    made, points = encoder_layer(SETTING), torch.randn(2, 9, HEADS, 8, dtype=torch.float64)
    found = made.hashes(points)
    for number in range(2):
        turned = torch.einsum("bnhd,hkd->bnhk", points, made.hashes.directions[number])
        assert torch.equal(found[..., number], torch.cat((turned, -turned), -1).argmax(-1))
    opposite = (made.hashes(-points) - found).abs()
    assert (opposite == 2).all()


@torch.no_grad()
def test_near_tokens_share_a_bucket_more_often():
    torch.manual_seed(0)
    made = encoder_layer({**SETTING, "buckets": 8, "rounds": 64})
    point, noise, far = torch.randn(3, 1, 1, HEADS, 8, device="cpu").double().to(DEVICE)
    buckets = [made.hashes(one) for one in (point, point + 0.1 * noise, far)]
    same = [float((buckets[0] == other).double().mean()) for other in buckets[1:]]
    assert same[0] > 0.7 > 0.4 > same[1]


@torch.no_grad()
def test_more_rounds_come_nearer_to_seeing_everything():
    """Dense attention without oneself, from buckets that miss less and less."""
    hidden = states(1, 48)
    far = []
    for rounds in (1, 4, 32):
        made = encoder_layer({**SETTING, "rounds": rounds, "chunk": 6})
        shared, value = made.qkv(hidden).unflatten(-1, (2, HEADS, -1)).transpose(1, 3).unbind(2)
        scores = shared @ torch.nn.functional.normalize(shared, dim=-1).mT
        scores = scores.masked_fill(torch.eye(48, dtype=torch.bool), -torch.inf)
        wanted = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        far.append(float((made(hidden) - wanted).square().mean() / wanted.square().mean()))
    assert far[0] > far[1] > far[2]
    assert far[2] < 0.01


@torch.no_grad()
@pytest.mark.parametrize("layer", [encoder_layer, causal_layer])
def test_fresh_directions_are_new_in_every_call_of_training_alone(layer):
    setting = {"kind": "reformer", "buckets": 8, "rounds": 1, "fresh": True}
    made, hidden = layer({**setting, ("chunk" if layer is encoder_layer else "reach"): 3}), None
    hidden = states(1, 40)
    run = made if layer is encoder_layer else lambda x: made(x).out
    assert torch.equal(run(hidden), run(hidden))
    before = made.hashes.directions.clone()
    made.train()
    torch.manual_seed(3)
    first, second = run(hidden), run(hidden)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(run(hidden), first)
    assert torch.equal(made.hashes.directions, before)


def test_fresh_directions_and_a_state_do_not_go_together():
    made = causal_layer({**CAUSAL, "fresh": True}).train()
    with pytest.raises(ValueError, match="train without state, or with fresh=False"):
        made(states(1, 5), keep_state=True)
    made(states(1, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buckets": 5}, "buckets=5 must be even"),
        ({"buckets": 0}, "buckets=0 must be even, 2 or more"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        encoder_layer({**SETTING, **change})


def test_a_wrong_reach_is_named():
    with pytest.raises(ValueError, match="reach=0 must be at least 1"):
        causal_layer({**CAUSAL, "reach": 0})
