"""Maps of attention weights against the dense oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.cases import FEATURES, Case, cases, visible

from longspan.ops import global_positions, visibility
from longspan.ops.window.maps import attention_map


def dense(case: Case, query, key) -> torch.Tensor:
    mask = visible(case, torch.device("cpu"))
    key = key.repeat_interleave(case.heads // case.key_heads, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * case.head_dim**-0.5
    blank = ~mask.any(-1, keepdim=True)
    return scores.masked_fill(~mask & ~blank, -torch.inf).softmax(-1).masked_fill(blank, 0.0)


@given(st.data())
@settings(max_examples=40)
def test_rows_are_those_of_dense_attention(data):
    case = data.draw(cases(data.draw(st.sampled_from(FEATURES)), most_tokens=50, most_heads=2))
    case = case.with_(global_rows=False, window=tuple(min(side, 20) for side in case.window))
    given_ = case.inputs(torch.float32, torch.device("cpu"))
    query, key, _ = given_["tensors"]
    masks = given_["masks"]
    seen = visibility(query, **masks)
    chosen = seen.is_global()
    places = None if chosen is None else global_positions(chosen)
    made = attention_map(
        query, key, window=case.window, dilation=case.dilation, seen=seen, places=places
    )
    truth = dense(case, query, key)
    for token in range(case.tokens):
        for head in range(case.heads):
            for batch in range(case.batch):
                positions, weights = made.row(token, head, batch)
                full = torch.zeros(case.tokens).index_add(0, positions, weights)
                torch.testing.assert_close(full, truth[batch, head, token], rtol=1e-4, atol=1e-6)
                assert len(positions.unique()) == len(positions), "each key stands once"


def test_beyond_the_map():
    query = torch.randn(1, 5, 2, 4)
    made = attention_map(query, query, window=2)
    with pytest.raises(IndexError, match="token=5 is not in 0 to 4"):
        made.row(5, 0)
    with pytest.raises(IndexError, match="head=2 is not in 0 to 1"):
        made.row(0, 2)
