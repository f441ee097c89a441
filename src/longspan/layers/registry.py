"""The attention layers by name. A new mechanism is one op, one layer and one line here."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from longspan.layers.adaptive_span import AdaptiveSpanAttention
from longspan.layers.base import AttentionLayer
from longspan.layers.bigbird import BigBirdAttention, CausalBigBird
from longspan.layers.blockwise import BlockwiseAttention, CausalBlockwise
from longspan.layers.bp import BPAttention, CausalBP
from longspan.layers.causal import CausalAttention, CausalFull, CausalWindow
from longspan.layers.clusterformer import ClusterformerAttention
from longspan.layers.compressive import CompressiveAttention
from longspan.layers.funnel import FunnelAttention
from longspan.layers.linformer import LinformerAttention
from longspan.layers.performer import CausalPerformer, PerformerAttention
from longspan.layers.poolingformer import CausalPoolingformer, PoolingformerAttention
from longspan.layers.reformer import CausalReformer, ReformerAttention
from longspan.layers.routing import CausalRouting, RoutingAttention
from longspan.layers.shortformer import ShortformerAttention
from longspan.layers.sparse import SparseAttention
from longspan.layers.window import WindowAttention
from longspan.layers.xl import XLAttention

ATTENTION: dict[str, type[AttentionLayer]] = {
    "window": WindowAttention,
    "linformer": LinformerAttention,
    "performer": PerformerAttention,
    "bigbird": BigBirdAttention,
    "poolingformer": PoolingformerAttention,
    "blockwise": BlockwiseAttention,
    "bp": BPAttention,
    "funnel": FunnelAttention,
    "clusterformer": ClusterformerAttention,
    "reformer": ReformerAttention,
    "routing": RoutingAttention,
}
# For decoders, called as `layers/causal.py` says.
CAUSAL_ATTENTION: dict[str, type[CausalAttention]] = {
    "window": CausalWindow,
    "full": CausalFull,
    "xl": XLAttention,
    "compressive": CompressiveAttention,
    "performer": CausalPerformer,
    "sparse": SparseAttention,
    "bigbird": CausalBigBird,
    "poolingformer": CausalPoolingformer,
    "blockwise": CausalBlockwise,
    "adaptive_span": AdaptiveSpanAttention,
    "bp": CausalBP,
    "shortformer": ShortformerAttention,
    "reformer": CausalReformer,
    "routing": CausalRouting,
}
# Why a kind that one side knows is not for the other.
NOT_CAUSAL = {
    "linformer": "each of its keys mixes all tokens of a document, later ones with earlier ones",
    "funnel": "its pools put tokens together with later ones, and are read by all",
    "clusterformer": "its chunks are cut from a sorted text, and later tokens move earlier ones",
}
_CAUSAL_ONLY = "it reads text in one direction"


def build_attention(
    dim: int, heads: int, setting: Mapping[str, Any], **shared: Any
) -> AttentionLayer:
    """The layer that `setting` asks for: its "kind" ("window" if absent) and its options, beside
    those that all layers of a model share, `dropout` and `bias`."""
    return _build(ATTENTION, dim, heads, setting, shared)


def build_causal_attention(
    dim: int, heads: int, setting: Mapping[str, Any], **shared: Any
) -> CausalAttention:
    """The same for a decoder."""
    return _build(CAUSAL_ATTENTION, dim, heads, setting, shared)


def _build(
    known: Mapping[str, Any],
    dim: int,
    heads: int,
    setting: Mapping[str, Any],
    shared: Mapping[str, Any],
) -> Any:
    options = dict(shared) | dict(setting)
    kind = options.pop("kind", "window")
    if not isinstance(kind, str):
        raise ValueError(
            f"kind={kind!r} of attention must be a name; choose from {', '.join(known)}"
        )
    if kind not in known:
        why = "is unknown"
        if kind in ATTENTION:
            why = f"is for encoders alone: {NOT_CAUSAL[kind]}"
        elif kind in CAUSAL_ATTENTION:
            why = f"is for decoders alone: {_CAUSAL_ONLY}"
        near = difflib.get_close_matches(kind, known, n=1) if why == "is unknown" else []
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
        raise ValueError(f"attention kind {kind!r} {why}; {hint}")
    _check_options(known[kind], kind, options)
    return known[kind](dim, heads, **options)


def _check_options(layer: Callable[..., Any], kind: str, options: Mapping[str, Any]) -> None:
    """An option that is misspelt, missing or of a wrong type is named, and what would be right."""
    _, _, *taken = inspect.signature(layer).parameters.values()
    names = [one.name for one in taken]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ValueError(f"attention kind {kind!r} has no option {name!r}; {hint}")
    for one in taken:
        if one.name in options and not _fits(options[one.name], one.annotation):
            wanted = _in_words(one.annotation)
            raise ValueError(f"{one.name}={options[one.name]!r}: expected {wanted}")
    missing = [one.name for one in taken if one.default is one.empty and one.name not in options]
    if missing:
        raise ValueError(f"attention kind {kind!r} needs {' and '.join(missing)}")


def _in_words(kind: Any) -> str:
    """`int or a list of int` for `int | Sequence[int]`."""
    if kind is type(None):
        return "None"
    inside = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_in_words, inside))
    return f"a list of {_in_words(inside[0])}" if inside else kind.__name__


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of the type that a layer's option has, or, from JSON, a list of such."""
    one_of = get_args(kind)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(
            all(_fits(own, get_args(one)[0]) for own in value) for one in one_of if get_args(one)
        )
    if one_of:
        return any(_fits(value, one) for one in one_of if not get_args(one))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
