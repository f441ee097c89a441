"""Every kind in float32, bfloat16 and float16, and under autocast: how far it is from float64.

Most kinds are plain PyTorch themselves, so there is no plainer form to compare with. Their budget
comes from dense attention of the same size, written out: relative to its size, what a kind gives,
and each of its gradients, may be twice as far from float64 as dense attention is in the same dtype.
Clusters are chosen once, for all dtypes: a token that rounding puts elsewhere is no matter of ulps.
"""

from functools import cache
from typing import Any

import pytest
import torch
from layers.family import (
    DECODERS,
    DEVICE,
    DIM,
    ENCODERS,
    HEADS,
    causal_layer,
    encoder_layer,
    heads_of,
    joined,
    keep_choice,
    states,
)
from torch import Tensor

from longspan.layers.registry import ATTENTION, CAUSAL_ATTENTION
from longspan.ops import visibility

TOKENS = 61
ALL_ENCODERS: dict[str, dict[str, Any]] = {
    "window": {"window": 8},
    "funnel-shorter": {"kind": "funnel", "stride": 3},
    **ENCODERS,
}
ALL_DECODERS: dict[str, dict[str, Any]] = {
    "window": {"left": 5, "dilation": [1, 2, 1]},
    "window-relative": {"left": 5, "position": "relative"},
    "full": {"kind": "full"},
    "xl": {"kind": "xl", "memory": 16},
    "compressive": {"kind": "compressive", "memory": 6, "compressed": 4, "rate": 2},
    **DECODERS,
}
# Where twice is not enough, and why.
LOOSER = {
    "linformer": 4,  # two products more: keys and values are mixed before they are met
    "linformer-convolution": 4,
    "performer-relu": 8,  # rounding moves features over the kink, and with them all of a gradient
    "poolingformer-max": 8,  # the largest of a pool may be another: so is who gets the gradient
    "poolingformer": 12,  # two levels; the gradients of its pools are what is left of larger ones
    "adaptive_span": 4,  # as are those of the spans
    "compressive": 4,  # and of the biases
    "xl": 4,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Dense(torch.nn.Module):
    """The yardstick, with projections like those of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = encoder_layer({"window": 8}).qkv

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = heads_of(self, hidden)
        scores = query @ key.mT * (DIM // HEADS) ** -0.5
        return joined(scores.softmax(-1) @ value)


def described(batch: str, hidden: Tensor) -> dict[str, Any]:
    """What a layer is told about a batch, given after the hidden states."""
    if batch == "whole":
        return {}
    if batch == "packed":
        bounds = torch.tensor([0, 19, 20, 37, TOKENS], device=DEVICE)
        return {"seen": visibility(hidden, cu_seqlens=bounds)}
    mask = torch.ones(hidden.shape[:2], dtype=torch.long, device=DEVICE)
    mask[1, :7] = mask[1, 48:] = 0
    return {"seen": visibility(hidden, attention_mask=mask)}


def in_pieces(made: Any, hidden: Tensor) -> Tensor:
    """A text in two, the second knowing of the first."""
    first = made(hidden[:, :40], keep_state=True)
    return torch.cat((first.out, made(hidden[:, 40:], 40, first.state).out), 1)


def computed(run: Any, made: Any, hidden: Tensor, autocast: Any = None) -> dict[str, Tensor]:
    """What comes out, and the gradients of states and weights."""
    made.zero_grad()
    hidden = hidden.detach().clone().requires_grad_()
    with torch.autocast(DEVICE.type, autocast, enabled=autocast is not None):
        out = run(made, hidden)
    assert out.dtype == (autocast or hidden.dtype)
    torch.manual_seed(9)
    gradient = torch.randn(out.shape, dtype=torch.float64, device="cpu").to(torch.bfloat16)
    out.backward(gradient.to(DEVICE, out.dtype))
    assert hidden.grad is not None
    weights = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "hidden": hidden.grad, **weights}


def errors(run: Any, made: Any, dtype: torch.dtype, rows: int, mixed: bool) -> dict[str, float]:
    """Of each tensor, relative to its norm; from weights and states that `dtype` can hold. Mixed:
    under autocast, the weights in float32."""
    torch.manual_seed(1)
    made.to(dtype).double()
    hidden = states(rows, TOKENS).to(dtype).double()
    exact = {name: t.double().clone() for name, t in computed(run, made, hidden).items()}
    low = torch.float32 if mixed else dtype
    found = computed(run, made.to(low), hidden.to(low), dtype if mixed else None)
    assert all(tensor.isfinite().all() for tensor in found.values())
    return {
        name: float((tensor.double() - exact[name]).norm() / exact[name].norm())
        for name, tensor in found.items()
    }


@cache
def budget(dtype: torch.dtype, mixed: bool = False) -> dict[str, float]:
    usual = errors(lambda made, hidden: made(hidden), Dense(), dtype, 2, mixed)
    usual["weights"] = max(usual.pop("qkv.weight"), usual.pop("qkv.bias"))
    # In float32 dense attention may be off by less than a library's order of adding up is worth.
    least = 8 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
    return {name: max(error, least) for name, error in usual.items()}


def assert_within(found: dict[str, float], usual: dict[str, float], kind: str) -> None:
    for name, error in found.items():
        allowed = LOOSER.get(kind, 2) * usual.get(name, usual["weights"])
        assert error <= allowed, f"{name}: {error:.2e}, allowed are {allowed:.2e}"


@every_dtype
@pytest.mark.parametrize("batch", ["whole", "padded", "packed"])
@pytest.mark.parametrize("kind", ALL_ENCODERS)
def test_encoders(kind, batch, dtype):
    made, rows = encoder_layer(ALL_ENCODERS[kind]), 1 if batch == "packed" else 2

    def run(made, hidden):
        return made(hidden, **described(batch, hidden))

    choose_once(run, made, dtype, rows)
    assert_within(errors(run, made, dtype, rows, False), budget(dtype), kind)


@every_dtype
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("kind", ALL_DECODERS)
def test_decoders(kind, pieces, dtype):
    made = causal_layer(ALL_DECODERS[kind])
    run = in_pieces if pieces else lambda made, hidden: made(hidden).out
    choose_once(run, made, dtype, 2)
    assert_within(errors(run, made, dtype, 2, False), budget(dtype), kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", ["whole", "padded"])
@pytest.mark.parametrize("kind", ALL_ENCODERS)
def test_encoders_under_autocast(kind, batch, dtype):
    made = encoder_layer(ALL_ENCODERS[kind])

    def run(made, hidden):
        return made(hidden, **described(batch, hidden))

    choose_once(run, made, dtype, 2)
    assert_within(errors(run, made, dtype, 2, True), budget(dtype, True), kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ALL_DECODERS)
def test_decoders_under_autocast(kind, dtype):
    made = causal_layer(ALL_DECODERS[kind])
    choose_once(in_pieces, made, dtype, 2)
    assert_within(errors(in_pieces, made, dtype, 2, True), budget(dtype, True), kind)


def choose_once(run: Any, made: Any, dtype: torch.dtype, rows: int) -> None:
    """The choice of the call in float64 that `errors` begins with."""
    torch.manual_seed(1)
    made.to(dtype).double()
    hidden = states(rows, TOKENS).to(dtype).double()
    keep_choice(made, lambda: run(made, hidden))


def test_every_kind_is_here():
    for here, known in ((ALL_ENCODERS, ATTENTION), (ALL_DECODERS, CAUSAL_ATTENTION)):
        assert {one.get("kind", "window") for one in here.values()} == set(known)
