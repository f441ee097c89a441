"""Causal self-attention for decoders: the contract, a window, and everything before.

A causal layer is called with hidden states [batch, tokens, dim], the number of tokens read before
them, and its state, which stands for these. It returns what it made of the tokens, before the
output projection, and its next state. Nothing in the module changes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from longspan.layers.position import rotate_from, sinusoids
from longspan.ops.relative import Relative, banded_attention
from longspan.ops.window import window_attention
from longspan.ops.window.pattern import check_dilation

POSITIONS = ("rotary", "relative", "none")


class Attended(NamedTuple):
    out: Tensor  # [batch, tokens, dim]
    state: Any = None  # None unless it was asked for
    loss: Tensor | None = None  # what the layer's own parts learn from, while training


class Cache(NamedTuple):
    """The keys and values of the last tokens, in order: [batch, kept, heads, head_dim]."""

    key: Tensor
    value: Tensor

    @staticmethod
    def join(cache: "Cache | None", key: Tensor, value: Tensor) -> "Cache":
        if cache is None:
            return Cache(key, value)
        cache = Cache(cache.key.to(key.dtype), cache.value.to(value.dtype))
        return Cache(torch.cat((cache.key, key), 1), torch.cat((cache.value, value), 1))

    def last(self, count: int | None) -> "Cache":
        """The newest `count`; None = all."""
        known = self.key.shape[1]
        return self.part(0 if count is None else max(0, known - count), known)

    def part(self, begin: int, end: int) -> "Cache":
        """Without gradients; copies, so that the rest can be freed."""
        return Cache(*(tensor[:, begin:end].detach().clone() for tensor in self))


class Ring(NamedTuple):
    """A cache for one token after the other: token t stands in place t mod places, where it takes
    the place of one that nobody sees any more. Unlike all other state it is changed by a call."""

    key: Tensor  # [batch, places, heads, head_dim]
    value: Tensor

    @staticmethod
    def of(cache: Cache, tokens: int, places: int) -> "Ring":
        """With the newest of the `tokens` read so far in their places."""
        kept = min(cache.key.shape[1], places)
        at = torch.arange(tokens - kept, tokens, device=cache.key.device) % places
        batch, _, *shape = cache.key.shape
        rings = [tensor.new_zeros(batch, places, *shape) for tensor in cache]
        for ring, tensor in zip(rings, cache, strict=True):
            ring[:, at] = tensor[:, tensor.shape[1] - kept :]
        return Ring(*rings)

    def put(self, token: int, key: Tensor, value: Tensor) -> Tensor:
        """Write token number `token`, [batch, 1, ...]; returns how old each place now is, in
        tokens, and more than there are for those never written."""
        places = self.key.shape[1]
        self.key[:, token % places] = key[:, 0]
        self.value[:, token % places] = value[:, 0]
        age = (token - torch.arange(places, device=key.device)) % places
        return torch.where(age > token, places, age)


class RelativePositions(nn.Module):
    """Transformer-XL's: sinusoids of the distance, projected, and a bias for each of two terms."""

    def __init__(self, dim: int, heads: int, clamp: int | None = None) -> None:
        super().__init__()
        if clamp is not None and clamp < 1:
            raise ValueError(f"clamp={clamp} must be at least 1; None = no limit")
        self.dim, self.heads, self.clamp = dim, heads, clamp
        self.project = nn.Linear(dim, dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, dim // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, dim // heads))

    def forward(self, distances: int, queries: int) -> Relative:
        """For distances 0 to distances - 1; those beyond `clamp` count as `clamp`."""
        weight = self.project.weight
        distance = torch.arange(distances, device=weight.device)
        if self.clamp is not None:
            distance = distance.clamp(max=self.clamp)
        table = sinusoids(distance, self.dim, weight.dtype)
        biases = self.content_bias, self.position_bias
        # As many operations either way with dim / heads queries.
        if queries * self.heads < self.dim:
            return Relative(table, *biases, weight.unflatten(0, (self.heads, -1)))
        return Relative(self.project(table).unflatten(-1, (self.heads, -1)), *biases)


class CausalAttention(nn.Module):
    """What causal layers share: sizes and projections.

    Args:
        dim, heads: model size; head_dim = dim / heads.
        dropout: on the attention weights, while training.
        bias: whether the projections have one.
        shared: queries are their own keys, so `qkv` makes two of a token, not three.
        base: of the rotary angles; None = positions are not rotary.
        norm_keys: scale queries and keys to one length before they meet.
    """

    # It learns from what earlier segments of a text left it, so these have to follow one another.
    recurrent = False

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = False,
        shared: bool = False,
        base: float | None = None,
        norm_keys: bool = False,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        if base is not None and (dim // heads) % 2:
            raise ValueError(f"rotary positions need an even head size, not {dim // heads}")
        if base is not None and not 0 < base < math.inf:
            raise ValueError(f"base={base} of the rotary angles must be above 0, and finite")
        self.dim, self.heads, self.dropout, self.base = dim, heads, dropout, base
        self.norm_keys = norm_keys
        self.qkv = nn.Linear(dim, (2 if shared else 3) * dim, bias=bias)

    def follow(self, before: "Sequence[CausalAttention]") -> None:
        """Look at the model's layers before this one; called once, when a model is built."""

    @property
    def dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def project(
        self, hidden: Tensor, project: nn.Linear | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [batch, tokens, heads, head_dim], by `qkv` or another projection."""
        project = self.qkv if project is None else project
        query, key, value = project(hidden).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.norm_keys:
            query, key = (rms_norm(t, t.shape[-1:]) for t in (query, key))
        return query, key, value

    def turned(self, *states: Tensor, first: int) -> tuple[Tensor, ...]:
        """Queries and keys, turned if positions are rotary; `first` tokens were read before."""
        if self.base is None:
            return states
        return rotate_from(first, *states, base=self.base)

    def forward(
        self, hidden: Tensor, first: int = 0, state: Any = None, keep_state: bool = False
    ) -> Attended:
        """`first` tokens were read before, and `state` is what this layer kept of them."""
        raise NotImplementedError


class CausalWindow(CausalAttention):
    """Every token sees itself and `left` steps before it.

    Args:
        left: steps to the left, each `dilation` tokens long.
        dilation: one number, or one per head; 1 = none.
        position: "rotary"; "relative" (Transformer-XL's, by distance in tokens); "none".
        base: of the rotary angles.
        clamp: for relative positions, the distance from which on all count as equal.
        norm_keys: scale queries and keys to one length before they meet.
        backend: of `window_attention`, where nothing is cached and positions are not relative.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        left: int,
        *,
        dilation: int | Sequence[int] = 1,
        position: str = "rotary",
        base: float = 10000.0,
        clamp: int | None = None,
        norm_keys: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        rotary = base if position == "rotary" else None
        super().__init__(dim, heads, dropout=dropout, bias=bias, base=rotary, norm_keys=norm_keys)
        if position not in POSITIONS:
            raise ValueError(f"position={position!r}: choose from {', '.join(POSITIONS)}")
        self.left = check_left(left)
        self.dilation = check_dilation(dilation, heads)
        self.relative = RelativePositions(dim, heads, clamp) if position == "relative" else None
        self.backend = backend

    def set_window(self, left: int) -> None:
        """Another window from now on, as staged training wants it; nothing learned depends on
        its size."""
        self.left = check_left(left)

    @property
    def reach(self) -> int:
        """How many tokens back a query may look: the size of the cache."""
        return self.left * max(self.dilation)

    def ring(self, cache: Cache, tokens: int) -> "Ring | Cache":
        """What to write on with, of the cache after `tokens`. Relative positions need order."""
        return cache if self.relative is not None else Ring.of(cache, tokens, self.reach + 1)

    def forward(
        self,
        hidden: Tensor,
        first: int = 0,
        state: Cache | Ring | None = None,
        keep_state: bool = False,
    ) -> Attended:
        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        if isinstance(state, Ring):
            return Attended(self._write_on(query, state, state.put(first, key, value)), state)
        known = Cache.join(state, key, value)
        if state is None and self.relative is None:
            out = window_attention(
                query,
                key,
                value,
                window=(self.left, 0),
                dilation=self.dilation,
                dropout_p=self.dropout_p,
                backend=self.backend,
            )
        else:
            relative = self.relative
            if relative is not None:
                distances = min(self.reach + 1, known.key.shape[1])
                relative = relative(distances, hidden.shape[1])
            out = banded_attention(
                query,
                known.key,
                known.value,
                left=self.left,
                dilation=self.dilation,
                relative=relative,
                dropout_p=self.dropout_p,
            )
        return Attended(out.flatten(2), known.last(self.reach) if keep_state else None)

    def _write_on(self, query: Tensor, ring: Ring, age: Tensor) -> Tensor:
        """[batch, 1, dim]: one token, which stands in the ring already."""
        step: Any = self.dilation[0]
        if len(set(self.dilation)) > 1:  # else nothing has to come from the host
            step = torch.tensor(self.dilation, device=age.device)[:, None]
        seen = (age % step == 0) & (age <= self.left * step)  # [heads, places] or [places]
        out = scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, *ring)),
            attn_mask=seen[..., None, :],
            dropout_p=self.dropout_p,
        )
        return out.transpose(1, 2).flatten(2)


class CausalFull(CausalAttention):
    """Every token sees all before it: the dense baseline. Its cache grows with the text.

    Args:
        base: of the rotary angles.
        norm_keys: scale queries and keys to one length before they meet.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        base: float = 10000.0,
        norm_keys: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias, base=base, norm_keys=norm_keys)

    def forward(
        self, hidden: Tensor, first: int = 0, state: Cache | None = None, keep_state: bool = False
    ) -> Attended:
        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        known = Cache.join(state, key, value)
        if state is None:
            out = scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (query, key, value)),
                is_causal=True,
                dropout_p=self.dropout_p,
            ).transpose(1, 2)
        else:
            out = banded_attention(
                query, known.key, known.value, left=None, dropout_p=self.dropout_p
            )
        return Attended(out.flatten(2), known.last(None) if keep_state else None)


def check_left(left: int, name: str = "left") -> int:
    if isinstance(left, bool) or not isinstance(left, int) or left < 0:
        raise ValueError(f"{name}={left!r} must be a whole number of steps, 0 or more")
    return left
