"""Attention among tokens that belong together by content."""

from longspan.ops.clustered.api import clustered_attention, routed_attention

__all__ = ["clustered_attention", "routed_attention"]
