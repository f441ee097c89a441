"""Performer: softmax attention estimated from random features, in linear time."""

import torch
from torch import Tensor, nn

from longspan.layers.causal import Attended, CausalAttention
from longspan.layers.document import Chosen, DocumentAttention
from longspan.layers.observing import Refreshed, same_everywhere
from longspan.ops.linear import (
    KERNELS,
    Sums,
    causal_linear_attention,
    draw_features,
    linear_attention,
)


class RandomFeatures(Refreshed):
    """The random vectors of a layer: a buffer that is saved with the weights.

    Args:
        features: how many; "elu" needs none.
        orthogonal: those of a block at right angles, which lowers the variance.
        fresh: others for every call while training, so that a model does not learn to rely on
            these. They follow torch's generator, as dropout does; nothing is changed by a call.
        redraw: others from then on after every so many steps of training, for the same reason; a
            call changes nothing here, either, `refresh` does. 0 = never.
    """

    steps: Tensor  # since training began

    def __init__(
        self,
        features: int,
        head_dim: int,
        *,
        kernel: str,
        orthogonal: bool,
        fresh: bool,
        redraw: int,
    ) -> None:
        super().__init__()
        if kernel not in KERNELS:
            raise ValueError(f"kernel={kernel!r} is unknown; choose from {', '.join(KERNELS)}")
        if features < 1:
            raise ValueError(f"features={features} must be at least 1")
        if redraw < 0 or (redraw > 0 and fresh):
            raise ValueError(
                f"redraw={redraw} must be a number of steps, or 0 for never, as with fresh=True, "
                "which draws in every call"
            )
        self.orthogonal = orthogonal
        self.fresh = fresh and kernel != "elu"
        self.every = 0 if kernel == "elu" else redraw
        self.projection: Tensor | None
        drawn = None
        if kernel != "elu":
            drawn = draw_features(features, head_dim, orthogonal=orthogonal)
        self.register_buffer("projection", drawn)
        if self.every > 0:
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @property
    def changes(self) -> bool:
        """Whether vectors may be others in the next piece of a text that is trained on."""
        return self.training and (self.fresh or self.every > 0)

    @torch.no_grad()
    def refresh(self) -> None:
        if self.every == 0:
            return
        self.steps += 1
        if int(self.steps) % self.every == 0:
            self.redraw()
            assert self.projection is not None
            same_everywhere(self.projection)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Other vectors from now on. Sums of the old ones mean nothing to them."""
        if self.projection is not None:
            self.projection.copy_(self._draw(self.projection, generator))

    def forward(self) -> Tensor | None:
        if self.projection is None or not (self.fresh and self.training):
            return self.projection
        return self._draw(self.projection)

    def _draw(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        made = draw_features(
            *like.shape,
            orthogonal=self.orthogonal,
            generator=generator,
            device=like.device if generator is None else generator.device,
        )
        return made.to(like)


class PerformerAttention(DocumentAttention):
    """Every token sees its whole document, so global tokens change nothing.

    Args:
        features: random vectors per head, shared by all heads; more estimate better.
        kernel: "softmax", an estimate of softmax attention; "relu" and "elu" are kernels of their
            own, see `linear_attention`.
        orthogonal, fresh, redraw: see `RandomFeatures`.
        eps: see `linear_attention`.
        dropout: on what comes out of each head, as there are no weights to drop.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        features: int = 256,
        kernel: str = "softmax",
        orthogonal: bool = True,
        fresh: bool = False,
        redraw: int = 0,
        eps: float = 1e-6,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias)
        if not eps >= 0:
            raise ValueError(f"eps={eps} must not be negative: features are positive")
        self.kernel, self.eps = kernel, eps
        self.features = RandomFeatures(
            *(features, self.head_dim),
            kernel=kernel,
            orthogonal=orthogonal,
            fresh=fresh,
            redraw=redraw,
        )

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        out = linear_attention(
            *self.project(hidden, position_ids),
            self.features(),
            kernel=self.kernel,
            valid=valid,
            eps=self.eps,
        )
        return nn.functional.dropout(out, self.dropout, self.training).flatten(2)


class CausalPerformer(CausalAttention):
    """Every token sees all before it, through sums that do not grow with the text.

    Args:
        features, kernel, orthogonal, fresh, redraw, dropout: see `PerformerAttention`. With
            `fresh` or `redraw` a text cannot be trained on in pieces that know of each other.
        position: "rotary" or "none".
        base: of the rotary angles.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        features: int = 256,
        kernel: str = "softmax",
        orthogonal: bool = True,
        fresh: bool = False,
        redraw: int = 0,
        position: str = "rotary",
        base: float = 10000.0,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        rotary = base if position == "rotary" else None
        super().__init__(dim, heads, dropout=dropout, bias=bias, base=rotary)
        if position not in ("rotary", "none"):
            raise ValueError(f"position={position!r}: choose from rotary, none")
        self.kernel = kernel
        self.features = RandomFeatures(
            *(features, dim // heads),
            kernel=kernel,
            orthogonal=orthogonal,
            fresh=fresh,
            redraw=redraw,
        )

    def forward(
        self, hidden: Tensor, first: int = 0, state: Sums | None = None, keep_state: bool = False
    ) -> Attended:
        if self.features.changes and (keep_state or state is not None):
            raise ValueError(
                "fresh=True and redraw draw other features from piece to piece of a text, and a "
                "state is made of the old ones: train without state, or with fresh=False, redraw=0"
            )
        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        out, after = causal_linear_attention(
            *(query, key, value), self.features(), kernel=self.kernel, before=state
        )
        out = nn.functional.dropout(out, self.dropout, self.training)
        return Attended(out.flatten(2), after if keep_state else None)
