"""The documents of a packed row as rows of batches, those together that are about as long."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.window.pattern import Visibility


class Document(NamedTuple):
    """Where it stands in its row, and how many global tokens it has."""

    begin: int
    end: int
    global_tokens: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def documents_of(seen: Visibility) -> list[Document]:
    """Of a batch of one row, without those that are all padding; read back from the device."""
    start, stop, rank = seen.start, seen.stop, seen.rank
    assert start is not None
    assert stop is not None
    bounds = torch.stack((start[0], stop[0]), dim=1)[stop[0] > 0]
    bounds = torch.unique_consecutive(bounds, dim=0)
    inside = torch.zeros_like(bounds) if rank is None else rank[0][bounds]
    counts = inside[:, 1:] - inside[:, :1]
    return [Document(*numbers) for numbers in torch.cat((bounds, counts), dim=1).tolist()]


def cut(row: Tensor, documents: Sequence[Document]) -> list[Tensor]:
    """[1, tokens, ...] -> [length, ...] of each. All at once: the gradient of a slice is of the
    size of the row."""
    ends = [0, *(place for one in documents for place in (one.begin, one.end)), row.shape[1]]
    return list(row[0].split([end - begin for begin, end in pairwise(ends)])[1::2])


def joined(parts: Sequence[Tensor], documents: Sequence[Document], tokens: int) -> Tensor:
    """`cut` undone, with zeros between documents."""
    zeros = parts[0].new_zeros(tokens, *parts[0].shape[1:])
    filled, done = [], 0
    for part, one in zip(parts, documents, strict=True):
        filled += [zeros[done : one.begin], part]
        done = one.end
    return torch.cat([*filled, zeros[done:]])[None]


def in_batches(lengths: Sequence[int], attend: Callable[[list[int]], Tensor]) -> list[Tensor]:
    """[length, ...] of each document, out of the rows [numbers, longest, ...] that `attend` returns
    for the documents with these numbers. They are called together as long as less than half of a
    batch is padding."""
    batches: dict[int, list[int]] = defaultdict(list)
    for number, length in enumerate(lengths):
        batches[(length - 1).bit_length()].append(number)
    parts: dict[int, Tensor] = {}
    for numbers in batches.values():
        rows = attend(numbers)
        padded = ((lengths[number], rows.shape[1] - lengths[number]) for number in numbers)
        pieces = rows.flatten(0, 1).split([size for both in padded for size in both])
        parts.update(zip(numbers, pieces[::2], strict=True))
    return [parts[number] for number in range(len(lengths))]


def as_rows(pieces: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """Those of so many pieces [length, ...] -> [numbers, longest, ...], filled up with zeros."""
    chosen = [pieces[number] for number in numbers]
    if len(chosen) == 1:
        return chosen[0][None]
    zeros = chosen[0].new_zeros(max(map(len, chosen)), *chosen[0].shape[1:])
    filled = [part for piece in chosen for part in (piece, zeros[len(piece) :])]
    return torch.cat(filled).unflatten(0, (-1, len(zeros)))
