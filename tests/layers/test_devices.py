"""What a GPU would say of every kind, where there may be none: tensors that are said to be on one.

They have shapes and dtypes but no numbers, so a tensor left on the CPU, dtypes that do not go
together under a GPU's autocast, whose rules are others than a CPU's, and every place where a call
would wait for the device are errors here. A PyTorch without CUDA knows too little of it for that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from layers.family import CPU, DIM, HEADS
from layers.test_precision import ALL_DECODERS, ALL_ENCODERS, TOKENS
from torch._subclasses.fake_tensor import FakeTensorMode

from longspan.layers.adaptive_span import AdaptiveSpanAttention
from longspan.layers.registry import build_attention, build_causal_attention
from longspan.ops import visibility

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="PyTorch was built without CUDA"
)
FORMS = [(torch.bfloat16, None), (torch.float32, torch.bfloat16)]
every_form = pytest.mark.parametrize(("dtype", "autocast"), FORMS)


@contextmanager
def pretended(autocast: torch.dtype | None) -> Iterator[None]:
    """Fake tensors, and a GPU's autocast, which `torch.autocast` refuses where there is none."""
    with FakeTensorMode(), torch.no_grad():
        if autocast is not None:
            torch.set_autocast_dtype("cuda", autocast)
        torch.set_autocast_enabled("cuda", autocast is not None)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()


def pretend(made: torch.nn.Module, dtype: torch.dtype) -> Any:
    """The layer, with weights and buffers that are said to be on a GPU."""
    for module in made.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    kind = dtype if tensor.is_floating_point() else tensor.dtype
                    own[name] = torch.empty(tensor.shape, dtype=kind, device="cuda")  # pyright: ignore[reportArgumentType]
    return made


def said_to_be(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


@every_form
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ALL_ENCODERS)
def test_encoders(kind, training, dtype, autocast):
    with CPU:
        made = build_attention(DIM, HEADS, {**ALL_ENCODERS[kind], "rotary": 100.0}, dropout=0.1)
    with pretended(autocast):
        made = pretend(made, dtype).train(training)
        hidden = said_to_be(2, TOKENS, DIM, dtype=dtype)
        mask = said_to_be(2, TOKENS, dtype=torch.long)
        for seen in (None, visibility(hidden, attention_mask=mask)):
            out = made(hidden, seen=seen)
            assert (out.device.type, out.dtype) == ("cuda", autocast or dtype)


@every_form
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ALL_DECODERS)
def test_decoders(kind, training, dtype, autocast, monkeypatch):
    # It says itself that it waits for the device.
    monkeypatch.setattr(AdaptiveSpanAttention, "reach", 16)
    with CPU:
        made = build_causal_attention(DIM, HEADS, ALL_DECODERS[kind], dropout=0.1)
    with pretended(autocast):
        made, state = pretend(made, dtype).train(training), None
        for first, tokens in ((0, TOKENS), (TOKENS, 20), (TOKENS + 20, 1)):
            hidden = said_to_be(2, tokens, DIM, dtype=dtype)
            done = made(hidden, first, state, keep_state=True)
            assert (done.out.device.type, done.out.dtype) == ("cuda", autocast or dtype)
            state = done.state
