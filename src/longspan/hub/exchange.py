"""Weights between their names and ours, and what of our attention theirs cannot express."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.models import LongspanConfig


def gather(
    wanted: Any, table: Mapping[str, tuple[str, ...]], theirs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our weights, each joined from theirs; a bias that theirs do without is zero."""
    weights = {}
    for name in wanted:
        module, _, kind = name.rpartition(".")
        parts = table[module]
        if kind == "bias" and f"{parts[0]}.bias" not in theirs:
            rows = sum(theirs[f"{part}.weight"].shape[0] for part in parts)
            weights[name] = theirs[f"{parts[0]}.weight"].new_zeros(rows)
        else:
            weights[name] = torch.cat([theirs[f"{part}.{kind}"] for part in parts])
    return weights


def scatter(ours: Mapping[str, Tensor], table: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Their weights, ours taken apart."""
    weights = {}
    for name, tensor in ours.items():
        module, _, kind = name.rpartition(".")
        parts = table[module]
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            weights[f"{part}.{kind}"] = piece
    return weights


def finish(made: nn.Module, weights: Mapping[str, Tensor], source: PreTrainedModel) -> None:
    """Fill in the weights, where and as the source has them; each must be there, and fit."""
    made.to(device=source.device, dtype=source.dtype)
    made.load_state_dict(weights)
    made.train(source.training)


def share_global(weights: dict[str, Tensor], config: LongspanConfig, start: str) -> None:
    """Give layers whose global tokens share the projections of all others a copy of their own,
    as Longformer and LED have it. `start` is the prefix of the encoder's weights."""
    for index, setting in enumerate(config.attention):
        if not setting.get("separate_global", True):
            at = f"{start}layers.{index}.attention.qkv"
            for kind in ("weight", "bias"):
                weights[f"{at}_global.{kind}"] = weights[f"{at}.{kind}"]


def inexpressible(config: LongspanConfig) -> list[str]:
    """Why Longformer and LED could not do what this encoder does; empty if they can."""
    reasons = []
    for index, setting in enumerate(config.attention):
        if setting["kind"] != "window" or not isinstance(setting["window"], int):
            reasons.append(f"layer {index} has no symmetric window: {setting}")
        elif setting["window"] == 0:
            reasons.append(f"layer {index} has a window of 0")
        if not setting.get("global_tokens", True):
            reasons.append(f"layer {index} knows of no global tokens")
        dilation = setting.get("dilation", 1)
        if {dilation} != {1} if isinstance(dilation, int) else set(dilation) != {1}:
            reasons.append(f"layer {index} is dilated: {setting}")
    if config.position != "learned":
        reasons.append(f"its positions are {config.position}")
    if config.quantize is not None:
        reasons.append(f"its weights are {config.quantize}; give the model they were made of")
    fixed = {"norm_first": False, "gated": False, "bias": True, "embedding_scale": False}
    for name, wanted in fixed.items():
        if getattr(config, name) is not wanted:
            reasons.append(f"{name} is {getattr(config, name)}")
    return reasons
