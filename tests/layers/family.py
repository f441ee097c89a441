"""A small setting of every mechanism of the family, and what the tests of each of them share."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from packaging.version import Version

from longspan.layers.observing import Observing
from longspan.layers.position import rotate
from longspan.layers.registry import build_attention, build_causal_attention

DIM, HEADS = 24, 3
# The same numbers everywhere: layers and states are drawn on the CPU, then moved here.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
# Under `on_device`: torch 2.11 cannot follow methods of tensors where a default device is set.
compiles_anywhere = pytest.mark.skipif(
    DEVICE.type == "cuda" and Version(torch.__version__) < Version("2.12"),
    reason="torch 2.11 compiles nothing under a default device",
)

# Each of them approximates or restricts softmax attention in its own way; none has positions.
ENCODERS: dict[str, dict[str, Any]] = {
    "linformer": {"kind": "linformer", "length": 64, "rank": 8},
    "linformer-pool": {"kind": "linformer", "length": 64, "rank": 8, "reduction": "pool"},
    "linformer-convolution": {
        "kind": "linformer",
        "length": 64,
        "rank": 8,
        "reduction": "convolution",
        "sharing": "none",
    },
    "performer": {"kind": "performer", "features": 20, "eps": 0.0},  # gradients are exact
    "performer-relu": {"kind": "performer", "features": 20, "kernel": "relu"},
    "performer-elu": {"kind": "performer", "kernel": "elu"},
    "bigbird": {"kind": "bigbird", "block": 4, "random": 2, "global_blocks": 1},
    "bigbird-plain": {"kind": "bigbird", "block": 3, "window": 1, "random": 0, "global_blocks": 0},
    "poolingformer": {
        "kind": "poolingformer",
        "window": 4,
        "pooled_window": 20,
        "kernel": 3,
        "stride": 2,
    },
    "poolingformer-max": {
        "kind": "poolingformer",
        "window": 4,
        "pooled_window": (6, 9),
        "pool": "max",
        "mix": True,
    },
    "poolingformer-mean": {
        "kind": "poolingformer",
        "window": 4,
        "pooled_window": 20,
        "pool": "mean",
        "share_weights": True,
    },
    "blockwise": {"kind": "blockwise", "block": 5},
    "bp": {"kind": "bp", "near": 2},
    "funnel": {"kind": "funnel", "stride": 1},  # a greater one returns fewer tokens
    "clusterformer": {
        "kind": "clusterformer",
        "clusters": 4,
        "chunk": 6,
        "bank": 32,
        "every": 4,
    },
    "reformer": {"kind": "reformer", "buckets": 4, "rounds": 2, "chunk": 5},
    "reformer-once": {"kind": "reformer", "buckets": 6, "rounds": 1, "chunk": 3},
    "routing": {"kind": "routing", "clusters": 5, "size": 7},
}
DECODERS: dict[str, dict[str, Any]] = {
    "performer": {"kind": "performer", "features": 20},
    "performer-relu": {"kind": "performer", "features": 20, "kernel": "relu", "position": "none"},
    "performer-elu": {"kind": "performer", "kernel": "elu"},
    "sparse-strided": {"kind": "sparse", "stride": 5},
    "sparse-fixed": {"kind": "sparse", "stride": 6, "pattern": "fixed", "summary": 2},
    "bigbird": {"kind": "bigbird", "block": 4, "random": 2, "global_blocks": 1},
    "bigbird-plain": {"kind": "bigbird", "block": 3, "window": 2, "random": 0, "global_blocks": 0},
    "poolingformer": {
        "kind": "poolingformer",
        "left": 4,
        "pooled_left": 10,
        "kernel": 3,
        "stride": 2,
    },
    "poolingformer-max": {
        "kind": "poolingformer",
        "left": 4,
        "pooled_left": 9,
        "pool": "max",
        "mix": True,
    },
    "poolingformer-mean": {
        "kind": "poolingformer",
        "left": 4,
        "pooled_left": 10,
        "pool": "mean",
        "share_weights": True,
    },
    "blockwise": {"kind": "blockwise", "block": 5},
    "adaptive_span": {"kind": "adaptive_span", "longest": 16, "ramp": 4, "start": 0.5},
    "bp": {"kind": "bp", "near": 2},
    "shortformer": {"kind": "shortformer", "segment": 6},
    "reformer": {"kind": "reformer", "buckets": 4, "rounds": 2, "reach": 5},
    "reformer-once": {"kind": "reformer", "buckets": 6, "rounds": 1, "reach": 3},
    "routing": {"kind": "routing", "clusters": 5, "size": 4},
}


def encoder_layer(setting: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    return _layer(partial(build_attention, DIM, HEADS, setting), dtype)


def causal_layer(setting: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    return _layer(partial(build_causal_attention, DIM, HEADS, setting, bias=False), dtype)


def _layer(build: Callable[[], Any], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with CPU:
        made = build()
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        # One that takes in what it sees has seen enough to have clusters of its own.
        for _ in range(4 if isinstance(made, Observing) else 0):
            made.train()(torch.randn(1, 30, DIM))
            made.refresh()
    return made.to(DEVICE, dtype).eval()


def keep_choice(made: Any, call: Callable[[], Any]) -> None:
    """Rounding may put a token into another cluster, which is no matter of a few ulps: from now on
    the layer chooses as it does in this call of it."""
    choose, found = getattr(made, "clusters", None), []
    if choose is not None:
        made.clusters = lambda *points: found.append(choose(*points)) or found[-1]
        call()
        again = cycle(found)
        made.clusters = lambda *points: next(again)


def states(batch: int, tokens: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    drawn = torch.randn(batch, tokens, DIM, dtype=torch.float64, device=CPU)
    return drawn.to(DEVICE, dtype)


def heads_of(made: Any, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value [batch, heads, tokens, head_dim] of a layer without rotation."""
    return [t.transpose(1, 2) for t in made.qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)]


def turned_heads(project: Any, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value [batch, heads, tokens, head_dim], with rotary positions."""
    query, key, value = project(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)
    place = torch.arange(hidden.shape[1]).double()[None]
    query, key = rotate(query, key, position=place, base=10000.0)
    return [t.transpose(1, 2) for t in (query, key, value)]


def written_out(made: Any, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What a causal layer with rotary positions makes of a text, under a mask [heads, tokens,
    tokens]; rows that see nothing are zero."""
    query, key, value = turned_heads(made.qkv, hidden)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return joined(scores.softmax(-1).nan_to_num(0.0) @ value)


def joined(out: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, head_dim] -> [batch, tokens, dim]."""
    return out.transpose(1, 2).flatten(2)
