"""The attention layers by name. A new mechanism is one op, one layer and one line here."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from longspan.layers.causal import CausalAttention, CausalFull, CausalWindow
from longspan.layers.compressive import CompressiveAttention
from longspan.layers.window import WindowAttention
from longspan.layers.xl import XLAttention

ATTENTION: dict[str, type[nn.Module]] = {
    "window": WindowAttention,
}
# For decoders, called as `layers/causal.py` says.
CAUSAL_ATTENTION: dict[str, type[CausalAttention]] = {
    "window": CausalWindow,
    "full": CausalFull,
    "xl": XLAttention,
    "compressive": CompressiveAttention,
}


def build_attention(dim: int, heads: int, dropout: float, setting: Mapping[str, Any]) -> nn.Module:
    """The layer that `setting` asks for: its "kind" ("window" if absent) and its options.

    A layer is called with hidden states [batch, tokens, dim] and, by keyword, what the model made
    of its masks once for all layers: `seen` and `positions`, as in `WindowAttention`.
    """
    return _build(ATTENTION, dim, heads, setting, dropout=dropout)


def build_causal_attention(
    dim: int, heads: int, dropout: float, bias: bool, setting: Mapping[str, Any]
) -> CausalAttention:
    """The same for a decoder."""
    return _build(CAUSAL_ATTENTION, dim, heads, setting, dropout=dropout, bias=bias)


def _build(
    known: Mapping[str, Any], dim: int, heads: int, setting: Mapping[str, Any], **common: Any
) -> Any:
    options = dict(setting)
    kind = options.pop("kind", "window")
    if kind not in known:
        raise ValueError(f"attention kind {kind!r} is unknown; choose from {', '.join(known)}")
    try:
        return known[kind](dim, heads, **common, **options)
    except TypeError as error:
        # A misspelt or missing option surfaces as Python's own complaint about arguments.
        raise TypeError(f"attention setting {dict(setting)!r}: {error}") from None
