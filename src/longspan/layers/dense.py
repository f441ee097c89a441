"""Projections, with the activation behind them, as fast as the CPU can multiply.

oneDNN and MKL, which come with torch, multiply float32 faster where weights are in a layout of
their own. Which of them is faster depends on who made the CPU; GFLOP/s of one core,
512 tokens x 768 x 3,072 and 512 x 3,072 x 768:

    AMD (116 at most)           torch's choice (MKL) 102, laid out for oneDNN 113
    Intel (Ice Lake, 2.8 GHz)   torch's choice (MKL) 135, laid out for oneDNN 130, for MKL 150

torch uses these products in compiled graphs; here they serve plain calls, without gradients.
"""

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

_DTYPES = (torch.float32, torch.bfloat16)
_MANY = 2048  # tokens for which pieces, and laying out weights (the time of 40 to 70), pay
_FEW = 16  # tokens that make up for the time it takes to widen a weight
_TOKENS = 512  # at a time, see `in_pieces`


def project(
    layer: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """`activation(layer(x))`, [..., in] -> [..., out]."""
    return prepared(layer, x)(x, activation)


class Projection(Protocol):
    def __call__(
        self, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor: ...


def prepared(
    layer: nn.Module, x: Tensor, rows: Tensor | None = None, *, in_pieces: bool = False
) -> Projection:
    """`project` for `x`, or for the pieces that `in_pieces` makes of it, onto some `rows` of the
    weight or all."""
    if not one_product(layer, x):
        assert rows is None
        return as_it_is(layer)
    weight: Any = layer.weight
    bias: Any = layer.bias
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    many = x.shape[:-1].numel() >= _MANY
    if x.dtype == torch.float32 and (has_mkl() or not many):
        # Few tokens are multiplied as torch does it, hence with the bits of other models.
        return _by_mkl(weight, bias, laid_out=many and in_pieces)
    if has_mkl() and not has_bf16_products() and x.shape[:-1].numel() >= _FEW:
        return _in_float32(weight, bias, laid_out=many)
    return _by_onednn(weight, bias, laid_out=many)


def as_it_is(layer: nn.Module) -> Projection:
    """The layer's own call, whatever it is."""

    def apply(x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        out = layer(x)
        return out if activation is None else activation(out)

    return apply


def _by_onednn(weight: Tensor, bias: Tensor | None, *, laid_out: bool) -> Projection:
    """GELU and the bias are applied while a result is still in the cache."""
    if laid_out:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def multiply(x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        fused = activation is not None and _is_gelu(activation)
        name, kind = ("gelu", "none") if fused else ("none", "")
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], kind)
        return out if fused or activation is None else activation(out)

    return multiply


def _by_mkl(weight: Tensor, bias: Tensor | None, *, laid_out: bool) -> Projection:
    """MKL lays out a weight for one number of tokens, here `_TOKENS`; its operator multiplies any
    other number, such as the rest behind the last piece, as torch does."""
    packed = None
    if laid_out:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), _TOKENS)

    def multiply(x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if packed is None:
            out = linear(x, weight, bias)
        else:
            out = torch.ops.mkl._mkl_linear(x, packed, weight, bias, _TOKENS)
        if activation is None:
            return out
        return torch.ops.aten.gelu_(out) if _is_gelu(activation) else activation(out)

    return multiply


def _in_float32(weight: Tensor, bias: Tensor | None, *, laid_out: bool) -> Projection:
    """Where bfloat16 has no products of its own, oneDNN takes four times as long as float32."""
    wide = _by_mkl(weight.float(), None if bias is None else bias.float(), laid_out=laid_out)

    def multiply(x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return in_pieces(lambda some: wide(some.float(), activation).to(x.dtype), x)

    return multiply


def in_pieces(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` of [..., tokens, dim], in which no token sees another, a few tokens at a time
    where nothing has to be kept for gradients: what lies between stays in the cache, and in memory
    that is used again, where new memory would have to be asked of the system page by page."""
    first = tensors[0]
    whole = torch.is_grad_enabled() or torch.compiler.is_compiling()
    # A graph that is to serve any length must not even ask for the number of tokens.
    if whole or first.device.type != "cpu" or first.shape[:-1].numel() < _MANY:
        return function(*tensors)
    pieces = zip(*(tensor.flatten(0, -2).split(_TOKENS) for tensor in tensors), strict=True)
    out = None
    for number, piece in enumerate(pieces):
        made = function(*piece)
        if out is None:
            out = made.new_empty(first.shape[:-1].numel(), made.shape[-1])
        out[number * _TOKENS : (number + 1) * _TOKENS] = made
    assert out is not None
    return out.view(*first.shape[:-1], -1)


def one_product(layer: nn.Module, x: Tensor) -> bool:
    """Whether oneDNN or MKL may compute `layer(x)`: nobody notices but by the time it takes."""
    # Anything but a plain layer on plain tensors, such as an adapter, has a call of its own.
    return (
        not torch.compiler.is_compiling()
        and type(layer) is nn.Linear
        and "forward" not in vars(layer)  # as accelerate's hooks replace it
        and type(layer.weight) is nn.Parameter
        and type(x) is Tensor
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


@cache
def has_mkl() -> bool:
    """On Intel's CPUs; on AMD's, oneDNN is faster than MKL as torch calls it."""
    operators = ("_mkl_linear", "_mkl_reorder_linear_weight")
    return (
        torch.backends.mkl.is_available()
        and all(hasattr(torch.ops.mkl, name) for name in operators)
        and _is_intel()
    )


@cache
def has_bf16_products() -> bool:
    supported: Any = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is None or supported()


def _is_intel() -> bool:
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        told = platform.processor()
    return "GenuineIntel" in told


def _is_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    """The exact one, by itself or as transformers wraps it."""
    return getattr(activation, "act", activation) is gelu
