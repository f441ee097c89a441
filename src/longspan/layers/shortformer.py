"""Shortformer: positions stand in queries and keys alone, so that what was cached fits anywhere."""

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from longspan.layers.causal import Attended
from longspan.layers.position import sinusoids
from longspan.layers.xl import MemoryAttention


class ShortformerAttention(MemoryAttention):
    """A text is cut into segments. A token sees its own segment up to itself and the whole segment
    before. Sinusoids of the places in these two are added to what queries and keys are made of,
    not to what values are made of:

        query_i = Wq (x_i + p(i)),   key_j = Wk (x_j + p(j)),   value_j = Wv x_j,

    with places that begin at 0 with the segment before: tokens in it count to segment - 1, those
    of the own one on from there. So states have no positions in them, and when a segment becomes
    the one before, its tokens take other places though nothing is computed anew but Wk p.

    The state is a memory, as in Transformer-XL, that begins with the segment before the one that
    is being read. Segments follow from the number of tokens read, not from the calls.

    Args:
        segment: tokens.
    """

    def __init__(
        self, dim: int, heads: int, segment: int, *, dropout: float = 0.0, bias: bool = False
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias)
        if segment < 1:
            raise ValueError(f"segment={segment} must be at least 1 token")
        self.segment = segment

    def forward(
        self,
        hidden: Tensor,
        first: int = 0,
        state: Tensor | None = None,
        keep_state: bool = False,
    ) -> Attended:
        query, key, value = self.project(hidden)
        new = self.memory_of(hidden, key, value) if keep_state else None
        read = 0  # as much as is remembered: all of the segment before, and of this one
        if state is not None and state.shape[1] > 0:
            state, read = self.fit(state), state.shape[1]
            old = self.key_value(state, hidden.dtype)
            key, value = (torch.cat(pair, 1) for pair in zip(old, (key, value), strict=True))
        out = self._attend(query, key, value, read).flatten(2)
        if new is None:
            return Attended(out)
        known = new if state is None else torch.cat((state, new), 1)
        # From the beginning of the segment before on, if there is one.
        begin = max(0, known.shape[1] // self.segment - 1) * self.segment
        return Attended(out, known[:, begin:].clone())

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, read: int) -> Tensor:
        """[batch, tokens, heads, head_dim] of the tokens behind the first `read` keys, which begin
        with a segment."""
        size, tokens = self.segment, query.shape[1]
        places = sinusoids(torch.arange(2 * size, device=query.device), self.dim, query.dtype)
        by_query, by_key = self.qkv.weight[: 2 * self.dim].to(query.dtype).chunk(2)
        for_query = linear(places[size:], by_query).unflatten(-1, (self.heads, -1))
        for_key = linear(places, by_key).unflatten(-1, (self.heads, -1))
        # The rest of a segment under way, or a text's first, which has none before it; then whole
        # ones; then as much as there is of the last.
        begun = 0 if read % size == 0 and read > 0 else min(size - read % size, tokens)
        whole = (tokens - begun) // size * size
        rest = tokens - begun - whole
        parts, done = [], 0
        for some, together in ((begun, False), (whole, True), (rest, False)):
            if some > 0:
                asking = query[:, done : done + some]
                attend = self._whole if together else self._part
                parts.append(attend(asking, key, value, read + done, for_query, for_key))
            done += some
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _part(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: int,
        for_query: Tensor,
        for_key: Tensor,
    ) -> Tensor:
        """Tokens of one segment, the first of which has key number `first`."""
        size, tokens = self.segment, query.shape[1]
        inside = first % size
        before = min(size, first - inside)  # tokens of the segment before, or none
        seen = slice(first - inside - before, first + tokens)
        mask = None
        if tokens > 1:
            keys = before + inside + tokens
            mask = torch.ones(tokens, keys, dtype=torch.bool, device=query.device)
            mask = mask.tril(before + inside)
        key = key[:, seen] + for_key[size - before : size + inside + tokens]
        return self._softmax(query + for_query[inside : inside + tokens], key, value[:, seen], mask)

    def _whole(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: int,
        for_query: Tensor,
        for_key: Tensor,
    ) -> Tensor:
        """Tokens of whole segments, each with one before it."""
        size, batch = self.segment, query.shape[0]
        seen = slice(first - size, first + query.shape[1])
        key, value = (t[:, seen].unflatten(1, (-1, size)) for t in (key, value))
        key = torch.cat((key[:, :-1] + for_key[:size], key[:, 1:] + for_key[size:]), 2)
        value = torch.cat((value[:, :-1], value[:, 1:]), 2)
        query = query.unflatten(1, (-1, size)) + for_query
        mask = torch.ones(size, 2 * size, dtype=torch.bool, device=query.device).tril(size)
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
        out = self._softmax(query, key, value, mask)
        return out.unflatten(0, (batch, -1)).flatten(1, 2)

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)),
            attn_mask=mask,
            dropout_p=self.dropout_p,
        )
        return out.transpose(1, 2)
