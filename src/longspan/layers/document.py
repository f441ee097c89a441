"""What the layers share whose attention is defined over one document, from its first token on."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.layers.base import AttentionLayer
from longspan.layers.position import rotate
from longspan.ops.packed import as_rows, cut, documents_of, in_batches, joined
from longspan.ops.window import Visibility


class Chosen(NamedTuple):
    """Which tokens are global."""

    mask: Tensor  # bool [batch, tokens]
    most: int | None  # in any row; None = only the device knows


class DocumentAttention(AttentionLayer):
    """[batch, tokens, dim] -> [batch, tokens, dim], before the output projection.

    A mechanism that cuts its input into blocks, or has weights for places in it, has to be told
    where a document begins. Here rows are shifted so that each begins with its document, wherever
    its padding is, and the documents of a packed row become rows of their own, in as many batches
    as it takes for less than half of each to be padding; so each is read as if it were alone. A
    single row with a mask may be packed: its description is read back, which on a GPU waits for it
    and cannot be compiled.

    Args:
        dim, heads: model size; head_dim = dim / heads.
        dropout: on the attention weights, while training.
        rotary: turn queries and keys by their positions, with this base; None leaves positions to
            the model.
        bias: of the projections.
        shared: queries are their own keys, so `qkv` makes two of a token, not three.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
        shared: bool = False,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        if rotary is not None and (not 0 < rotary < math.inf or dim // heads % 2):
            raise ValueError(
                f"rotary={rotary} must be above 0 and finite, and the head size, here "
                f"{dim // heads}, even"
            )
        self.heads, self.head_dim = heads, dim // heads
        self.dropout, self.rotary = dropout, rotary
        self.qkv = nn.Linear(dim, (2 if shared else 3) * dim, bias=bias)

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """[batch, tokens, dim] of rows that each begin with their document: `valid` [batch, tokens]
        marks its tokens, `chosen` the global ones; None = all, none. What stands in the rows of
        padding does not matter."""
        raise NotImplementedError

    @property
    def dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def project(
        self, hidden: Tensor, position_ids: Tensor | None, project: nn.Linear | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [batch, tokens, heads, head_dim], rotated if they are to be."""
        project = self.qkv if project is None else project
        query, key, value = project(hidden).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = self.rotated(query, key, position_ids=position_ids)
        return query, key, value

    def rotated(self, *states: Tensor, position_ids: Tensor | None) -> tuple[Tensor, ...]:
        """Queries and keys, turned if they are to be."""
        if self.rotary is None:
            return states
        if position_ids is None:
            position_ids = torch.arange(states[0].shape[1], device=states[0].device)[None]
        return rotate(*states, position=position_ids, base=self.rotary)

    def forward(
        self,
        hidden: Tensor,
        *,
        seen: Visibility | None = None,
        positions: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionLayer`; `seen` is None for rows without padding."""
        seen = Visibility() if seen is None else seen
        valid, mask = seen.valid(), seen.is_global()
        most = None if positions is None else positions.shape[1]
        chosen = None if mask is None else Chosen(mask, most)
        if seen.start is None or valid is None:
            return self.attend(hidden, valid=None, chosen=chosen, position_ids=position_ids)
        if hidden.shape[0] == 1:
            return self._unpacked(hidden, seen, valid, chosen, position_ids)
        # Row i begins with its document if it is read from place first[i] on, then from 0 on.
        tokens = hidden.shape[1]
        place = torch.arange(tokens, device=hidden.device)
        first = seen.start.amax(dim=1, keepdim=True)
        there, back = (place + first) % tokens, (place - first) % tokens
        out = self.attend(
            _Moved.apply(hidden, there, back),
            valid=_take(valid, there),
            chosen=None if chosen is None else Chosen(_take(chosen.mask, there), most),
            position_ids=None
            if position_ids is None
            else _take(position_ids.expand(valid.shape), there),
        )
        return _Moved.apply(out, back, there).masked_fill(~valid[..., None], 0.0)

    def _unpacked(
        self,
        hidden: Tensor,
        seen: Visibility,
        valid: Tensor,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Documents of one row as rows of batches, each from its first token on."""
        documents = documents_of(seen)
        if not documents:
            return torch.zeros_like(hidden)
        mask = None if chosen is None else chosen.mask
        states, real, marks, places = (
            None if row is None else cut(row, documents)
            for row in (hidden, valid, mask, position_ids)
        )
        assert states is not None
        assert real is not None

        def attend(numbers: list[int]) -> Tensor:
            most = max(documents[number].global_tokens for number in numbers)
            return self.attend(
                as_rows(states, numbers),
                valid=as_rows(real, numbers),
                chosen=None if marks is None else Chosen(as_rows(marks, numbers), most),
                position_ids=None if places is None else as_rows(places, numbers),
            )

        parts = in_batches([one.length for one in documents], attend)
        return joined(parts, documents, hidden.shape[1]).masked_fill(~valid[..., None], 0.0)


class _Moved(torch.autograd.Function):
    """Tokens [batch, tokens, dim] from places `there`, each of which is one token's; gradients go
    `back`. Torch would add them up, as if several tokens could come from one place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(there, back)
        return _take(tensor, there)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None]:
        there, back = ctx.saved_tensors
        return _Moved.apply(gradient, back, there), None, None


def _take(tensor: Tensor, at: Tensor) -> Tensor:
    """[batch, tokens, ...] at places [batch, tokens]."""
    if tensor.dim() == 3:
        at = at[..., None].expand(-1, -1, tensor.shape[2])
    return tensor.gather(1, at)
