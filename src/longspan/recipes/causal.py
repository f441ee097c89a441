"""Every kind of attention that decoders have, as a language model of novels.

The skeleton, text, bytes a step and time of `rivals`, which has windows, memories and dense
attention; here are the others, from the registry, on rows of 8,192. Options are a kind's defaults
unless they are named below; nothing was tuned for any of them. Queries and keys have one length, as
those of windows and dense attention, where a kind does not say what they are: Performer's features
are for short ones, Reformer and Routing have norms of their own, Shortformer adds positions.
"""

from typing import Any

from longspan.layers.registry import CAUSAL_ATTENTION
from longspan.recipes.books import FEED_FORWARD
from longspan.recipes.rivals import rival
from longspan.train.recipe import Evaluation, Recipe

# The recipes of kinds that the study of rivals has.
_RIVALS = {
    "window": "rival-longformer",
    "full": "rival-dense",
    "xl": "rival-xl",
    "compressive": "rival-compressive",
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "bigbird": {"norm_keys": True},
    "poolingformer": {"norm_keys": True},
    "blockwise": {"norm_keys": True},
    "sparse": {"stride": 128, "norm_keys": True},
    "sparse-fixed": {
        "kind": "sparse",
        "pattern": "fixed",
        "stride": 128,
        "summary": 8,
        "norm_keys": True,
    },
    "adaptive_span": {"longest": 1024, "norm_keys": True},
    "bp": {"norm_keys": True},
    "shortformer": {"segment": 512},
}
# Where a kind has weights of its own, or fewer than others, feed-forward layers make up for it.
# Queries that are their own keys save a square of 512 in every layer; a second level costs three.
_FEED_FORWARD = {
    "reformer": FEED_FORWARD + 256,
    "routing": FEED_FORWARD + 256,
    "poolingformer": FEED_FORWARD - 768,
}
_FORMS = {"sparse": ("sparse", "sparse-fixed")}  # of a kind that has several

ARMS = tuple(
    arm for kind in CAUSAL_ATTENTION if kind not in _RIVALS for arm in _FORMS.get(kind, (kind,))
)
STUDY = (*_RIVALS.values(), *(f"causal-{arm}" for arm in ARMS))


def causal(arm: str) -> Recipe:
    """Novels, two minutes: a kind of attention on rows of 8,192."""
    return rival(
        f"causal-{arm}",
        {"kind": arm, **_OPTIONS.get(arm, {})},
        length=8192,
        feed_forward=_FEED_FORWARD.get(arm, FEED_FORWARD),
        evaluation=Evaluation("sliding", length=16_384, stride=8192, batch=4),
        compile="layers",
    )
