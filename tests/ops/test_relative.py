"""Relative positions against the formula written out, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.ops import relative as op
from longspan.ops.relative import Relative, banded_attention, relative_shift

pytestmark = pytest.mark.usefixtures("on_device")


def tensors(queries, tokens, heads=3, dim=4, batch=2, seed=0):
    torch.manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    positions = Relative(make(tokens, heads, dim), make(heads, dim), make(heads, dim))
    query = make(batch, queries, heads, dim)
    return query, make(batch, tokens, heads, dim), make(batch, tokens, heads, dim), positions


def dense(query, key, value, *, left, dilation, relative):
    """One pair of tokens after the other, straight from the formula."""
    batch, queries, heads, dim = query.shape
    tokens = key.shape[1]
    rows = []
    for b in range(batch):
        for i in range(tokens - queries, tokens):
            for h in range(heads):
                q = query[b, i - tokens + queries, h]
                seen = [
                    j
                    for j in range(i + 1)
                    if (i - j) % dilation[h] == 0 and (left is None or i - j <= left * dilation[h])
                ]
                scores = []
                for j in seen:
                    if relative is None:
                        scores.append(q @ key[b, j, h])
                    else:
                        table, u, v, _ = relative
                        scores.append((q + u[h]) @ key[b, j, h] + (q + v[h]) @ table[i - j, h])
                weights = (torch.stack(scores) / math.sqrt(dim)).softmax(0)
                rows.append(weights @ value[b, seen, h])
    return torch.stack(rows).view(batch, queries, heads, dim)


def compare(queries, memory, left, dilation, with_positions=True):
    query, key, value, positions = tensors(queries, queries + memory)
    positions = positions if with_positions else None
    options = {"left": left, "dilation": dilation, "relative": positions}
    found = banded_attention(query, key, value, **options)
    wanted = dense(query, key, value, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    inputs = [query, key, value, *(positions or ())[:3]]
    weight = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@given(
    queries=st.integers(1, 13),
    memory=st.integers(0, 9),
    left=st.one_of(st.none(), st.integers(0, 8)),
    dilation=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    with_positions=st.booleans(),
)
def test_the_formula(queries, memory, left, dilation, with_positions):
    """Outputs and all gradients, with a memory before the queries, windows and dilated heads."""
    compare(queries, memory, left, dilation, with_positions)


@pytest.mark.parametrize("memory", [0, 7])
def test_blocks_join_without_a_seam(monkeypatch, memory):
    monkeypatch.setattr(op, "_BLOCK", 4)
    monkeypatch.setattr(op, "_LARGEST_BLOCK", 6)
    for left, dilation in ((3, [1, 1, 1]), (5, [2, 1, 3]), (None, [1, 2, 1])):
        compare(19, memory, left, dilation)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("left", "dilation"), [(6, 1), (3, [1, 2, 1])])
def test_queries_may_be_projected_instead_of_distances(queries, left, dilation):
    query, key, value, (_, content, position, _) = tensors(queries, 12)
    table, projection = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 10), (3, 4, 10))
    )
    projected = torch.einsum("hde,je->jhd", projection, table)
    found = []
    for relative in (
        Relative(projected, content, position),
        Relative(table, content, position, projection),
    ):
        out = banded_attention(query, key, value, left=left, dilation=dilation, relative=relative)
        inputs = (query, key, value, content, position, table, projection)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_the_shift_is_a_gather():
    scores = torch.randn(2, 5, 9)
    shifted = relative_shift(scores)
    for i in range(5):
        for j in range(9 - (5 - 1 - i)):
            assert (shifted[:, i, j] == scores[:, i, j + 5 - 1 - i]).all()


def test_memory_grows_with_the_length_only():
    """Four times the tokens keep at most four times as much for the backward pass."""

    def kept(tokens):
        query, key, value, positions = tensors(tokens, tokens, heads=2, dim=4, batch=1)
        held = {}  # storages, so that a tensor kept twice counts once

        def note(tensor):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            banded_attention(query, key, value, left=8, dilation=[1, 2], relative=positions)
        return sum(size for size, _ in held.values())

    assert kept(4096) <= 4.5 * kept(1024)


def test_more_queries_than_keys_are_refused():
    query, key, value, _ = tensors(4, 4)
    with pytest.raises(ValueError, match="4 queries but 3 keys"):
        banded_attention(query, key[:, 1:], value[:, 1:], left=2)
