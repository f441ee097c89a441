"""Linformer: against its formula written out, and what follows from it."""

from typing import Any

import pytest
import torch
from layers.family import DIM, HEADS, encoder_layer, heads_of, joined, states

import longspan
from longspan.ops import visibility

pytestmark = pytest.mark.usefixtures("on_device")

LINEAR = {"kind": "linformer", "length": 40, "rank": 6}


def dense(query, key, value):
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return weights @ value


@pytest.mark.parametrize("sharing", ["none", "heads", "key-value", "layers"])
@pytest.mark.parametrize("tokens", [40, 23])
def test_the_formula(sharing, tokens):
    made, hidden = encoder_layer({**LINEAR, "sharing": sharing}), states(2, tokens)
    query, key, value = heads_of(made, hidden)
    e, f = made.reduction.weight[0, ..., :tokens], made.reduction.weight[-1, ..., :tokens]
    torch.testing.assert_close(made(hidden), joined(dense(query, e @ key, f @ value)))


@pytest.mark.parametrize("reduction", ["pool", "convolution"])
def test_pool_and_convolution_written_out(reduction):
    made = encoder_layer({**LINEAR, "reduction": reduction, "sharing": "none"})
    hidden = states(2, 19)
    query, key, value = heads_of(made, hidden)

    def fewer(x, which):
        pieces = []
        for piece in x.split(7, dim=2):  # 6 keys for 40 tokens, so one for 7
            if reduction == "pool":
                pieces.append(piece.mean(2))
            else:
                weight = made.own.weight[which]
                taps = [piece[:, :, [s]] @ weight[:, s] for s in range(piece.shape[2])]
                pieces.append(torch.stack(taps).sum(0)[:, :, 0])
        return torch.stack(pieces, 2)

    torch.testing.assert_close(made(hidden), joined(dense(query, fewer(key, 0), fewer(value, -1))))


def test_an_identity_makes_it_dense():
    made, hidden = encoder_layer({**LINEAR, "rank": 40}), states(2, 40)
    with torch.no_grad():
        made.own.weight.copy_(torch.eye(40))
    torch.testing.assert_close(made(hidden), joined(dense(*heads_of(made, hidden))))


def test_the_rank_is_what_it_says():
    """The matrix that is applied to the values, n x n if it were formed, has rank k."""
    made = encoder_layer(LINEAR)
    query, key, _ = heads_of(made, states(1, 40))
    weight = made.own.weight[0]
    weights = (query @ (weight @ key).mT / query.shape[-1] ** 0.5).softmax(-1) @ weight
    assert torch.linalg.matrix_rank(weights).max() <= 6


@pytest.mark.parametrize(
    ("sharing", "matrices"),
    [("none", 2 * 4 * HEADS), ("heads", 8), ("key-value", 4), ("layers", 1)],
)
def test_how_many_matrices_a_model_of_four_layers_has(sharing, matrices):
    model = model_of(sharing=sharing)
    blocks: Any = model.layers
    shared = [p for name, p in model.named_parameters() if ".own." in name]
    assert sum(p.numel() for p in shared) == matrices * 6 * 40
    assert len({id(one.attention.reduction) for one in blocks}) == (1 if matrices == 1 else 4)


def model_of(**options):
    config = longspan.LongspanConfig(
        vocab_size=30,
        hidden_size=DIM,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        intermediate_size=32,
        attention={**LINEAR, **options},
    )
    return longspan.LongspanModel(config)


def test_a_shared_matrix_is_saved_once_and_found_again(tmp_path):
    torch.manual_seed(0)
    model = model_of(sharing="layers").eval()
    ids = torch.randint(3, 30, (1, 12))
    model.save_pretrained(tmp_path)
    again = longspan.LongspanModel.from_pretrained(tmp_path).eval()
    assert torch.equal(model(ids).last_hidden_state, again(ids).last_hidden_state)


def test_layers_that_cannot_share_are_told_so():
    settings = [{**LINEAR, "sharing": "layers", "rank": rank} for rank in (4, 4, 4, 5)]
    config = longspan.LongspanConfig(
        hidden_size=DIM, num_attention_heads=HEADS, num_hidden_layers=4, attention=settings
    )
    with pytest.raises(ValueError, match="must agree in reduction, length, rank"):
        longspan.LongspanModel(config)


@torch.no_grad()
def test_the_last_token_changes_the_first_row():
    """Which is why there is no causal form."""
    made, hidden = encoder_layer(LINEAR), states(1, 40)
    other = hidden.clone()
    other[:, -1] += 1.0
    assert float((made(hidden) - made(other))[:, 0].abs().max()) > 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 41}, "rank=41 must be from 1 to length=40"),
        ({"rank": 0}, "rank=0"),
        ({"sharing": "everything"}, "sharing='everything' is unknown; choose from none, heads"),
        ({"reduction": "magic"}, "reduction='magic' is unknown"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        encoder_layer({**LINEAR, **change})


def test_a_longer_document_is_refused():
    with pytest.raises(ValueError, match=r"41 tokens, .+ length=40: shorten"):
        encoder_layer(LINEAR)(states(1, 41))


@pytest.mark.parametrize("left", [0, 3, 9])
def test_padding_beyond_its_length_is_not_a_longer_document(left):
    """Alone in its batch or not."""
    made, document = encoder_layer({**LINEAR, "rotary": 100.0}), states(1, 40)
    hidden = torch.cat((states(1, left), document, states(1, 9 - left)), 1).repeat(2, 1, 1)
    mask = torch.zeros(2, 49, dtype=torch.long)
    mask[:, left : left + 40] = 1
    places = torch.arange(49).repeat(2, 1) - left
    for rows in (1, 2):
        own = hidden[:rows]
        seen = visibility(own, attention_mask=mask[:rows])
        out = made(own, seen=seen, position_ids=places[:rows])
        torch.testing.assert_close(out[:, left : left + 40], made(document).expand(rows, -1, -1))
        assert not out[mask[:rows] == 0].any()
    mask[1] = 1
    with pytest.raises(ValueError, match="49 tokens"):
        made(hidden, seen=visibility(hidden, attention_mask=mask))
