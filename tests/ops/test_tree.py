"""Attention to spans of a tree: against the definition, span by span, token by token."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from longspan.ops.tree import causal_tree_attention, tree_attention

pytestmark = pytest.mark.usefixtures("on_device")


def spans(token, tokens, near, causal):
    """(begin, end) of the spans that a token sees, straight from the definition."""

    def far(size, number):
        begin, last = number * size, number * size + size - 1
        return max(begin - token, token - last) >= near * (size - 1)

    found, size = [], 1
    while size < 4 * tokens:
        for number in range(-(-tokens // size)):
            begin, end = number * size, (number + 1) * size
            largest = far(size, number) and not far(2 * size, number // 2)
            if largest and (end - 1 <= token or not causal):
                found.append((begin, min(end, tokens)))
        size *= 2
    return found


def dense(query, key, value, near, causal, valid=None):
    batch, tokens, _, d = query.shape
    valid = torch.ones(batch, tokens, dtype=torch.bool) if valid is None else valid
    out = torch.zeros_like(query)
    for row in range(batch):
        real = valid[row]
        for i in range(tokens):
            taken = [
                torch.arange(a, b)[real[a:b]]
                for a, b in spans(i, tokens, near, causal)
                if real[a:b].any()
            ]
            if taken:
                keys, values = (
                    torch.stack([t[row, at].mean(0) for at in taken]) for t in (key, value)
                )
                weights = (torch.einsum("hd,jhd->hj", query[row, i], keys) / d**0.5).softmax(-1)
                out[row, i] = torch.einsum("hj,jhd->hd", weights, values)
    return out


def tensors(tokens, dtype=torch.float64) -> Any:
    torch.manual_seed(0)
    return [
        torch.randn(2, tokens, 2, 4, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    ]


def same(found, wanted, given):
    torch.testing.assert_close(found, wanted)
    out = torch.randn_like(found)
    both = (torch.autograd.grad(t, given, out) for t in (found, wanted))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_spans_share_no_token_and_leave_none_out(causal):
    for tokens, near in ((1, 1), (37, 1), (64, 3), (100, 2)):
        for token in range(tokens):
            seen = spans(token, tokens, near, causal)
            covered = sorted(place for a, b in seen for place in range(a, b))
            assert covered == list(range(token + 1 if causal else tokens))
            for size in {b - a for a, b in seen}:
                assert sum(b - a == size for a, b in seen) <= 2 * (near + 2)


@settings(max_examples=10, deadline=None)
@given(some.integers(1, 50), some.integers(1, 6), some.integers(0, 2**50 - 1))
def test_against_the_definition(tokens, near, holes):
    given = tensors(tokens)
    valid = torch.tensor([[True] * tokens, [not holes >> i & 1 for i in range(tokens)]])
    same(tree_attention(*given, near=near), dense(*given, near=near, causal=False), given)
    found = tree_attention(*given, near=near, valid=valid)
    same(found, dense(*given, near=near, causal=False, valid=valid), given)
    if not valid[1].any():
        assert not found[1].any()


@settings(max_examples=10, deadline=None)
@given(some.integers(1, 50), some.integers(1, 6))
def test_causally_against_the_definition(tokens, near):
    given = tensors(tokens)
    found, _ = causal_tree_attention(*given, near=near)
    same(found, dense(*given, near=near, causal=True), given)


@pytest.mark.parametrize("near", [1, 3])
@pytest.mark.parametrize("sizes", [1, 7, [100, 1, 63, 36]])
def test_a_tree_goes_on_where_it_ended(near, sizes):
    given = tensors(200)
    whole, last = causal_tree_attention(*given, near=near)
    out, tree = [], None
    for pieces in zip(*(t.split(sizes, dim=1) for t in given), strict=True):
        done, tree = causal_tree_attention(*pieces, near=near, before=tree)
        out.append(done)
    torch.testing.assert_close(torch.cat(out, 1), whole)
    assert tree is not None
    assert tree.tokens == last.tokens == 200
    torch.testing.assert_close(tree.both, last.both)
    assert all(level.both.shape[1] <= 2 * near + 4 for level in tree.levels(near))


def test_with_everything_near_it_is_dense_attention():
    query, key, value = tensors(50)
    weights = (torch.einsum("bihd,bjhd->bhij", query, key) / 2.0).softmax(-1)
    wanted = torch.einsum("bhij,bjhd->bihd", weights, value)
    torch.testing.assert_close(tree_attention(query, key, value, near=50), wanted)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype):
    given, low = tensors(90), tensors(90, dtype)
    for found, wanted in (
        (tree_attention(*low, near=2), tree_attention(*given, near=2)),
        (causal_tree_attention(*low, near=2)[0], causal_tree_attention(*given, near=2)[0]),
    ):
        assert found.dtype == dtype
        far = 8 * torch.finfo(dtype).eps * float(wanted.abs().max())
        assert float((found - wanted).abs().max()) < far
