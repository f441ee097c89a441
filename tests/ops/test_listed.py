"""Attention to listed keys: against its definition, and lists of blocks as they should be."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from layers.family import compiles_anywhere

from longspan.ops import listed as module
from longspan.ops.listed import (
    blocks_asking,
    causal_listed_attention,
    earlier_random_blocks,
    listed_attention,
    near_blocks,
    random_blocks,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("on_device")


def dense(
    query,
    key,
    value,
    listed,
    *,
    size,
    width=1,
    first: Any = None,
    last: Any = None,
    valid: Any = None,
    spans: Any = None,
    ramp=1,
    at: Any = None,
):
    """The same entry by entry, with a matrix of how much each query sees of each key."""
    batch, queries, heads, d = query.shape
    keys = key.shape[1]
    weight = torch.zeros(batch, heads, queries, keys, dtype=query.dtype)
    entries = listed.expand(batch, heads, -1, -1).tolist()
    for b, h, i in product(range(batch), range(heads), range(queries)):
        block = i // size
        for slot, entry in enumerate(entries[b][h][block]):
            if entry < 0:
                continue
            if first is not None and not first[block, slot] <= i <= last[block, slot]:
                continue
            once = torch.zeros(keys, dtype=query.dtype)
            once[entry * width : entry * width + width] = 1.0
            if at is not None:
                once[max(0, i + at + 1) :] = 0.0
            if valid is not None:
                once = once * valid[b]
            if spans is not None:
                assert first is not None
                left = ramp + spans[h] - (i - first[block, slot])
                once = once * (left / ramp).clamp(0.0, 1.0)
            more = torch.zeros_like(weight)
            more[b, h, i] = 1.0
            weight = weight + more * once
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / d**0.5
    weight = weight * scores.exp()
    total = weight.sum(-1, keepdim=True)
    weight = weight / torch.where(total == 0, 1.0, total)
    return torch.einsum("bhij,bjhd->bihd", weight, value)


def problem(queries, keys, lists, count, size, width=1):
    torch.manual_seed(0)
    query = torch.randn(2, queries, 3, 4, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(2, keys, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    blocks = -(-queries // size)
    listed = torch.randint(-1, -(-keys // width), (*lists, blocks, count))
    listed[..., 0, :] = -1  # a block that sees nothing
    return (query, key, value), listed


def at_a_time(monkeypatch, scores):
    """So many scores, on any device."""
    for name, value in (("_CPU_SCORES", scores), ("_SCORES", scores), ("_TIMES", 10**9)):
        monkeypatch.setattr(module, name, value)


def rules(names, listed, keys):
    """What a call may ask for, by name, for 11 queries in blocks of 4."""
    torch.manual_seed(1)
    asked = {}
    if "between" in names:
        asked["first"] = torch.randint(-2, 12, listed.shape[2:])
        asked["last"] = asked["first"] + torch.randint(-1, 9, listed.shape[2:])
    if "spans" in names:
        spans = torch.tensor([0.4, 1.3, 4.6], dtype=torch.float64, requires_grad=True)
        asked |= {"spans": spans, "ramp": 3}
    if "valid" in names:
        asked["valid"] = torch.rand(2, keys) < 0.7
    if "causal" in names:
        asked["at"] = 2
    return asked


@pytest.mark.parametrize("lists", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize(
    "names",
    ["", "between", "valid", "between valid", "between spans", "causal", "causal valid"],
)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("together", [1, 10**9])
def test_against_the_definition(lists, names, width, together, monkeypatch):
    at_a_time(monkeypatch, together)
    tensors, listed = problem(11, 13, lists, 5, size=4, width=width)
    asked = rules(names, listed, 13)
    found = listed_attention(*tensors, listed, size=4, width=width, **asked)
    wanted = dense(*tensors, listed, size=4, width=width, **asked)
    torch.testing.assert_close(found, wanted)
    assert not found[:, :4].any()
    given = [*tensors, asked["spans"]] if "spans" in asked else tensors
    out = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, given, out),
        torch.autograd.grad(wanted, given, out),
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


@compiles_anywhere
def test_one_graph_serves_texts_that_fill_their_blocks_and_others():
    def attend(query):
        listed = torch.arange(-(-query.shape[1] // 4))[None, None, :, None]
        return listed_attention(query, query, query, listed, size=4, width=4)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for tokens in (7, 8):
        query = torch.randn(2, tokens, 3, 8)
        torch._dynamo.mark_dynamic(query, 1)
        torch.testing.assert_close(run(query), attend(query))


def test_lists_must_fit():
    tensors, listed = problem(11, 13, (1, 1), 5, size=4)
    with pytest.raises(ValueError, match="3 lists for 11 queries in blocks of 3"):
        listed_attention(*tensors, listed, size=3)


def test_who_sees_an_entry_is_said_whole():
    tensors, listed = problem(11, 13, (1, 1), 5, size=4)
    parts: list[dict[str, Any]] = [{"first": listed[0, 0]}, {"spans": torch.ones(3)}]
    for part in parts:
        with pytest.raises(ValueError, match="first and last go together, and spans need them"):
            listed_attention(*tensors, listed, size=4, **part)


def test_who_sees_an_entry_is_said_once():
    tensors, listed = problem(11, 13, (1, 1), 5, size=4)
    with pytest.raises(ValueError, match="and so does at: give either"):
        listed_attention(*tensors, listed, size=4, at=2, first=listed[0, 0], last=listed[0, 0])


@settings(max_examples=30, deadline=None)
@given(
    before=some.integers(0, 20),
    queries=some.integers(1, 20),
    size=some.integers(1, 8),
    width=some.sampled_from([1, 3]),
)
def test_the_last_tokens_of_a_text(before, queries, size, width):
    """As if all of it had been asked, and no key behind a query is seen."""
    tokens = before + queries
    torch.manual_seed(tokens)
    blocks = -(-tokens // size)
    query, key, value = torch.randn(3, 2, tokens, 3, 4, dtype=torch.float64).unbind()
    listed = torch.randint(-1, -(-tokens // width), (1, 3, blocks, 5))
    about = {"size": size, "width": width}
    wanted = dense(query, key, value, listed, **about, at=0)
    begin, end = blocks_asking(query[:, before:], key, size)
    assert end == blocks
    asked = listed[:, :, begin:]
    found = causal_listed_attention(query[:, before:], key, value, asked, **about)
    torch.testing.assert_close(found, wanted[:, before:])


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


def test_earlier_random_blocks_are_others_and_all_alike():
    """Different, before the window, none missing while there are any, and each as likely; the same
    in a longer text."""
    counts = torch.zeros(12, 12)
    for seed in range(400):
        found = earlier_random_blocks(torch.arange(12), 2, 3, 2, seed)
        later = earlier_random_blocks(torch.arange(7, 20), 2, 3, 2, seed)
        assert torch.equal(later[:, :5], found[:, 7:])
        for block in range(12):
            for head in range(2):
                one = [other for other in found[head, block].tolist() if other >= 0]
                assert len(set(one)) == len(one) == min(3, max(0, block - 1))
                assert all(other <= block - 2 for other in one)
                counts[block, one] += 1
    expected = 400 * 2 * 3 / 10
    assert float((counts[11, :10] - expected).abs().max()) < 5 * expected**0.5


@pytest.mark.parametrize("count", [0, 3])
def test_drawing_blocks_is_a_proper_operator(count):
    torch.library.opcheck(random_blocks, (torch.tensor([4, 9]), 9, 2, count, 1, 3))
    torch.library.opcheck(earlier_random_blocks, (torch.arange(4, 9), 2, count, 1, 3))
