"""Pure functions on tensors. Nothing here imports anything of ours but other ops."""

from longspan.ops.rows import global_attention, global_positions, global_rows
from longspan.ops.window import visibility, window_attention

__all__ = [
    "global_attention",
    "global_positions",
    "global_rows",
    "visibility",
    "window_attention",
]
