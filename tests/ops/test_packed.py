"""Packed documents: found, taken apart, put into batches and joined again."""

from itertools import accumulate, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.ops import visibility
from longspan.ops.packed import as_rows, cut, documents_of, in_batches, joined

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def described(lengths, hidden=(), chosen=()):
    """A row of documents, those with the numbers `hidden` all padding."""
    bounds = [0, *accumulate(lengths)]
    row = torch.randn(1, bounds[-1], 3, dtype=torch.float64)
    mask, marked = (torch.zeros(1, bounds[-1], dtype=torch.long) for _ in range(2))
    for number, (begin, end) in enumerate(pairwise(bounds)):
        mask[:, begin:end] = number not in hidden
    marked[:, [place for place in chosen if place < bounds[-1]]] = 1
    seen = visibility(row, attention_mask=mask, global_mask=marked, cu_seqlens=torch.tensor(bounds))
    found = [
        (begin, end, int(marked[0, begin:end].sum()))
        for number, (begin, end) in enumerate(pairwise(bounds))
        if end > begin and number not in hidden
    ]
    return row, mask, seen, found


@given(LENGTHS, st.sets(st.integers(0, 11)), st.sets(st.integers(0, 400)))
def test_documents_are_found_cut_and_joined(lengths, hidden, chosen):
    row, mask, seen, found = described(lengths, hidden, chosen)
    documents = documents_of(seen)
    assert [tuple(one) for one in documents] == found
    if not documents:
        return
    parts = cut(row, documents)
    assert [len(part) for part in parts] == [one.length for one in documents]
    assert torch.equal(joined(parts, documents, row.shape[1]), row * mask[..., None])


@given(LENGTHS.filter(all))
def test_batches_are_less_than_half_padding(lengths):
    row, _, seen, _ = described(lengths)
    parts = cut(row.requires_grad_(), documents_of(seen))
    sizes = []

    def double(numbers):
        rows = as_rows(parts, numbers)
        sizes.append(rows.shape[:2].numel() / sum(lengths[number] for number in numbers))
        return 2 * rows

    out = torch.cat(in_batches(lengths, double))
    assert torch.equal(out, 2 * row[0])
    assert max(sizes) < 2
    assert len(sizes) <= 7  # of lengths up to 40: 1, 2, 4, 8, 16, 32 and 64
    (gradient,) = torch.autograd.grad(out.sum(), row)
    assert torch.equal(gradient, torch.full_like(row, 2.0))
