"""Documents made shorter: pools as written out, wherever documents stand."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from longspan.ops import visibility
from longspan.ops.shorten import count_pools, shorten
from longspan.ops.window import Visibility
from longspan.ops.window.pattern import describe

pytestmark = pytest.mark.usefixtures("on_device")


def pooled(document, valid, stride):
    """[tokens, dim] -> [pools, dim], one pool after the other."""
    groups = [slice(0, 1)]
    groups += [slice(i, i + stride) for i in range(1, len(document), stride)]
    return torch.stack(
        [document[g][valid[g]].mean(0) if valid[g].any() else document[0] * 0 for g in groups]
    )


@settings(max_examples=60, deadline=None)
@given(some.integers(1, 20), some.integers(2, 5), some.integers(0, 2**20 - 1))
def test_padding_may_stand_anywhere(tokens, stride, holes):
    torch.manual_seed(0)
    hidden = torch.randn(2, tokens, 3, dtype=torch.float64)
    valid = torch.tensor([[True] * tokens, [not holes >> i & 1 for i in range(tokens)]])
    pools = shorten(hidden, visibility(hidden, attention_mask=valid), stride)
    coarse = pools.mean(hidden)
    assert coarse.shape[1] == count_pools(tokens, stride)
    for row in (0, 1):
        places = valid[row].nonzero().flatten().tolist() or [0]
        own = slice(places[0], places[-1] + 1)
        wanted = pooled(hidden[row, own], valid[row, own], stride)
        torch.testing.assert_close(coarse[row, : len(wanted)], wanted)
        assert not coarse[row, len(wanted) :].any()
        for i in places if valid[row].any() else []:
            number = (i - places[0] + stride - 1) // stride
            assert torch.equal(pools.spread(coarse)[row, i], coarse[row, number])
    assert not pools.spread(coarse)[~valid].any()


@pytest.mark.parametrize("bounds", [[0, 9], [0, 1, 4, 4, 9], [0, 2, 7]])
def test_packed_documents_are_shortened_apart(bounds):
    hidden = torch.randn(1, 9, 3)
    # As on a GPU, where nobody looks whether boundaries leave tokens out.
    bounded = {"attention_mask": None, "global_mask": None, "cu_seqlens": torch.tensor(bounds)}
    seen = describe(hidden, **bounded)
    pools = shorten(hidden, seen, 2)
    parts = [
        shorten(hidden[:, a:b], Visibility(), 2).mean(hidden[:, a:b])
        for a, b in pairwise(bounds)
        if b > a
    ]
    torch.testing.assert_close(pools.mean(hidden), torch.cat(parts, 1))
    ends = torch.tensor([0, *(part.shape[1] for part in parts)]).cumsum(0)
    assert pools.bounds is not None
    assert torch.equal(pools.bounds, ends)
    assert not pools.spread(torch.ones(1, pools.length, 1))[0, bounds[-1] :].any()


def test_masks_and_places_of_pools():
    hidden = torch.zeros(1, 6, 2)
    pools = shorten(hidden, Visibility(), 2)  # 0 | 1 2 | 3 4 | 5
    chosen = torch.tensor([[False, False, True, False, False, False]])
    assert pools.any(chosen).tolist() == [[False, True, False, False]]
    assert pools.earliest(torch.arange(10, 16)[None]).tolist() == [[10, 11, 13, 15]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up_in_full(dtype):
    hidden = torch.full((1, 4097, 1), 0.1, dtype=dtype)
    pools = shorten(hidden, Visibility(), 4096)
    assert pools.mean(hidden)[0, :, 0].tolist() == [hidden[0, 0, 0].item()] * 2
