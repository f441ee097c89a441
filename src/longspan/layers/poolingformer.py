"""Poolingformer: a window, and on top of it a wider one over pools of neighbouring tokens."""

from typing import NamedTuple

from torch import Tensor, nn

from longspan.layers.causal import Attended, Cache, CausalAttention, check_left
from longspan.layers.document import Chosen, DocumentAttention
from longspan.ops.pooled import POOLS, count_members, pool_neighbours, pooled_attention
from longspan.ops.relative import banded_attention
from longspan.ops.window import window_attention
from longspan.ops.window.pattern import check_window


class PoolingformerAttention(DocumentAttention):
    """Attention within a window, plus attention of what came out of it to pools within a wider
    one, through projections of its own. Which layers have the second level is for the model's
    settings to say: the paper found about a quarter of them best, the others of kind "window".
    Global tokens are global in the first level.

    Args:
        window: of the first level, as in `window_attention`; the paper's 128 read as one side.
        pooled_window: of the second.
        kernel, stride: tokens in a pool, and from the beginning of one to that of the next.
        pool: "mean", "max", or "convolution" with weights made from the pool's middle token.
        mix: the second level reads the layer's input instead of the first level's output.
        share_weights: both levels have the same projections.
        backend: of `window_attention`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int | tuple[int, int] = (128, 128),
        *,
        pooled_window: int | tuple[int, int] = (512, 512),
        kernel: int = 5,
        stride: int = 4,
        pool: str = "convolution",
        mix: bool = False,
        share_weights: bool = False,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias)
        self.window, self.pooled_window = check_window(window), check_window(pooled_window)
        reach = sum(self.pooled_window)
        _check_pools(kernel, stride, pool, reach, f"pooled_window={pooled_window}")
        self.kernel, self.stride, self.pool, self.mix = kernel, stride, pool, mix
        self.backend = backend
        self.qkv_pooled = None if share_weights else nn.Linear(dim, 3 * dim, bias=bias)
        convolved = pool == "convolution"
        self.pool_key = nn.Linear(self.head_dim, kernel) if convolved else None
        self.pool_value = nn.Linear(self.head_dim, kernel) if convolved else None

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        first = window_attention(
            *self.project(hidden, position_ids),
            window=self.window,
            attention_mask=valid,
            global_mask=None if chosen is None else chosen.mask,
            dropout_p=self.dropout_p,
            backend=self.backend,
        ).flatten(2)
        below = hidden if self.mix else first
        query, key, value = self.project(below, position_ids, self.qkv_pooled)
        visible = None
        if valid is not None:
            visible = count_members(key, self.kernel, self.stride, valid) > 0
        second = pooled_attention(
            query,
            _pooled(self, key, self.pool_key, valid),
            _pooled(self, value, self.pool_value, valid),
            window=self.pooled_window,
            kernel=self.kernel,
            stride=self.stride,
            visible=visible,
            dropout_p=self.dropout_p,
        )
        return first + second.flatten(2)


class Levels(NamedTuple):
    """What is kept of a text: keys and values of its last tokens in the first level, of its last
    whole pools in the second, and of the tokens there from which the next pools will be made."""

    near: Cache
    pools: Cache
    rest: Cache


class CausalPoolingformer(CausalAttention):
    """Every token sees itself and those right before it, and on top of it, through projections of
    its own, pools of a longer stretch before it: those whose tokens have all been read.

    Args:
        left: tokens to the left in the first level.
        pooled_left: in the second.
        kernel, stride, pool, mix, share_weights: as in `PoolingformerAttention`.
        base: of the rotary angles.
        norm_keys: scale queries and keys to one length before they meet.
        backend: of `window_attention`, where nothing is cached.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        left: int = 128,
        *,
        pooled_left: int = 512,
        kernel: int = 5,
        stride: int = 4,
        pool: str = "convolution",
        mix: bool = False,
        share_weights: bool = False,
        base: float = 10000.0,
        norm_keys: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias, base=base, norm_keys=norm_keys)
        self.left, self.pooled_left = check_left(left), check_left(pooled_left, "pooled_left")
        _check_pools(kernel, stride, pool, pooled_left, f"pooled_left={pooled_left}")
        self.kernel, self.stride, self.pool, self.mix = kernel, stride, pool, mix
        self.backend = backend
        self.qkv_pooled = None if share_weights else nn.Linear(dim, 3 * dim, bias=bias)
        convolved = pool == "convolution"
        self.pool_key = nn.Linear(dim // heads, kernel) if convolved else None
        self.pool_value = nn.Linear(dim // heads, kernel) if convolved else None

    def forward(
        self, hidden: Tensor, first: int = 0, state: Levels | None = None, keep_state: bool = False
    ) -> Attended:
        near, pools, rest = (None, None, None) if state is None else state
        out, near = self._near(hidden, first, near)
        query, key, value = self.project(hidden if self.mix else out, self.qkv_pooled)
        query, key = self.turned(query, key, first=first)
        rest = Cache.join(rest, key, value)
        known = 0 if pools is None else pools.key.shape[1]
        tokens = rest.key.shape[1]
        # The last ones may not be whole yet: nobody sees these.
        made = _pooled(self, rest.key, self.pool_key), _pooled(self, rest.value, self.pool_value)
        pools = Cache.join(pools, *made)
        second = pooled_attention(
            query,
            pools.key,
            pools.value,
            window=(self.pooled_left, 0),
            kernel=self.kernel,
            stride=self.stride,
            at=known * self.stride + tokens - query.shape[1],
            dropout_p=self.dropout_p,
        )
        out = out + second.flatten(2)
        if not keep_state:
            return Attended(out)
        whole = max(0, (tokens - self.kernel) // self.stride + 1)
        # The first pool that the next token sees, of those that are known.
        begin = -(-(known * self.stride + tokens - self.pooled_left) // self.stride)
        pools = pools.part(max(0, begin), known + whole)
        rest = rest.part(whole * self.stride, tokens)
        return Attended(out, Levels(near.last(self.left), pools, rest))

    def _near(self, hidden: Tensor, first: int, cache: Cache | None) -> tuple[Tensor, Cache]:
        """The first level [batch, tokens, dim], and its keys and values."""
        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        known = Cache.join(cache, key, value)
        if cache is None:
            out = window_attention(
                query,
                key,
                value,
                window=(self.left, 0),
                dropout_p=self.dropout_p,
                backend=self.backend,
            )
        else:
            out = banded_attention(query, *known, left=self.left, dropout_p=self.dropout_p)
        return out.flatten(2), known


def _check_pools(kernel: int, stride: int, pool: str, reach: int, given: str) -> None:
    if not 1 <= stride <= kernel:
        raise ValueError(
            f"stride={stride} must be from 1 to kernel={kernel}: tokens between two pools "
            "would never be seen"
        )
    if pool not in POOLS:
        raise ValueError(f"pool={pool!r} is unknown; choose from {', '.join(POOLS)}")
    if kernel > reach + 1:
        raise ValueError(
            f"{given} holds no pool of kernel={kernel} tokens: the second level would see nothing"
        )


def _pooled(
    layer: PoolingformerAttention | CausalPoolingformer,
    states: Tensor,
    weights: nn.Linear | None,
    valid: Tensor | None = None,
) -> Tensor:
    return pool_neighbours(
        states,
        layer.kernel,
        layer.stride,
        layer.pool,
        valid=valid,
        weight=None if weights is None else weights.weight,
        bias=None if weights is None else weights.bias,
    )
