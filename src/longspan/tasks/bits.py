"""Bits per character of a text: by overlapping windows, or in a stream."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from longspan.data.text import Bytes
from longspan.models.decoder import LongspanForCausalLM


@torch.no_grad()
def sliding_nats(
    model: LongspanForCausalLM,
    text: Bytes,
    *,
    length: int,
    stride: int,
    batch: int,
    segment: int | None = None,
) -> Tensor:
    """[len(text) - 1] nats of every byte but the first, each with much before it.

    Windows of `length` bytes move on by `stride`, and each scores the bytes that no window before
    it has scored: the first all of its own, the others the last `stride`. A window is read at
    once, or in segments that state connects.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"stride={stride} must be from 1 to length={length}")
    count = len(text) - 1
    length = min(length, count)
    ends = [*range(length, count, stride), count]
    scored = [end - before for end, before in zip(ends, [0, *ends[:-1]], strict=True)]
    found = []
    for first in range(0, len(ends), batch):
        own = ends[first : first + batch]
        rows = np.stack([text[end - length : end + 1] for end in own])
        nats = row_nats(model, rows, segment)
        found += [nats[row, length - n :] for row, n in enumerate(scored[first : first + batch])]
    return torch.cat(found)


@torch.no_grad()
def streamed_nats(
    model: LongspanForCausalLM, text: Bytes, *, length: int, batch: int = 1
) -> Tensor:
    """[len(text) - 1] nats of every byte but the first, read in segments that state connects.

    With `batch` > 1 the text is read in so many places at once, each beginning without memory.
    """
    count = len(text) - 1
    batch = min(batch, count)
    span = count // batch
    rows = np.stack([text[row * span : (row + 1) * span + 1] for row in range(batch)])
    nats, state = _read(model, rows, length, None)
    if span * batch == count:
        return nats.flatten()
    # The last place goes on to the end of the text.
    state = pytree.tree_map_only(Tensor, lambda tensor: tensor[-1:], state)
    rest, _ = _read(model, text[None, span * batch :], length, state)
    return torch.cat((nats.flatten(), rest.flatten()))


@torch.no_grad()
def row_nats(model: LongspanForCausalLM, rows: np.ndarray, segment: int | None = None) -> Tensor:
    """Nats [rows, n] of all but the first byte of rows [rows, n + 1], each with nothing before
    its row; read at once, or in segments that state connects."""
    if segment is not None:
        return _read(model, rows, segment, None)[0]
    read = _tensor(rows, model)
    return _nats(model(read[:, :-1]).logits, read[:, 1:])


def bits(nats: Tensor) -> float:
    return float(nats.double().mean()) / math.log(2)


def _read(
    model: LongspanForCausalLM, rows: np.ndarray, length: int, state: Any
) -> tuple[Tensor, Any]:
    """Nats [rows, n] of rows [rows, n + 1], and the state after them."""
    found = []
    for begin in range(0, rows.shape[1] - 1, length):
        segment = _tensor(rows[:, begin : begin + length + 1], model)
        done = model(segment[:, :-1], state=state, keep_state=True)
        state = done.state
        found.append(_nats(done.logits, segment[:, 1:]))
    return torch.cat(found, dim=1), state


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    nats = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return nats.view_as(targets)


def _tensor(rows: np.ndarray, model: LongspanForCausalLM) -> Tensor:
    return torch.from_numpy(rows.astype(np.int64)).to(model.device)
