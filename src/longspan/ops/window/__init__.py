"""Attention within a window: dilated, causal, global, padded or packed, forward and backward."""

from longspan.ops.window.api import BACKENDS, window_attention
from longspan.ops.window.pattern import Pattern, Visibility, visibility

__all__ = ["BACKENDS", "Pattern", "Visibility", "visibility", "window_attention"]
