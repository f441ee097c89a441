"""Who is measured: a layer of each kind, set up to look at about as much for every token."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from longspan.bench.benchmark import Contenders, Workload
from longspan.bench.family.cases import FamilyCase
from longspan.bench.family.rivals import RIVALS, ROUNDS
from longspan.layers.causal import Attended
from longspan.layers.registry import build_attention, build_causal_attention
from longspan.ops.shorten import count_pools


class Mechanism(NamedTuple):
    label: str
    setting: Callable[[FamilyCase], dict[str, Any]]  # empty: dense attention


def _root(case: FamilyCase) -> int:
    return round(case.tokens**0.5)


def _reformer(case: FamilyCase) -> dict[str, Any]:
    """In every round a chunk and the one before it, as the rivals have it."""
    chunk = case.reach // 8
    buckets = min(256, 2 * max(1, case.tokens // chunk))
    return {"kind": "reformer", "chunk": chunk, "rounds": ROUNDS, "buckets": buckets}


def _routing(case: FamilyCase) -> dict[str, Any]:
    """As published: of the order n * sqrt(n)."""
    return {"kind": "routing", "clusters": _root(case), "size": -(-case.tokens // _root(case))}


def _routing_matched(case: FamilyCase) -> dict[str, Any]:
    """As its rival has it: clusters of one size, so that their number grows with the text, and
    with it the time to find the nearest."""
    size = min(case.tokens, case.reach // 2)
    return {"kind": "routing", "clusters": case.tokens // size, "size": size}


MECHANISMS = {
    "window": Mechanism("window", lambda c: {"window": c.reach, "global_tokens": False}),
    "linformer": Mechanism(
        "Linformer",
        lambda c: {"kind": "linformer", "length": c.tokens, "rank": min(c.tokens, c.reach // 2)},
    ),
    "performer": Mechanism("Performer", lambda c: {"kind": "performer", "features": c.reach // 2}),
    "bigbird": Mechanism("BigBird", lambda c: {"kind": "bigbird", "block": c.reach // 8}),
    "poolingformer": Mechanism(
        "Poolingformer",
        lambda c: {
            "kind": "poolingformer",
            "window": c.reach // 2,
            "pooled_window": 2 * c.reach,
        },
    ),
    "blockwise": Mechanism("blockwise", lambda c: {"kind": "blockwise", "block": c.reach}),
    "bp": Mechanism("BP", lambda c: {"kind": "bp", "near": max(1, c.reach // 32)}),
    "funnel": Mechanism("Funnel", lambda c: {"kind": "funnel", "stride": 2}),
    "clusterformer": Mechanism(
        "Cluster-Former",
        lambda c: {"kind": "clusterformer", "chunk": c.reach, "bank": 64, "every": 1},
    ),
    "reformer": Mechanism("Reformer", _reformer),
    "routing": Mechanism("Routing", _routing),
    "routing-matched": Mechanism("Routing, as its rival", _routing_matched),
    "dense": Mechanism("dense, SDPA", lambda c: {}),
    "causal-window": Mechanism("window", lambda c: {"left": c.reach}),
    "causal-performer": Mechanism(
        "Performer", lambda c: {"kind": "performer", "features": c.reach // 2}
    ),
    "causal-bigbird": Mechanism("BigBird", lambda c: {"kind": "bigbird", "block": c.reach // 8}),
    "causal-poolingformer": Mechanism(
        "Poolingformer",
        lambda c: {"kind": "poolingformer", "left": c.reach // 2, "pooled_left": 2 * c.reach},
    ),
    "causal-blockwise": Mechanism("blockwise", lambda c: {"kind": "blockwise", "block": c.reach}),
    "sparse-strided": Mechanism(
        "sparse, strided", lambda c: {"kind": "sparse", "stride": _root(c)}
    ),
    "sparse-fixed": Mechanism(
        "sparse, fixed",
        lambda c: {
            "kind": "sparse",
            "stride": _root(c),
            "pattern": "fixed",
            # A number that does not grow: all blocks before give theirs to each query.
            "summary": min(8, _root(c)),
        },
    ),
    "adaptive-span": Mechanism(
        "adaptive span",
        lambda c: {"kind": "adaptive_span", "longest": c.reach, "start": 1.0},
    ),
    "causal-bp": Mechanism("BP", lambda c: {"kind": "bp", "near": c.reach // 16}),
    "shortformer": Mechanism(
        "Shortformer", lambda c: {"kind": "shortformer", "segment": c.reach // 2}
    ),
    "causal-reformer": Mechanism(
        "Reformer",
        lambda c: {"kind": "reformer", "reach": c.reach // 4, "rounds": ROUNDS},
    ),
    "causal-routing": Mechanism("Routing", _routing),
    "causal-routing-matched": Mechanism("Routing, as its rival", _routing_matched),
    "causal-dense": Mechanism("dense, SDPA", lambda c: {"kind": "full"}),
}


class Dense(nn.Module):
    """Every token sees all others, through PyTorch's fused attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, hidden: Tensor) -> Tensor:
        stacked = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = (t.transpose(1, 2) for t in stacked.unbind(2))
        return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _build(name: str, case: FamilyCase, device: torch.device) -> Workload:
    torch.manual_seed(0)
    setting = MECHANISMS[name].setting(case)
    if not setting:
        layer: nn.Module = Dense(case.hidden, case.heads)
    else:
        make = build_causal_attention if case.causal else build_attention
        layer = make(case.hidden, case.heads, setting)
    return _workload(layer, case, device)


def _build_rival(name: str, case: FamilyCase, device: torch.device) -> Workload:
    torch.manual_seed(0)
    # Most of them read numbers back.
    return replace(_workload(RIVALS[name].make(case), case, device), waits=True)


def _workload(layer: nn.Module, case: FamilyCase, device: torch.device) -> Workload:
    dtype = getattr(torch, case.dtype)
    layer = layer.to(device, dtype).eval()
    hidden = torch.randn(case.batch, case.tokens, case.hidden, device=device, dtype=dtype)

    def forward() -> Tensor:
        done = layer(hidden)
        # Decoders' layers return their state beside it.
        return done.out if isinstance(done, Attended) else done

    weights = list(layer.parameters())
    resident = sum(weight.numel() * weight.element_size() for weight in weights)
    # A layer may return fewer tokens than it was given.
    left = count_pools(case.tokens, getattr(layer, "shortens", 1))
    output = hidden.new_empty(case.batch, left, case.hidden)
    return Workload(forward, [hidden, *weights], output, resident)


CONTENDERS = Contenders()
for _name, _mechanism in MECHANISMS.items():
    # A partial, as it travels to the process that measures memory.
    CONTENDERS.register(_name, _mechanism.label)(partial(_build, _name))
for _name, _rival in RIVALS.items():
    CONTENDERS.register(_name, _rival.label, package=_rival.package)(partial(_build_rival, _name))
