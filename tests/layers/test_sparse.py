"""The Sparse Transformer's patterns, against masks written out."""

import pytest
import torch
from layers.family import DIM, HEADS, causal_layer, compiles_anywhere, states, written_out

pytestmark = pytest.mark.usefixtures("on_device")


def strided(head, i, j):
    return i - j < 5 if head < 2 else (i - j) % 5 == 0


def fixed(head, i, j):
    return i // 6 == j // 6 or j % 6 >= 4


@pytest.mark.parametrize("tokens", [1, 6, 7, 40])
@pytest.mark.parametrize(
    ("setting", "sees"),
    [
        ({"kind": "sparse", "stride": 5}, strided),
        ({"kind": "sparse", "stride": 6, "pattern": "fixed", "summary": 2}, fixed),
    ],
)
def test_the_pattern_written_out(setting, sees, tokens):
    made, hidden = causal_layer(setting), states(2, tokens)
    mask = torch.zeros(HEADS, tokens, tokens, dtype=torch.bool)
    for head in range(HEADS):
        for i in range(tokens):
            for j in range(i + 1):
                mask[head, i, j] = sees(head, i, j)
    torch.testing.assert_close(made(hidden).out, written_out(made, hidden, mask))


@compiles_anywhere
@torch.no_grad()
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_it_compiles_whole_for_several_lengths(pattern):
    made = causal_layer({"kind": "sparse", "stride": 5, "pattern": pattern, "summary": 2})
    run = torch.compile(lambda hidden: made(hidden).out, fullgraph=True, backend="eager")
    for tokens in (11, 17):
        hidden = torch.randn(1, tokens, DIM).double()
        torch.testing.assert_close(run(hidden), made(hidden).out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "random"}, "pattern='random' is unknown; choose from strided, fixed"),
        ({"stride": 0}, "stride=0 must be at least 1"),
        ({"pattern": "fixed", "summary": 9}, "summary=9 must be from 1 to stride=5"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        causal_layer({"kind": "sparse", "stride": 5, **change})
