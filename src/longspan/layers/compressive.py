"""Compressive Transformer: what leaves the memory is compressed into a second, coarser one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss, scaled_dot_product_attention

from longspan.layers.causal import Attended
from longspan.layers.xl import XLAttention

COMPRESSIONS = ("mean", "max", "conv", "dilated", "most-used")
LOSSES = ("attention", "autoencoding", "none")


class Memories(NamedTuple):
    """What Transformer-XL's layer remembers, oldest first: [batch, tokens, dim or 3 * dim]."""

    compressed: Tensor
    recent: Tensor
    usage: Tensor | None = None  # [batch, recent tokens]: attention received; for most-used only


class Compressor(nn.Module):
    """[batch, rate * n, dim] -> [batch, n, dim], oldest first.

    "mean" and "max" pool, "conv" is a convolution with kernel and stride `rate`, "dilated" puts a
    residual convolution of three taps, `rate` apart, before it, and "most-used" keeps the tokens
    that were attended to most.
    """

    def __init__(self, dim: int, rate: int, kind: str) -> None:
        super().__init__()
        if kind not in COMPRESSIONS:
            raise ValueError(f"compression={kind!r}: choose from {', '.join(COMPRESSIONS)}")
        self.rate, self.kind = rate, kind
        self.conv = nn.Conv1d(dim, dim, rate, rate) if kind in ("conv", "dilated") else None
        self.dilated = (
            nn.Conv1d(dim, dim, 3, padding=rate, dilation=rate) if kind == "dilated" else None
        )

    def forward(self, old: Tensor, usage: Tensor | None = None) -> Tensor:
        groups = old.unflatten(1, (-1, self.rate))
        if self.kind == "mean":
            return groups.mean(2)
        if self.kind == "max":
            return groups.amax(2)
        if self.kind == "most-used":
            assert usage is not None
            kept = usage.topk(groups.shape[1], dim=1).indices.sort(dim=1).values
            return old.gather(1, kept[..., None].expand(-1, -1, old.shape[2]))
        assert self.conv is not None
        line = old.mT
        if self.dilated is not None:
            line = line + self.dilated(line)
        return self.conv(line).mT


class CompressiveAttention(XLAttention):
    """A segment attends to itself, to `memory` tokens before it, and to `compressed` slots that
    each stand for `rate` tokens before those.

    Positions go by slot, a compressed one counting as one token. Tokens are compressed `rate` at
    a time, so up to rate - 1 more than `memory` are kept until their group is complete. The
    compressor learns from its own loss alone, and that loss teaches nothing else.

    Args:
        memory, compressed: sizes of the two memories.
        rate: tokens per compressed slot.
        compression: "mean", "max", "conv", "dilated" or "most-used".
        loss: "attention" (attending to the compressed tokens shall give what attending to the
            tokens gave), "autoencoding" (the tokens shall be recoverable) or "none". The
            compressions without parameters have nothing to learn, so for them it is "none".
        clamp: the distance from which on all count as equal.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memory: int,
        compressed: int,
        *,
        rate: int = 3,
        compression: str = "conv",
        loss: str | None = None,
        clamp: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, heads, memory, clamp=clamp, dropout=dropout, bias=bias)
        if compressed < 0 or rate < 1:
            raise ValueError(f"compressed={compressed} and rate={rate}: at least 0 and 1")
        learns = compression in ("conv", "dilated")
        loss = ("attention" if learns else "none") if loss is None else loss
        if loss not in LOSSES:
            raise ValueError(f"loss={loss!r}: choose from {', '.join(LOSSES)}")
        if loss != "none" and not learns:
            raise ValueError(f"loss={loss!r}: compression={compression!r} has nothing to learn")
        self.compressed, self.rate, self.loss = compressed, rate, loss
        self.compressor = Compressor(dim, rate, compression)
        self.expand = None
        if loss == "autoencoding":
            self.expand = nn.ConvTranspose1d(dim, dim, rate, rate)

    def forward(
        self,
        hidden: Tensor,
        first: int = 0,
        state: Any = None,
        keep_state: bool = False,
    ) -> Attended:
        if state is None:
            none = self.remember(hidden[:, :0])
            counts = self.compressor.kind == "most-used"
            state = Memories(none, none, none[..., 0].float() if counts else None)
        compressed, recent, usage = state
        state = Memories(self.fit(compressed), self.fit(recent), usage)
        seen = torch.cat((state.compressed, state.recent), 1)
        out, new = self.attend(hidden, seen, None)
        if not keep_state:
            return Attended(out)
        recent = torch.cat((state.recent, new), 1)
        usage = None
        if state.usage is not None:
            usage = self._usage(hidden, seen)[:, state.compressed.shape[1] :]
            usage[:, : state.usage.shape[1]] += state.usage
        leaving = max(0, recent.shape[1] - self.memory) // self.rate * self.rate
        old, recent = recent[:, :leaving, : self.dim], recent[:, leaving:].clone()
        if usage is not None:
            old_usage, usage = usage[:, :leaving], usage[:, leaving:].clone()
        else:
            old_usage = None
        if leaving == 0 or self.compressed == 0:
            # No lesson this time; torch's DDP wants every parameter in every step.
            loss = None
            if self.training and self.loss != "none":
                own = [*self.compressor.parameters(), *(self.expand or nn.Identity()).parameters()]
                loss = sum((p.sum() for p in own), out.new_zeros(())) * 0.0
            return Attended(out, Memories(state.compressed, recent, usage), loss)
        coarse = self.compressor(old, old_usage)
        compressed = torch.cat((state.compressed, self.remember(coarse.detach())), 1)
        compressed = compressed[:, max(0, compressed.shape[1] - self.compressed) :].clone()
        loss = self._loss(hidden, old, coarse) if self.training else None
        return Attended(out, Memories(compressed, recent, usage), loss)

    def _loss(self, hidden: Tensor, old: Tensor, new: Tensor) -> Tensor | None:
        if self.loss == "none":
            return None
        if self.expand is not None:
            return mse_loss(self.expand(new.mT).mT, old)
        return mse_loss(self._content(hidden, new), self._content(hidden, old))

    def _content(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """Attention by content alone, through weights that take no gradient."""
        weight, bias = self.qkv.weight.detach(), self.qkv.bias
        bias = (None, None) if bias is None else bias.detach().split((self.dim, 2 * self.dim))
        query = linear(hidden.detach(), weight[: self.dim], bias[0])
        key, value = linear(seen, weight[self.dim :], bias[1]).chunk(2, -1)
        query, key, value = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value)
        )
        return scaled_dot_product_attention(query, key, value)

    @torch.no_grad()
    def _usage(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """[batch, seen + tokens]: the attention each received, by content, over all heads."""
        query, key, _ = self.project(hidden)
        old_key, _ = self.key_value(seen, hidden.dtype)
        query, key = query.transpose(1, 2), torch.cat((old_key, key), 1).transpose(1, 2)
        scores = (query @ key.mT).float() * query.shape[-1] ** -0.5
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(seen.shape[1] + 1)
        return scores.masked_fill(future, -torch.inf).softmax(-1).sum((1, 2))
