"""Attention to listed keys: against a dense mask, and lists of blocks as they should be."""

import pytest
import torch

from longspan.ops import listed as module
from longspan.ops.listed import listed_attention, near_blocks, random_blocks, tokens_of

pytestmark = pytest.mark.usefixtures("on_device")


def dense(query, key, value, listed, size, visible=None):
    """The same with a matrix of how often, or with which bias, each query sees each key."""
    batch, queries, heads, d = query.shape
    keys = key.shape[1]
    weight = torch.zeros(batch, heads, queries, keys, dtype=query.dtype)
    bias = torch.zeros_like(weight)
    listed = listed.expand(batch, heads, -1, -1)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                for j in listed[b, h, i // size].tolist():
                    if j < 0:
                        continue
                    seen = torch.tensor(True)
                    if visible is not None:
                        seen = visible(torch.tensor(i), torch.tensor(j))
                    if seen.dtype != torch.bool:
                        bias[b, h, i, j], seen = seen, torch.tensor(True)
                    weight[b, h, i, j] += float(seen)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / d**0.5 + bias
    weight = weight * scores.exp()
    total = weight.sum(-1, keepdim=True)
    weight = weight / torch.where(total == 0, 1.0, total)
    return torch.einsum("bhij,bjhd->bihd", weight, value)


def problem(queries, keys, lists, count, size):
    torch.manual_seed(0)
    query = torch.randn(2, queries, 3, 4, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(2, keys, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    blocks = -(-queries // size)
    listed = torch.randint(-1, keys, (*lists, blocks, count))
    listed[..., 0, :] = -1  # a block that sees nothing
    return (query, key, value), listed


def at_a_time(monkeypatch, scores):
    """So many scores, on any device."""
    for name, value in (("_CPU_SCORES", scores), ("_SCORES", scores), ("_TIMES", 10**9)):
        monkeypatch.setattr(module, name, value)


def causal(place, keys):
    return keys <= place


def nearer_is_better(place, keys):
    return -(place - keys).abs() / 3.0


@pytest.mark.parametrize("lists", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("visible", [None, causal, nearer_is_better])
@pytest.mark.parametrize("together", [1, 10**9])
def test_against_a_mask(lists, visible, together, monkeypatch):
    at_a_time(monkeypatch, together)
    tensors, listed = problem(11, 13, lists, 5, size=4)
    found = listed_attention(*tensors, listed, visible, size=4)
    wanted = dense(*tensors, listed, 4, visible)
    torch.testing.assert_close(found, wanted)
    assert not found[:, :4].any()
    out = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, tensors, out),
        torch.autograd.grad(wanted, tensors, out),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_what_was_dropped_is_dropped_again(monkeypatch):
    """What comes out is linear in the values, so it must be what their gradients say."""
    at_a_time(monkeypatch, 1)
    tensors, listed = problem(11, 13, (2, 3), 5, size=4)
    torch.manual_seed(1)
    out = listed_attention(*tensors, listed, size=4, dropout_p=0.5)
    after = torch.rand(3)
    other = torch.randn_like(out)
    (by_value,) = torch.autograd.grad(out, tensors[2], other)
    torch.testing.assert_close((by_value * tensors[2]).sum(), (out * other).sum())
    torch.manual_seed(1)
    again = listed_attention(*tensors, listed, size=4, dropout_p=0.5)
    assert torch.equal(again, out)
    assert torch.equal(torch.rand(3), after)


def test_what_the_bias_depends_on_learns(monkeypatch):
    tensors, listed = problem(11, 13, (1, 3), 5, size=4)
    slope = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)

    def slanted(place, keys, slope):
        return -(place - keys).abs() * slope

    found = []
    for together in (1, 10**9):
        at_a_time(monkeypatch, together)
        out = listed_attention(*tensors, listed, slanted, slope, size=4)
        found.append(torch.autograd.grad(out.square().sum(), slope)[0])
    torch.testing.assert_close(*found)
    assert found[0].item() != 0.0


def test_lists_must_fit():
    tensors, listed = problem(11, 13, (1, 1), 5, size=4)
    with pytest.raises(ValueError, match="3 lists for 11 queries in blocks of 3"):
        listed_attention(*tensors, listed, size=3)


def test_tokens_of_blocks():
    found = tokens_of(torch.tensor([[0, 2], [-1, 1]]), 3, 7)
    assert found.tolist() == [[0, 1, 2, 6, -1, -1], [-1, -1, -1, 3, 4, 5]]
    near = near_blocks(3, 1, torch.device("cpu"))
    assert near.tolist() == [[-1, 0, 1], [0, 1, 2], [1, 2, -1]]


def test_random_blocks_are_others_and_all_alike():
    """Different, outside the window, none missing while there are any, and each as likely."""
    counts = torch.zeros(12, 12)
    for seed in range(400):
        found = random_blocks(torch.tensor([12]), 12, 2, 3, 1, seed)[0]
        for block in range(12):
            for head in range(2):
                one = found[head, block].tolist()
                assert len(set(one)) == 3
                assert all(0 <= other < 12 and abs(other - block) > 1 for other in one)
                counts[block, one] += 1
    inner = counts[5]
    assert set(inner.nonzero().flatten().tolist()) == {0, 1, 2, 3, 7, 8, 9, 10, 11}
    expected = 400 * 2 * 3 / 9
    assert float((inner[inner > 0] - expected).abs().max()) < 5 * expected**0.5


def test_random_blocks_follow_a_documents_own_length():
    both = random_blocks(torch.tensor([4, 9]), 9, 2, 3, 1, seed=3)
    short = random_blocks(torch.tensor([4]), 4, 2, 3, 1, seed=3)
    assert torch.equal(both[:1, :, :4], short)
    assert int(both[0, :, :4].max()) < 4
    # Of four blocks the first has two others outside its window, the second one.
    assert (short[0, :, 0] >= 0).sum(-1).tolist() == [2, 2]
    assert (short[0, :, 1] >= 0).sum(-1).tolist() == [1, 1]
