"""Cluster-Former: tokens that are alike attend to each other, wherever in a document they are."""

from torch import Tensor

from longspan.layers.document import Chosen
from longspan.layers.observing import BankCentroids, ObservingDocument
from longspan.ops.clustered import clustered_attention


class ClusterformerAttention(ObservingDocument):
    """Tokens are sorted by the centroid that their hidden state is nearest to, in all heads alike,
    and cut into chunks, within which they see each other. Centroids come from k-means over a bank
    of hidden states, see `BankCentroids`; before the first k-means order is that of positions, so
    chunks are blocks of neighbours. Global tokens change nothing. The layers around it are windows,
    which is for the model's settings to say: the paper has two of these among 24.

    Args:
        clusters: the paper has 64, 256 or 512.
        chunk: tokens that see each other; the length of the paper's windows.
        bank, every: hidden states that are clustered, and how many steps of training apart. The
            paper does it every epoch or few, and leaves the numbers open.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        clusters: int = 64,
        chunk: int = 256,
        bank: int = 4096,
        every: int = 200,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias)
        if chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1 token")
        self.chunk = chunk
        self.centroids = BankCentroids(clusters, dim, bank=bank, every=every)

    def take_in(self, states: Tensor) -> None:
        self.centroids.take_in(states)

    def clusters(self, hidden: Tensor) -> Tensor:
        """[batch, tokens, 1, 1]: the cluster of each token."""
        return self.centroids(hidden[:, :, None])[..., None]

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        out = clustered_attention(
            *self.project(hidden, position_ids),
            self.clusters(hidden),
            size=self.chunk,
            valid=valid,
            dropout_p=self.dropout_p,
        )
        return out.flatten(2)
