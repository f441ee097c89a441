"""A projection and the activation behind it, in one product where the CPU has one.

oneDNN, which comes with torch, multiplies float32 faster than torch's own choice on some CPUs and
applies GELU and the bias while a result is still in the cache. torch uses it in compiled graphs;
here it serves plain calls, without gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

_DTYPES = (torch.float32, torch.bfloat16)


def project(
    layer: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """`activation(layer(x))`, [..., in] -> [..., out]."""
    fused = activation is None or _is_gelu(activation)
    if fused and one_product(layer, x):
        weight: Any = layer.weight
        name, kind = ("none", "") if activation is None else ("gelu", "none")
        return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, name, [], kind)
    out = layer(x)
    return out if activation is None else activation(out)


def one_product(layer: nn.Module, x: Tensor) -> bool:
    """Whether oneDNN can compute `layer(x)`, and nobody would notice but by the time it takes."""
    # Anything but a plain layer on plain tensors, such as an adapter, has a call of its own.
    return (
        type(layer) is nn.Linear
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.numel() > 0
        and x.dtype in _DTYPES
        and layer.weight.dtype == x.dtype
        and layer.weight.device == x.device
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not torch.is_autocast_enabled("cpu")
        and has_onednn()
    )


def has_onednn() -> bool:
    """With AVX-512: elsewhere it was not measured."""
    return (
        torch.backends.mkldnn.is_available()
        and torch._C._get_mkldnn_enabled()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def _is_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    """The exact one, by itself or as transformers wraps it."""
    return getattr(activation, "act", activation) is gelu
