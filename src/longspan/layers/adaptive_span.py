"""Adaptive span: every head learns how far back it looks, and pays for it."""

import math

import torch
from torch import Tensor, nn

from longspan.layers.causal import Attended, Cache, CausalAttention
from longspan.layers.observing import Refreshed
from longspan.ops.fading import fading_attention


class AdaptiveSpanAttention(Refreshed, CausalAttention):
    """Weights beyond a head's span fade out over `ramp` tokens to nothing:

        m(x) = clamp((ramp + z - x) / ramp, 0, 1),   x: tokens back,   z: the head's span

    multiplies the exponentials of the scores before they are made to sum to one. Spans are
    learned; their mean, as a share of `longest`, times `cost` is added to the loss. No more is
    computed than the spans ask for, on a CPU than the longest of any head.

    Args:
        longest: tokens back, at most.
        ramp: tokens.
        start: of the spans, as a share of the longest.
        cost: of a mean span as long as `longest`.
        base: of the rotary angles.
        norm_keys: scale queries and keys to one length before they meet.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        longest: int,
        *,
        ramp: int = 32,
        start: float = 0.0,
        cost: float = 4e-3,
        base: float = 10000.0,
        norm_keys: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias, base=base, norm_keys=norm_keys)
        if longest < 0 or ramp < 1:
            raise ValueError(f"longest={longest} must not be negative, ramp={ramp} at least 1")
        if not 0.0 <= start <= 1.0 or not 0.0 <= cost < math.inf:
            raise ValueError(
                f"start={start} must be from 0 to 1, cost={cost} not negative, and finite"
            )
        self.longest, self.ramp, self.cost = longest, ramp, cost
        self.share = nn.Parameter(torch.full((heads,), start))

    def spans(self) -> Tensor:
        """[heads]: z, in tokens. What is learned may leave its range; a gradient leads it back."""
        share = self.share
        return (share + (share.clamp(0.0, 1.0) - share).detach()) * self.longest

    @torch.no_grad()
    def refresh(self) -> None:
        """Put spans that a step took out of their range back to its end. What they cost goes on
        pushing the shortest, which would else have a long way back by the time they are needed."""
        self.share.clamp_(0.0, 1.0)

    @property
    def reach(self) -> int:
        """How many tokens back any head sees, at most. A GPU finds out for itself, and nobody has
        to wait for it."""
        if torch.compiler.is_compiling() or self.share.is_cuda:
            return self.longest
        # At a distance of ramp + z the weight is 0.
        ends = float(self.spans().detach().max()) + self.ramp
        return min(self.longest, math.ceil(ends) - 1)

    def forward(
        self, hidden: Tensor, first: int = 0, state: Cache | None = None, keep_state: bool = False
    ) -> Attended:
        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        known = Cache.join(state, key, value)
        spans = self.spans()
        out = fading_attention(
            *(query, known.key, known.value, spans),
            ramp=self.ramp,
            reach=self.reach,
            dropout_p=self.dropout_p,
        )
        loss = self.cost * spans.mean() / max(1, self.longest) if self.training else None
        # The longest possible is kept, as spans may have grown when it is read.
        return Attended(out.flatten(2), known.last(self.longest) if keep_state else None, loss)
