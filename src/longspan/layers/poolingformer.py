"""Poolingformer: a window, and on top of it a wider one over pools of neighbouring tokens."""

from torch import Tensor, nn

from longspan.layers.document import Chosen, DocumentAttention
from longspan.ops.pooled import POOLS, count_members, pool_neighbours, pooled_attention
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
        if not 1 <= stride <= kernel:
            raise ValueError(
                f"stride={stride} must be from 1 to kernel={kernel}: tokens between two pools "
                "would never be seen"
            )
        if pool not in POOLS:
            raise ValueError(f"pool={pool!r} is unknown; choose from {', '.join(POOLS)}")
        self.window, self.pooled_window = check_window(window), check_window(pooled_window)
        if kernel > sum(self.pooled_window) + 1:
            raise ValueError(
                f"pooled_window={pooled_window} holds no pool of kernel={kernel} tokens: the "
                "second level would see nothing"
            )
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
            self._pooled(key, valid, self.pool_key),
            self._pooled(value, valid, self.pool_value),
            window=self.pooled_window,
            kernel=self.kernel,
            stride=self.stride,
            visible=visible,
            dropout_p=self.dropout_p,
        )
        return first + second.flatten(2)

    def _pooled(self, states: Tensor, valid: Tensor | None, weights: nn.Linear | None) -> Tensor:
        return pool_neighbours(
            states,
            self.kernel,
            self.stride,
            self.pool,
            valid=valid,
            weight=None if weights is None else weights.weight,
            bias=None if weights is None else weights.bias,
        )
