"""Routing Transformer: centroids that follow the tokens choose who attends to whom."""

from torch import Tensor, nn
from torch.nn.functional import linear

from longspan.layers.causal import Attended, CausalAttention
from longspan.layers.clusters import ClusterCache, unit
from longspan.layers.document import Chosen
from longspan.layers.observing import Observing, ObservingDocument, OnlineCentroids
from longspan.ops.centroids import strongest
from longspan.ops.clustered import clustered_attention, routed_attention


class RoutingAttention(ObservingDocument):
    """Queries are their own keys, scaled to one length. Each centroid takes the `size` tokens that
    are nearest to it, and these see each other, themselves only if they are alone. A token that
    several take gets the mean, one that none takes gets nothing from this layer. Global tokens
    change nothing.

    Args:
        clusters, size: near the root of a document's length each, and together at least as many
            as it has tokens, time is of the order n * sqrt(n).
        decay: see `OnlineCentroids`.
        commitment: what it costs a token to be far from its nearest centroid, see
            `auxiliary_loss`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        clusters: int = 64,
        size: int = 64,
        decay: float = 0.999,
        commitment: float = 1e-4,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias, shared=True)
        self.size, self.commitment = _check(size, commitment)
        self.centroids = OnlineCentroids(heads, clusters, self.head_dim, decay=decay)

    def take_in(self, states: Tensor) -> None:
        self.centroids.take_in(_content(self.qkv, states, self.heads))

    def cost(self) -> Tensor | float:
        if self._noted is None or self.commitment == 0:
            return 0.0
        hidden, valid = self._noted
        points = _content(self.qkv, hidden, self.heads)
        return self.commitment * self.centroids.distance(points, self.centroids(points), valid)

    def clusters(self, points: Tensor, valid: Tensor | None) -> Tensor:
        """[batch, clusters, heads, size]: the tokens that each centroid takes."""
        return strongest(points, self.centroids.directions, self.size, valid)

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        shared, value = self.qkv(hidden).unflatten(-1, (2, self.heads, -1)).unbind(2)
        shared = unit(shared)
        places = self.clusters(shared, valid)
        (query,) = self.rotated(shared, position_ids=position_ids)
        out = routed_attention(
            *(query, query, value),
            places,
            self_last=True,
            dropout_p=self.dropout_p,
            scale=self.head_dim**0.5,
        )
        return out.flatten(2)


class CausalRouting(Observing, CausalAttention):
    """Every token sees the last `size` tokens of its cluster before it, itself only if there are
    none. Which tokens a centroid takes of a whole text would depend on what follows; which
    centroid is nearest to a token does not.

    The state holds all keys and values, as any of them may still be seen.

    Args:
        clusters, size, decay: see `RoutingAttention`.
        commitment: what it costs a token to be far from its centroid.
        base: of the rotary angles.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        clusters: int = 64,
        size: int = 64,
        decay: float = 0.999,
        commitment: float = 1e-4,
        base: float = 10000.0,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias, shared=True, base=base)
        self.size, self.commitment = _check(size, commitment)
        self.centroids = OnlineCentroids(heads, clusters, dim // heads, decay=decay)

    def take_in(self, states: Tensor) -> None:
        self.centroids.take_in(_content(self.qkv, states, self.heads))

    def clusters(self, points: Tensor) -> Tensor:
        return self.centroids(points)[..., None]

    def forward(
        self,
        hidden: Tensor,
        first: int = 0,
        state: ClusterCache | None = None,
        keep_state: bool = False,
    ) -> Attended:
        self.note(hidden)
        shared, value = self.qkv(hidden).unflatten(-1, (2, self.heads, -1)).unbind(2)
        shared = unit(shared)
        clusters = self.clusters(shared)
        (query,) = self.turned(shared, first=first)
        known = ClusterCache.join(state, query, value, clusters)
        out = clustered_attention(
            query,
            *known,
            size=self.size,
            causal=True,
            self_last=True,
            dropout_p=self.dropout_p,
            scale=(self.dim // self.heads) ** 0.5,
        )
        loss = None
        if self.training and self.commitment > 0:
            loss = self.commitment * self.centroids.distance(shared, clusters[..., 0])
        return Attended(out.flatten(2), known.kept() if keep_state else None, loss)


def _content(qkv: nn.Linear, states: Tensor, heads: int) -> Tensor:
    """What centroids see of hidden states [..., dim]: [..., heads, head_dim]."""
    half = qkv.out_features // 2
    bias = None if qkv.bias is None else qkv.bias[:half]
    shared = linear(states.to(qkv.weight.dtype), qkv.weight[:half], bias)
    return unit(shared.unflatten(-1, (heads, -1)))


def _check(size: int, commitment: float) -> tuple[int, float]:
    if size < 1:
        raise ValueError(f"size={size} must be at least 1 token")
    if commitment < 0:
        raise ValueError(f"commitment={commitment} must not be negative")
    return size, commitment
