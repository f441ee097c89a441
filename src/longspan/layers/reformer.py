"""Reformer: tokens see those that random hyperplanes put into the same bucket."""

import torch
from torch import Tensor, nn

from longspan.layers.causal import Attended, CausalAttention
from longspan.layers.clusters import ClusterCache, unit
from longspan.layers.document import Chosen, DocumentAttention
from longspan.ops.centroids import hashed
from longspan.ops.clustered import clustered_attention


class Hashes(nn.Module):
    """Random directions, and the bucket of a token is the one it is nearest to: a buffer that is
    saved with the weights.

    Args:
        buckets: an even number, half of them the opposites of the other half.
        rounds: hashes of every token, each with directions of its own.
        fresh: other directions in every call while training. They follow torch's generator, as
            dropout does; nothing is changed by a call.
    """

    directions: Tensor

    def __init__(
        self, heads: int, head_dim: int, *, buckets: int, rounds: int, fresh: bool
    ) -> None:
        super().__init__()
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets={buckets} must be even, 2 or more: half face the others")
        if rounds < 1:
            raise ValueError(f"rounds={rounds} must be at least 1")
        self.fresh = fresh
        self.register_buffer("directions", torch.randn(rounds, heads, buckets // 2, head_dim))

    def forward(self, points: Tensor) -> Tensor:
        """[batch, tokens, heads, head_dim] -> [batch, tokens, heads, rounds]."""
        half = self.directions
        half = torch.randn_like(half) if self.fresh and self.training else half
        return hashed(points, half)


class ReformerAttention(DocumentAttention):
    """Queries are their own keys, scaled to length 1. Tokens are sorted by bucket and cut into
    chunks, and see their chunk and the one before it, themselves only if they are alone; what they
    see in any round counts once. The first chunk has none before it. Global tokens change nothing.

    Args:
        buckets, rounds, fresh: see `Hashes`. About as many buckets as a document has chunks.
        chunk: tokens.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        buckets: int = 64,
        rounds: int = 4,
        chunk: int = 64,
        fresh: bool = False,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias, shared=True)
        if chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1 token")
        self.chunk = chunk
        self.hashes = Hashes(heads, self.head_dim, buckets=buckets, rounds=rounds, fresh=fresh)

    def clusters(self, points: Tensor) -> Tensor:
        return self.hashes(points)

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        shared, value = self.qkv(hidden).unflatten(-1, (2, self.heads, -1)).unbind(2)
        # Buckets are of content; positions count when tokens meet.
        clusters = self.clusters(shared)
        (query,) = self.rotated(shared, position_ids=position_ids)
        out = clustered_attention(
            *(query, unit(query), value),
            clusters,
            size=self.chunk,
            before=1,
            self_last=True,
            valid=valid,
            dropout_p=self.dropout_p,
            scale=1.0,
        )
        return out.flatten(2)


class CausalReformer(CausalAttention):
    """Every token sees the last `reach` tokens of its bucket before it, in every round, itself
    only if there are none. Chunks of a sorted text, as the paper has them, would move when it goes
    on; a token's bucket does not, nor what stands in it before the token.

    The state holds all keys and values, as any of them may still be seen.

    Args:
        buckets, rounds, fresh: see `Hashes`. With `fresh` directions a text cannot be trained on
            in pieces that know of each other.
        reach: tokens, in each round.
        base: of the rotary angles.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        buckets: int = 64,
        rounds: int = 4,
        reach: int = 64,
        fresh: bool = False,
        base: float = 10000.0,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias, shared=True, base=base)
        if reach < 1:
            raise ValueError(f"reach={reach} must be at least 1 token")
        self.reach = reach
        self.hashes = Hashes(heads, dim // heads, buckets=buckets, rounds=rounds, fresh=fresh)

    def clusters(self, points: Tensor) -> Tensor:
        return self.hashes(points)

    def forward(
        self,
        hidden: Tensor,
        first: int = 0,
        state: ClusterCache | None = None,
        keep_state: bool = False,
    ) -> Attended:
        if self.training and self.hashes.fresh and (keep_state or state is not None):
            raise ValueError(
                "fresh=True hashes every piece of a text by other directions, and a state is "
                "hashed by the old ones: train without state, or with fresh=False"
            )
        shared, value = self.qkv(hidden).unflatten(-1, (2, self.heads, -1)).unbind(2)
        clusters = self.clusters(shared)
        (query,) = self.turned(shared, first=first)
        known = ClusterCache.join(state, unit(query), value, clusters)
        out = clustered_attention(
            query,
            *known,
            size=self.reach,
            causal=True,
            self_last=True,
            dropout_p=self.dropout_p,
            scale=1.0,
        )
        return Attended(out.flatten(2), known.kept() if keep_state else None)
