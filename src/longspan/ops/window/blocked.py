"""Window attention in plain PyTorch, in memory linear in the number of tokens, on any device.

The visible pairs (query, key) of one batch row and one run of heads are cut into disjoint *pieces*,
each a dense rectangle under a mask:

- the band: blocks of queries against the keys their windows reach, many equal blocks at once;
- the global columns: queries against the gathered global keys, without the pairs of the band;
- the global rows: gathered global queries against all keys, again without the pairs of the band.

Each piece is softmax attention of its own. The forward pass joins them through their log-sum-exp;
the backward pass, which knows the final log-sum-exp of each row, simply adds up their gradients.

Rows that are shorter than their windows are not cut at all (`uncut`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.window import dropout
from longspan.ops.window.pattern import Pattern, Visibility

# Scores per thread and piece, over all heads: bounds the memory, and keeps a piece in the cache.
_SCORES = 1 << 20
# Tokens whose global keys, and global rows whose keys, are treated together. Smaller would mean
# more calls, larger more pairs of different documents in one rectangle.
_COLUMN_QUERIES = 1024
_ROW_QUERIES = 32
# Tokens up to which torch's kernel, all rows at once, is as fast as any of ours.
_SHORT = 384


class _Strided(NamedTuple):
    """Tokens at regular distances: tile x holds first + x * hop + step * [0, length)."""

    first: int
    length: int
    step: int = 1
    hop: int = 0
    tiles: int = 1

    def take(self, x: Tensor) -> Tensor:
        """A view [tiles, length, ...] of x [tokens, ...]; tiles may overlap, nothing is copied."""
        return x.as_strided(
            (self.tiles, self.length, *x.shape[1:]),
            (self.hop * x.stride(0), self.step * x.stride(0), *x.stride()[1:]),
            x.storage_offset() + self.first * x.stride(0),
        )

    def put(self, x: Tensor, tile: Tensor) -> None:
        self.take(x).copy_(tile)

    def add(self, x: Tensor, tile: Tensor) -> None:
        # Neighbouring tiles overlap if a hop is shorter than a tile: add them in slices of a hop.
        # (A hop shorter than a step leads to another residue class, with tokens of its own.)
        apart = self.tiles == 1 or self.hop < self.step
        width = self.length if apart else self.hop // self.step
        for begin in range(0, self.length, width):
            part = tile[:, begin : begin + width]
            where = self._replace(first=self.first + begin * self.step, length=part.shape[1])
            where.take(x).add_(part)


class _Gathered(NamedTuple):
    """Tokens at the listed positions, no two the same."""

    positions: Tensor

    def take(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.positions)[None]

    def put(self, x: Tensor, tile: Tensor) -> None:
        x.index_copy_(0, self.positions, tile[0])

    def add(self, x: Tensor, tile: Tensor) -> None:
        x.index_add_(0, self.positions, tile[0])


_Tokens = _Strided | _Gathered


class _Piece(NamedTuple):
    """A rectangle of pairs, or a stack of them."""

    queries: _Tokens
    keys: _Tokens
    bias: Tensor | None  # [tiles or 1, 1, queries, keys] of 0 and -inf; None: all is visible
    joins: bool  # its rows have been seen before, in the band


class _Lane(NamedTuple):
    """Query heads of one dilation with key heads of their own: no two share one."""

    queries: slice
    keys: slice
    dilation: int


def _lanes(pattern: Pattern, key_heads: int) -> Iterator[_Lane]:
    share = len(pattern.dilation) // key_heads  # query heads per key head
    for first, end, dilation in pattern.head_groups():
        for head in range(first, min(first + share, end)):
            last = range(head, end, share)[-1]
            yield _Lane(slice(head, end, share), slice(head // share, last // share + 1), dilation)


class _Row:
    """One batch row: which tokens may see which, and the pieces that cover all of these pairs."""

    def __init__(self, row: int, like: Tensor, seen: Visibility, pattern: Pattern, fused: bool):
        self.tokens = like.shape[1]
        self.pattern = pattern
        # Without the fused kernel the scores are really held, several times over.
        self.scores = _SCORES * torch.get_num_threads() if fused else _SCORES
        self.block_scores = _SCORES if fused else _SCORES // like.shape[2]
        # A window beyond the ends of the row is no wider than the row.
        self.left = min(pattern.left, self.tokens)
        self.right = min(pattern.right, self.tokens)
        self.dtype = like.dtype
        self.position = torch.arange(self.tokens, device=like.device)
        # Without padding and packing everyone sees from 0 to the end.
        self.whole = seen.start is None or seen.stop is None
        self.start = torch.zeros_like(self.position) if seen.start is None else seen.start[row]
        self.stop = self.start + self.tokens if seen.stop is None else seen.stop[row]
        self.globals = self.position[:0]
        if seen.rank is not None and seen.places is not None:
            self.rank = seen.rank[row]
            self.globals = seen.places[row, : int(self.rank[-1])].long()
            self.is_global = self.rank[1:] > self.rank[:-1]

    def pieces(self, dilation: int, heads: int) -> Iterator[_Piece]:
        yield from self._band(dilation, heads)
        if self.globals.numel():
            yield from self._columns(dilation, heads)
            if self.pattern.global_rows:
                yield from self._rows(dilation, heads)

    def _band(self, dilation: int, heads: int) -> Iterator[_Piece]:
        biases: dict[tuple[int, int, int], Tensor | None] = {}
        for stack, shift, columns in self._blocks(dilation):
            # As many blocks at a time as memory allows.
            most = max(1, self.scores // (heads * stack.length * columns))
            for tile in range(0, stack.tiles, most):
                queries = stack._replace(
                    first=stack.first + tile * stack.hop, tiles=min(most, stack.tiles - tile)
                )
                keys = queries._replace(first=queries.first + shift, length=columns)
                together = self._together(queries, keys)
                if together is None:
                    # The same for all blocks of one shape: worked out once.
                    shape = (queries.length, shift, columns)
                    if shape not in biases:
                        one = queries._replace(tiles=1), keys._replace(tiles=1)
                        biases[shape] = _bias(self._in_window(*one, dilation), self.dtype)
                    yield _Piece(queries, keys, biases[shape], joins=False)
                elif together.any():
                    visible = together & self._in_window(queries, keys, dilation)
                    yield _Piece(queries, keys, _bias(visible, self.dtype), joins=False)

    def _blocks(self, dilation: int) -> Iterator[tuple[_Strided, int, int]]:
        """Stacks of equal query blocks; where the keys in reach begin, from each block's first
        query, and how many there are.

        A dilated head sees only tokens of its own residue class modulo the dilation, and within
        the class an ordinary window: the classes are `dilation` independent sequences.
        """
        left, right = self.left, self.right
        block = 32 if left + right < 128 else 64  # measured; larger ones waste more corners
        length, longer = divmod(self.tokens, dilation)  # `longer` classes have one token more
        for first, end, size in ((0, longer, length + 1), (longer, dilation, length)):
            if min(left, right) >= size - 1:
                # Everyone sees everyone, so there are no corners to waste: as few blocks as fit.
                block = max(block, min(size, self.block_scores // max(size, 1)))
            # Blocks whose keys all exist have one shape and are stacked, class by class.
            inner = -(-left // block) * block
            count = max(0, (size - right - inner) // block)
            if count:
                for origin in range(first + inner * dilation, end + inner * dilation):
                    stack = _Strided(origin, block, dilation, block * dilation, count)
                    yield stack, -left * dilation, left + block + right
            # Those near the ends differ from one another, and are stacked over the classes.
            for begin in range(0, size if first < end else 0, block):
                if not inner <= begin < inner + count * block:
                    stop = min(begin + block, size)
                    low, high = max(0, begin - left), min(size, stop + right)
                    origin = first + begin * dilation
                    stack = _Strided(origin, stop - begin, dilation, 1, end - first)
                    yield stack, (low - begin) * dilation, high - low

    def _columns(self, dilation: int, heads: int) -> Iterator[_Piece]:
        limit = self.scores // (heads * self.globals.numel())
        length = max(1, min(_COLUMN_QUERIES, limit))
        for first in range(0, self.tokens, length):
            end = min(first + length, self.tokens)
            # Only the global keys of documents that have a query here.
            start, stop = self.start[first:end], self.stop[first:end]
            high = min(int(stop.max()), end if self.pattern.causal else self.tokens)
            low = min(int(start.where(stop > 0, self.tokens).min()), high)
            keys = _Gathered(self.globals[int(self.rank[low]) : int(self.rank[high])])
            if keys.positions.numel():
                yield from self._extra(_Strided(first, end - first), keys, dilation)

    def _rows(self, dilation: int, heads: int) -> Iterator[_Piece]:
        length = max(8, min(_ROW_QUERIES, self.scores // (heads * self.tokens)))
        for index in self.globals.split(length):
            low, last = int(self.start[index[0]]), int(index[-1])
            high = last + 1 if self.pattern.causal else int(self.stop[last])
            yield from self._extra(_Gathered(index), _Strided(low, high - low), dilation)

    def _extra(self, queries: _Tokens, keys: _Tokens, dilation: int) -> Iterator[_Piece]:
        """The pairs of a rectangle that the band does not hold, if there are any."""
        visible = ~self._in_window(queries, keys, dilation)
        together = self._together(queries, keys)
        if together is not None:
            visible &= together
        if self.pattern.causal:
            visible &= keys.take(self.position)[:, None] <= queries.take(self.position)[..., None]
        if self.pattern.global_rows and isinstance(keys, _Gathered):
            visible &= ~queries.take(self.is_global)[..., None]  # these have rows of their own
        if visible.any():
            yield _Piece(queries, keys, _bias(visible, self.dtype), joins=True)

    def _in_window(self, queries: _Tokens, keys: _Tokens, dilation: int) -> Tensor:
        """Bool [tiles, queries, keys]: does the window of the query hold the key?"""
        offset = keys.take(self.position)[:, None] - queries.take(self.position)[..., None]
        inside = (offset >= -self.left * dilation) & (offset <= self.right * dilation)
        return inside if dilation == 1 else inside & (offset % dilation == 0)

    def _together(self, queries: _Tokens, keys: _Tokens) -> Tensor | None:
        """Bool [tiles, queries, keys]: are both tokens of one document? None: all are."""
        if self.whole:
            return None
        start, stop = queries.take(self.start), queries.take(self.stop)
        key, valid = keys.take(self.position), keys.take(self.stop) > 0
        if start.max() <= key.min() and key.max() < stop.min() and valid.all():
            return None
        key = key[:, None]
        return (key >= start[..., None]) & (key < stop[..., None]) & valid[:, None]


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor | None:
    """[tiles, 1, queries, keys] of what is added to scores; None where all is visible."""
    if visible.all():
        return None
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, -torch.inf)[:, None]


class _Tile(NamedTuple):
    """How to attend within a piece: [tiles, heads, queries, dim] to [tiles, heads, keys, dim]."""

    bias: Tensor | None
    scale: float
    keep: Tensor | None  # dropout: 0 or 1 / (1 - p), [tiles, heads, queries, keys]
    fused: bool

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of each row. A row that sees nothing gets zeros."""
        if self.fused:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, False, attn_mask=self.bias, scale=self.scale
            )
        scores = self._scores(query, key)
        lse = scores.logsumexp(-1)
        lse.masked_fill_(lse == -torch.inf, 0.0)
        weights = scores.sub_(lse[..., None]).exp_()
        if self.keep is not None:
            weights *= self.keep
        return weights @ value, lse

    def backward(self, grad, query, key, value, out, lse) -> tuple[Tensor, Tensor, Tensor]:
        if self.fused:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(grad, query, key, value, out, lse, 0.0, False),
                attn_mask=self.bias,
                scale=self.scale,
            )
        weights = self._scores(query, key).sub_(lse[..., None]).exp_()
        grad_weights = grad @ value.mT
        kept = weights
        if self.keep is not None:
            grad_weights *= self.keep
            kept = weights * self.keep
        grad_value = kept.mT @ grad
        delta = (grad * out).sum(-1, keepdim=True)
        grad_scores = grad_weights.sub_(delta).mul_(weights).mul_(self.scale)
        return grad_scores @ key, grad_scores.mT @ query, grad_value

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = (query @ key.mT).mul_(self.scale)
        return scores if self.bias is None else scores.add_(self.bias)


def _fused(query: Tensor, seed: Tensor | None) -> bool:
    """Whether torch's own kernel serves: it is for the CPU, and knows nothing of our dropout."""
    return seed is None and query.device.type == "cpu"


def uncut(query: Tensor, key: Tensor, pattern: Pattern, seed: Tensor | None) -> bool:
    """Whether windows reach over whole rows, and these are short: then all is one call of torch's
    kernel, as in dense models, which gives the bits that those give."""
    reach = min(pattern.left, pattern.right, _SHORT - 1)
    alike = query.shape[2] == key.shape[2] and set(pattern.dilation) == {1}
    return _fused(query, seed) and alike and query.shape[1] - 1 <= reach


def _whole(
    query: Tensor, seen: Visibility, pattern: Pattern, *tensors: Tensor
) -> tuple[_Tile, Iterator[Tensor]]:
    """All pairs of all rows, and [batch, heads, tokens, dim] of the tensors without what stands in
    their padding: it may be anything, and nothing times zero is not always nothing."""
    bias = None
    if seen.start is not None and seen.stop is not None:
        position = torch.arange(query.shape[1], device=query.device)
        visible = (position >= seen.start[..., None]) & (position < seen.stop[..., None])
        visible &= seen.stop[:, None] > 0
        bias = _bias(visible, query.dtype)
        if bias is not None:
            padding = (seen.stop == 0)[..., None, None]
            tensors = tuple(tensor.masked_fill(padding, 0.0) for tensor in tensors)
    return _Tile(bias, pattern.scale, None, fused=True), (t.transpose(1, 2) for t in tensors)


def _work(
    query: Tensor, key_heads: int, seen: Visibility, pattern: Pattern, seed: Tensor | None
) -> Iterator[tuple[int, _Lane, _Piece, _Tile]]:
    """Every piece of every batch row and lane, in the order the forward pass needs."""
    batch, _, heads, _ = query.shape
    fused = _fused(query, seed)
    for index in range(batch):
        row = _Row(index, query, seen, pattern, fused)
        for lane in _lanes(pattern, key_heads):
            head = torch.arange(heads, device=query.device)[lane.queries]
            for piece in row.pieces(lane.dilation, len(head)):
                keep = None
                if seed is not None:
                    kept = dropout.kept(
                        seed,
                        (index * heads + head)[:, None, None],
                        piece.queries.take(row.position)[:, None, :, None],
                        piece.keys.take(row.position)[:, None, None, :],
                        pattern.dropout_p,
                    )
                    keep = kept.to(query.dtype) / (1.0 - pattern.dropout_p)
                yield index, lane, piece, _Tile(piece.bias, pattern.scale, keep, fused)


def _working(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In at least float32, and with elements of one head side by side, as the kernel wants it."""
    wide = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors)
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in wide)


def lse_row(n: int) -> int:
    """Length of a row of log-sum-exps."""
    return n


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output [batch, tokens, heads, dim], log-sum-exp [batch, heads, tokens], 0 for blank rows."""
    dtype = query.dtype
    query, key, value = _working(query, key, value)
    if uncut(query, key, pattern, seed):
        tile, tensors = _whole(query, seen, pattern, query, key, value)
        out, lse = tile.forward(*tensors)
        return _without_rows(out.transpose(1, 2).to(dtype), lse.contiguous(), seen, pattern)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = out.new_zeros(out.shape[0], out.shape[2], out.shape[1])
    for row, lane, piece, tile in _work(query, key.shape[2], seen, pattern, seed):
        q = piece.queries.take(query[row, :, lane.queries]).transpose(1, 2)
        k = piece.keys.take(key[row, :, lane.keys]).transpose(1, 2)
        v = piece.keys.take(value[row, :, lane.keys]).transpose(1, 2)
        with torch.autocast(q.device.type, enabled=False):  # pieces are joined in float32
            part, part_lse = (t.transpose(1, 2) for t in tile.forward(q, k, v))
        to, to_lse = out[row, :, lane.queries], lse[row, lane.queries].T
        if piece.joins:
            if tile.bias is not None:
                blank = tile.bias[:, 0].amax(-1) == -torch.inf
                part_lse = part_lse.masked_fill(blank[..., None], -torch.inf)
            old = piece.queries.take(to_lse)
            share = torch.sigmoid(part_lse - old)[..., None]
            part = torch.lerp(piece.queries.take(to), part, share)
            part_lse = torch.logaddexp(old, part_lse)
        piece.queries.put(to, part)
        piece.queries.put(to_lse, part_lse)
    return _without_rows(out.to(dtype), lse, seen, pattern)


def _without_rows(
    out: Tensor, lse: Tensor, seen: Visibility, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """Without the rows that somebody else fills; an infinite log-sum-exp hides them from the
    backward pass."""
    chosen = None if pattern.global_rows else seen.is_global()
    if chosen is not None:
        row, token = chosen.nonzero(as_tuple=True)
        out[row, token] = 0.0
        lse[row, :, token] = torch.inf
    return out, lse


def put_rows(out: Tensor, rows: Tensor, at: Tensor) -> None:
    """Write rows [batch, g, heads, dim] into `out` at tokens [batch, g], none where it is < 0."""
    row, slot = (at >= 0).nonzero(as_tuple=True)
    out[row, at[row, slot].long()] = rows[row, slot].to(out.dtype)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
    stacked: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, or of the one tensor [batch, tokens, 3, heads, head_dim]
    that they are taken from."""
    dtype = query.dtype
    grad, query, key, value, out = _working(grad, query, key, value, out)
    if uncut(query, key, pattern, seed):
        tile, tensors = _whole(query, seen, pattern, grad, query, key, value, out)
        grads = tuple(t.transpose(1, 2).to(dtype) for t in tile.backward(*tensors, lse=lse))
        return (torch.stack(grads, dim=2),) if stacked else grads
    grad_query, grad_key, grad_value = (
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)
    )
    for row, lane, piece, tile in _work(query, key.shape[2], seen, pattern, seed):
        g, q, o = (
            piece.queries.take(t[row, :, lane.queries]).transpose(1, 2) for t in (grad, query, out)
        )
        k, v = (piece.keys.take(t[row, :, lane.keys]).transpose(1, 2) for t in (key, value))
        part_lse = piece.queries.take(lse[row, lane.queries].T).transpose(1, 2)
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = (t.transpose(1, 2) for t in tile.backward(g, q, k, v, o, part_lse))
        piece.queries.add(grad_query[row, :, lane.queries], dq)
        piece.keys.add(grad_key[row, :, lane.keys], dk)
        piece.keys.add(grad_value[row, :, lane.keys], dv)
    grads = tuple(grad.to(dtype) for grad in (grad_query, grad_key, grad_value))
    return (torch.stack(grads, dim=2),) if stacked else grads
