"""What layers share whose queries are their own keys, met within clusters: reformer, routing."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


class ClusterCache(NamedTuple):
    """Keys and values [batch, tokens, heads, head_dim] of all tokens, and the clusters that these
    are in [batch, tokens, heads, rounds]."""

    key: Tensor
    value: Tensor
    clusters: Tensor

    @staticmethod
    def join(
        cache: "ClusterCache | None", key: Tensor, value: Tensor, clusters: Tensor
    ) -> "ClusterCache":
        new = ClusterCache(key, value, clusters)
        if cache is None:
            return new
        return ClusterCache(
            *(torch.cat((a.to(b.dtype), b), 1) for a, b in zip(cache, new, strict=True))
        )

    def kept(self) -> "ClusterCache":
        return ClusterCache(*(tensor.detach().clone() for tensor in self))


def unit(states: Tensor) -> Tensor:
    """Scaled to length 1; in half precision the smallest lengths would be 0."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return normalize(wide, dim=-1).to(states.dtype)
