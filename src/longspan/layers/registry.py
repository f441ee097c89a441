"""The attention layers by name. A new mechanism is one op, one layer and one line here."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from longspan.layers.window import WindowAttention

ATTENTION: dict[str, type[nn.Module]] = {
    "window": WindowAttention,
}


def build_attention(dim: int, heads: int, dropout: float, setting: Mapping[str, Any]) -> nn.Module:
    """The layer that `setting` asks for: its "kind" ("window" if absent) and its options.

    A layer is called with hidden states [batch, tokens, dim] and, by keyword, what the model made
    of its masks once for all layers: `seen` and `positions`, as in `WindowAttention`.
    """
    options = dict(setting)
    kind = options.pop("kind", "window")
    if kind not in ATTENTION:
        raise ValueError(f"attention kind {kind!r} is unknown; choose from {', '.join(ATTENTION)}")
    try:
        return ATTENTION[kind](dim, heads, dropout=dropout, **options)
    except TypeError as error:
        # A misspelt or missing option surfaces as Python's own complaint about arguments.
        raise TypeError(f"attention setting {dict(setting)!r}: {error}") from None
