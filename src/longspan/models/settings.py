"""Attention settings of a model's layers, as encoders and decoders are given them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def per_layer(given: Any, layers: int) -> list[Mapping[str, Any]]:
    """One setting per layer, of one for all or a list of them."""
    if isinstance(given, Mapping):
        given = [given] * layers
    if not isinstance(given, Sequence) or not all(isinstance(one, Mapping) for one in given):
        raise TypeError(
            'attention must be one setting, such as {"kind": "bigbird"}, or a list of them, '
            f"got {given!r}"
        )
    if len(given) != layers:
        raise ValueError(
            f"attention has {len(given)} settings for {layers} layers; "
            "give one for all, or one per layer"
        )
    return list(given)


def try_out(settings: Sequence[dict[str, Any]], build: Callable[[dict[str, Any]], object]) -> None:
    """Build a layer of each setting, without memory; an error names the layer."""
    with torch.device("meta"):
        for layer, setting in enumerate(settings):
            if setting not in settings[:layer]:
                try:
                    build(setting)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"layer {layer}: {error}") from None
