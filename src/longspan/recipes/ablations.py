"""The paper's Table 4, on text8: how windows should grow with depth, and whether to dilate.

Phase 1 alone, 150,000 steps. Increasing windows are also the arm without dilation.
"""

from longspan.recipes.enwik8 import DILATION, WINDOWS, longformer
from longspan.train.recipe import Recipe

NONE = (1,) * len(WINDOWS)


def _arm(name: str, windows: tuple[int, ...], dilation: tuple[int, ...] = NONE) -> Recipe:
    return longformer(
        f"ablation-{name}", windows=windows, dilation=dilation, dropout=0.2, steps=(150_000,)
    )


def increasing() -> Recipe:
    """Table 4: windows from 32 in the lowest layer to 512, no dilation; 1.21 in the paper."""
    return _arm("increasing", WINDOWS)


def decreasing() -> Recipe:
    """Table 4: windows from 512 down to 32; 1.24 in the paper."""
    return _arm("decreasing", WINDOWS[::-1])


def fixed() -> Recipe:
    """Table 4: a window of 230 in every layer; 1.23 in the paper."""
    return _arm("fixed", (230,) * len(WINDOWS))


def dilation() -> Recipe:
    """Table 4: dilation on two heads, increasing windows; 1.20 in the paper."""
    return _arm("dilation", WINDOWS, DILATION)
