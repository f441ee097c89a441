"""A projection and the activation behind it, in one product where the CPU has one.

oneDNN, which comes with torch, multiplies float32 faster than torch's own choice on some CPUs and
applies GELU and the bias while a result is still in the cache. torch uses it in compiled graphs;
here it serves plain calls, without gradients.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

_DTYPES = (torch.float32, torch.bfloat16)
_MANY = 2048  # tokens


def project(
    layer: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """`activation(layer(x))`, [..., in] -> [..., out]."""
    return prepared(layer, x)(x, activation)


class Projection(Protocol):
    def __call__(
        self, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor: ...


def prepared(layer: nn.Module, x: Tensor, rows: Tensor | None = None) -> Projection:
    """`project` for the pieces of `x`, onto some `rows` of the weight or all."""
    if not one_product(layer, x):
        assert rows is None

        def apply(x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
            out = layer(x)
            return out if activation is None else activation(out)

        return apply
    weight: Any = layer.weight
    bias: Any = layer.bias
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    # Laying out a weight as oneDNN likes it best takes the time of some forty tokens.
    if x.shape[:-1].numel() >= _MANY:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def multiply(x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        fused = activation is not None and _is_gelu(activation)
        name, kind = ("gelu", "none") if fused else ("none", "")
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], kind)
        return out if fused or activation is None else activation(out)

    return multiply


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
