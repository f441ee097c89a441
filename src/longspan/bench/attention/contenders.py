"""Who is measured. A contender turns a case into a `Workload`: a forward pass that can be timed.

Everything a user would prepare once per batch (masks, block masks, other memory layouts) is
prepared here, outside what is timed. Optional packages are imported only by who needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.bench.attention.cases import AttentionCase
from longspan.bench.benchmark import Contenders, Workload, our_backend
from longspan.bench.flex import block_mask

CONTENDERS = Contenders()
contender = CONTENDERS.register


def _qkv(case: AttentionCase, device: torch.device) -> list[Tensor]:
    """Query, key and value, [batch, tokens, heads, head_dim]."""
    shape = (case.batch, case.tokens, case.heads, case.head_dim)
    dtype = getattr(torch, case.dtype)
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]


def _global_mask(case: AttentionCase, device: torch.device) -> Tensor | None:
    """Bool [batch, tokens]: the first tokens are global, as a question in front of its text."""
    if case.globals == 0:
        return None
    positions = torch.arange(case.tokens, device=device)
    return (positions < case.globals).expand(case.batch, -1).contiguous()


@contender("longspan", "longspan")
def _longspan(case: AttentionCase, device: torch.device) -> Workload:
    from longspan.ops.window import visibility, window_attention

    q, k, v = _qkv(case, device)
    mask = _global_mask(case, device)
    seen = None if mask is None else visibility(q, global_mask=mask)

    def forward() -> Tensor:
        return window_attention(
            q,
            k,
            v,
            window=case.window,
            dilation=case.dilation,
            visibility=seen,
            backend=our_backend(device),
        )

    return Workload(forward, [q, k, v], q)


@contender("longspan-unprepared", "longspan, unprepared")
def _longspan_unprepared(case: AttentionCase, device: torch.device) -> Workload:
    from longspan.ops.window import window_attention

    q, k, v = _qkv(case, device)
    mask = _global_mask(case, device)

    def forward() -> Tensor:
        return window_attention(
            q,
            k,
            v,
            window=case.window,
            dilation=case.dilation,
            global_mask=mask,
            backend=our_backend(device),
        )

    return Workload(forward, [q, k, v], q)


@cache
def _compiled_flex() -> Callable[..., Any]:
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    # Each case has its own shapes, so each compiles anew; the default limit is 8 in a process.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(flex_attention, dynamic=False)


@contender("flex", "FlexAttention", devices=("cuda",))
def _flex(case: AttentionCase, device: torch.device) -> Workload:
    if case.dilation != 1:
        raise ValueError("the FlexAttention contender has no dilation")
    flex = _compiled_flex()
    half = case.window // 2
    mask = block_mask(case.tokens, half, half, device, first=case.globals)
    q, k, v = (t.transpose(1, 2).contiguous() for t in _qkv(case, device))
    return Workload(lambda: flex(q, k, v, block_mask=mask), [q, k, v], q)


@contender("sdpa", "dense, SDPA")
def _sdpa(case: AttentionCase, device: torch.device) -> Workload:
    q, k, v = (t.transpose(1, 2).contiguous() for t in _qkv(case, device))
    return Workload(lambda: F.scaled_dot_product_attention(q, k, v), [q, k, v], q)


@contender("eager", "dense, written out", devices=("cuda",))
def _eager(case: AttentionCase, device: torch.device) -> Workload:
    q, k, v = (t.transpose(1, 2).contiguous() for t in _qkv(case, device))
    scale = case.head_dim**-0.5
    return Workload(lambda: ((q * scale) @ k.transpose(2, 3)).softmax(-1) @ v, [q, k, v], q)


def _hidden(case: AttentionCase, device: torch.device) -> Tensor:
    shape = (case.batch, case.tokens, case.heads * case.head_dim)
    return torch.randn(shape, device=device, dtype=getattr(torch, case.dtype))


def _layer_workload(layer: nn.Module, hidden: Tensor, forward: Callable[[], Tensor]) -> Workload:
    return Workload(forward, [hidden, *layer.parameters()], hidden)


@contender("longspan-layer", "longspan")
def _longspan_layer(case: AttentionCase, device: torch.device) -> Workload:
    return _our_layer(case, device, our_backend(device))


@contender("longspan-blocked-layer", "longspan, blocked", devices=("cpu",))
def _longspan_blocked_layer(case: AttentionCase, device: torch.device) -> Workload:
    """What a CPU without a compiler has."""
    return _our_layer(case, device, "blocked")


def _our_layer(case: AttentionCase, device: torch.device, backend: str) -> Workload:
    from longspan.layers.window import WindowAttention
    from longspan.ops import global_positions, visibility

    hidden = _hidden(case, device)
    mask = _global_mask(case, device)
    # A model prepares these once for all its layers, as transformers' does with its masks.
    seen = visibility(hidden, global_mask=mask)
    positions = None if mask is None else global_positions(mask)
    dim = case.heads * case.head_dim
    layer = WindowAttention(dim, case.heads, case.window, backend=backend)
    layer = layer.to(device, hidden.dtype).eval()
    return _layer_workload(layer, hidden, lambda: layer(hidden, seen=seen, positions=positions))


@contender("longformer-layer", "transformers Longformer")
def _longformer_layer(case: AttentionCase, device: torch.device) -> Workload:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    hidden = _hidden(case, device)
    config = LongformerConfig(
        hidden_size=case.heads * case.head_dim,
        num_attention_heads=case.heads,
        attention_window=[case.window],
        attention_probs_dropout_prob=0.0,
        num_hidden_layers=1,
    )
    layer = LongformerSelfAttention(config, layer_id=0).to(device, hidden.dtype).eval()
    # What LongformerModel hands to each layer: 0 = local, > 0 = global, < 0 = padding.
    is_global = _global_mask(case, device)
    if is_global is None:
        is_global = torch.zeros(case.batch, case.tokens, dtype=torch.bool, device=device)
    mask = is_global.to(hidden.dtype) * 10_000
    arguments = {
        "attention_mask": mask,
        "is_index_masked": mask < 0,
        "is_index_global_attn": is_global,
        "is_global_attn": case.globals > 0,
    }
    workload = _layer_workload(layer, hidden, lambda: layer(hidden, **arguments)[0])
    workload.waits = case.globals > 0  # it asks the device where they are
    return workload


class _DenseLayer(nn.Module):
    """The projections of a Longformer layer around torch's own dense attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@contender("sdpa-layer", "dense, SDPA")
def _sdpa_layer(case: AttentionCase, device: torch.device) -> Workload:
    hidden = _hidden(case, device)
    layer = _DenseLayer(case.heads * case.head_dim, case.heads).to(device, hidden.dtype)
    return _layer_workload(layer, hidden, lambda: layer(hidden))
