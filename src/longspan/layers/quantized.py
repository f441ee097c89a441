"""Linear layers whose weights are kept as int8, for inference on a CPU.

A row of the weight is its codes in [-127, 127] times one number. Where the CPU multiplies int8
(AVX-512 VNNI, through oneDNN), the input is rounded in the same way, each token by its own largest
number, and the products are of integers; elsewhere the weight is expanded and multiplied as usual.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longspan.layers.dense import has_onednn

_MOST = 127
_MIDDLE = 128  # oneDNN wants inputs without a sign: this one stands for 0
_TOKENS = 512  # at a time, so that what lies between input and output stays in the cache

# oneDNN's own layout of each layer's codes, made on first use; with what it was made of.
_PACKED: "WeakKeyDictionary[QuantizedLinear, tuple[tuple[int, int], Tensor]]" = WeakKeyDictionary()


class QuantizedLinear(nn.Module):
    """An `nn.Linear` from int8 weights, [..., in_features] -> [..., out_features]."""

    codes: Tensor
    scale: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        codes = torch.zeros(out_features, in_features, dtype=torch.int8)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", torch.ones(out_features))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False)

    @classmethod
    @torch.no_grad()
    def of(cls, layer: nn.Linear) -> "QuantizedLinear":
        """What is nearest to `layer`."""
        made = cls(layer.in_features, layer.out_features, layer.bias is not None)
        made.codes, scale = quantized(layer.weight.detach().float())
        made.scale = scale.flatten()
        if layer.bias is not None:
            made.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        return made.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """Expanded, [out_features, in_features], in the dtype of the model."""
        dtype = self.scale.dtype if self.bias is None else self.bias.dtype
        return (self.codes * self.scale[:, None]).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        refuse_use(self.training or (x.requires_grad and torch.is_grad_enabled()), x.device)
        if not has_int8_products() or torch.compiler.is_compiling():
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return linear(x, self.weight.to(x.dtype), bias)
        rows = x.reshape(-1, self.in_features)
        out = rows.new_empty(rows.shape[0], self.out_features)
        for some, into in zip(rows.split(_TOKENS), out.split(_TOKENS), strict=True):
            into.copy_(self._multiply(some))
        return out.view(*x.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        """[tokens, in_features] -> float32 [tokens, out_features]."""
        codes, scale = quantized(rows.float(), above=_MIDDLE)
        none = torch.zeros(self.out_features, dtype=torch.int32)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, _MIDDLE, self._packed(), self.scale.float(), none, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        product.mul_(scale)
        return product if self.bias is None else product.add_(self.bias)

    def _packed(self) -> Tensor:
        made_of = self.codes.data_ptr(), self.codes._version
        found = _PACKED.get(self)
        if found is None or found[0] != made_of:
            found = made_of, torch.ops.onednn.qlinear_prepack(self.codes, None)
            _PACKED[self] = found
        return found[1]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, int8"


def quantized(rows: Tensor, above: int = 0) -> tuple[Tensor, Tensor]:
    """Codes, and the number [rows, 1] that each row of them is to be multiplied with. Codes are
    int8, or uint8 if something is added to them, `above` 127."""
    scale = rows.abs().amax(dim=-1, keepdim=True) / _MOST
    # A row of zeros has no largest number, and needs none.
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (rows / scale).round_()
    return (codes.add_(above).to(torch.uint8) if above else codes.to(torch.int8)), scale


def quantize_layers(parent: nn.Module) -> None:
    """Put a `QuantizedLinear` in the place of every `nn.Linear` below `parent`."""
    for module in list(parent.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, QuantizedLinear.of(child))


def has_int8_products() -> bool:
    supported: Any = torch.cpu._is_vnni_supported
    return has_onednn() and supported()


def refuse_use(training: bool, device: torch.device) -> None:
    """Raise where int8 weights cannot serve."""
    if training:
        raise ValueError(
            "int8 weights are for inference: use model.eval() and torch.no_grad(), or train the "
            "model that they were made of and quantize the result"
        )
    if device.type not in ("cpu", "meta"):
        raise ValueError(
            f"int8 weights run on a CPU, not on {device.type}: load the model that they were made "
            "of, in bfloat16"
        )
