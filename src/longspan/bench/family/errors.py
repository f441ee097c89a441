"""How far mechanisms are from exact softmax attention with the same queries, keys and values.

The error of a layer's output, relative to that of dense attention, by what the mechanism may look
at for a token: keys of a window, in blocks, chunks or clusters, pooled, or features. Weights are
random. Documents are of three kinds: of tokens that have nothing to do with each other, of tokens
that resemble their neighbours, as words do, and of the first kind again with queries and keys half
as long, which is what features can estimate. Computed in float64 on the CPU, whatever is timed.

Where queries are their own keys (Reformer, Routing), so they are in the dense attention, of unit
length where the layer's are, and tokens do not see themselves. Centroids come from the document.
Poolingformer adds a second attention to the first, and Funnel returns fewer tokens: they estimate
no softmax attention over the document.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.bench.family.rivals import ROUNDS
from longspan.layers.clusters import unit
from longspan.layers.observing import refresh
from longspan.layers.registry import build_attention

HIDDEN, HEADS = 64, 2
_SEEDS = 3


class Documents(NamedTuple):
    kept: float = 0.0  # how much a token has of the one before it
    spread: float = 1.0  # standard deviation of the entries of queries and keys


DOCUMENTS = {
    "unrelated": Documents(),
    "alike": Documents(kept=0.97),
    "weakly scored": Documents(spread=0.5),
}


class Error(NamedTuple):
    mechanism: str
    documents: str
    tokens: int
    budget: int
    error: float  # of the Frobenius norm of the exact output


def _spans(budget: int, n: int) -> dict[str, Any]:
    """As many spans of each length as the budget has room for, with both sides of a token."""
    fits = (near for near in range(n, 1, -1) if 2 * near * (math.log2(n / near) + 1) <= budget)
    return {"kind": "bp", "near": next(fits, 1)}


# By contender: what to ask of the layer, for a budget and a length.
APPROXIMATE: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "window": lambda budget, n: {"window": budget, "global_tokens": False},
    # Means of neighbours: mixtures that nobody has trained stand for no tokens.
    "linformer": lambda budget, n: {
        "kind": "linformer",
        "length": n,
        "rank": budget,
        "reduction": "pool",
    },
    "performer": lambda budget, n: {"kind": "performer", "features": budget},
    # Three blocks near, three at random, two global.
    "bigbird": lambda budget, n: {"kind": "bigbird", "block": max(1, budget // 8)},
    "blockwise": lambda budget, n: {"kind": "blockwise", "block": budget},
    "bp": _spans,
    "clusterformer": lambda budget, n: {
        "kind": "clusterformer",
        "chunk": budget,
        "clusters": max(1, n // budget),
        "bank": n,
        "every": 1,
    },
    # In every round its chunk and the one before it.
    "reformer": lambda budget, n: {
        "kind": "reformer",
        "rounds": ROUNDS,
        "chunk": max(1, budget // (2 * ROUNDS)),
        "buckets": max(2, n // budget * 2 * ROUNDS),
    },
    "routing": lambda budget, n: {
        "kind": "routing",
        "clusters": max(1, n // budget),
        "size": budget,
    },
}


def measure_errors(*, quick: bool = False) -> dict[str, Any]:
    """What goes into the results file."""
    tokens = 256 if quick else 1024
    budgets = [tokens // part for part in (32, 16, 8, 4, 2)]
    return {"errors": [one._asdict() for one in _errors(tokens, budgets)]}


def _errors(tokens: int, budgets: list[int]) -> Iterator[Error]:
    for name, documents in DOCUMENTS.items():
        for mechanism, setting in APPROXIMATE.items():
            for budget in budgets:
                found = [
                    relative_error(setting(budget, tokens), tokens, documents, seed)
                    for seed in range(_SEEDS)
                ]
                yield Error(mechanism, name, tokens, budget, sum(found) / _SEEDS)


@torch.no_grad()
def relative_error(setting: dict[str, Any], tokens: int, documents: Documents, seed: int) -> float:
    """Of one layer with random weights on one random document."""
    torch.manual_seed(seed)
    hidden = _document(tokens, documents.kept)
    layer: Any = build_attention(HIDDEN, HEADS, setting, bias=False).double()
    # Entries of variance 1, so that scores have it too; but for values, times what is wanted.
    layer.qkv.weight.normal_(std=HIDDEN**-0.5)[:-HIDDEN] *= documents.spread
    layer.train()(hidden)
    refresh(layer)
    exact = _exact(layer.qkv(hidden), setting.get("kind"))
    return float((layer.eval()(hidden) - exact).norm() / exact.norm())


def _exact(projected: Tensor, kind: str | None) -> Tensor:
    """Dense softmax attention with the queries, keys and values that a layer of this kind has."""
    *asked, value = projected.unflatten(-1, (-1, HEADS, HIDDEN // HEADS)).unbind(2)
    query, key = asked if len(asked) == 2 else (asked[0], unit(asked[0]))
    scale, seen = query.shape[-1] ** -0.5, None
    if kind == "reformer":
        scale = 1.0
    elif kind == "routing":
        query, scale = key, 1.0 / scale
    if len(asked) == 1:
        seen = ~torch.eye(value.shape[1], dtype=torch.bool)
    heads = (one.transpose(1, 2) for one in (query, key, value))
    exact = scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale)
    return exact.transpose(1, 2).flatten(2)


def _document(tokens: int, kept: float) -> Tensor:
    """[1, tokens, HIDDEN], entries of variance 1."""
    fresh = torch.randn(tokens, HIDDEN, dtype=torch.float64)
    made = [fresh[0]]
    for new in fresh[1:]:
        made.append(kept * made[-1] + (1 - kept**2) ** 0.5 * new)
    return torch.stack(made)[None]
