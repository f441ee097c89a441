"""longspan: transformers that read whole documents."""

from longspan.ops import global_attention, window_attention

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "global_attention", "window_attention"]
