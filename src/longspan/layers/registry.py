"""The attention layers by name. A new mechanism is one op, one layer and one line here."""

from collections.abc import Mapping
from typing import Any

from longspan.layers.base import AttentionLayer
from longspan.layers.window import WindowAttention

ATTENTION: dict[str, type[AttentionLayer]] = {
    "window": WindowAttention,
}


def build_attention(
    dim: int, heads: int, setting: Mapping[str, Any], **shared: Any
) -> AttentionLayer:
    """The layer that `setting` asks for: its "kind" ("window" if absent) and its options, beside
    those that all layers of a model share, `dropout` and `bias`."""
    options = shared | dict(setting)
    kind = options.pop("kind", "window")
    if kind not in ATTENTION:
        raise ValueError(f"attention kind {kind!r} is unknown; choose from {', '.join(ATTENTION)}")
    try:
        return ATTENTION[kind](dim, heads, **options)
    except TypeError as error:
        # A misspelt or missing option surfaces as Python's own complaint about arguments.
        raise TypeError(f"attention setting {dict(setting)!r}: {error}") from None
