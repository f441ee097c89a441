"""The paper's Table 4, on text8: how windows should grow with depth, and whether to dilate.

Phase 1 alone, 150,000 steps. Increasing windows are also the arm without dilation. The `small`
arms ask the same of a small model on novels.
"""

from longspan.recipes.books import MUON, NOVELS, skeleton
from longspan.recipes.books import windows as rotary
from longspan.recipes.enwik8 import DILATION, WINDOWS, longformer
from longspan.train.recipe import Evaluation, Phase, Recipe

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


def _small_arm(name: str, windows: tuple[int, ...], dilation: tuple[int, ...] = NONE) -> Recipe:
    """9M, 12 layers of 256 and 8 heads, on novels for two minutes; rotary positions, for which
    there is a fused kernel."""
    return Recipe(
        name=f"small-{name}",
        model=skeleton(rotary(windows, dilation), hidden=256, feed_forward=1024),
        data=NOVELS,
        phases=(Phase(steps=2000, length=2048, batch=32, learning_rate=4e-3, warmup=100),),
        optimizer=MUON,
        evaluation=Evaluation(
            "sliding", length=8192, stride=4096, batch=8, every=250, limit=500_000
        ),
        compile="model",
        minutes=2.0,
        save_every=500,
        sample_every=0,
    )


def small_increasing() -> Recipe:
    """Table 4 at 9M on novels, two minutes: windows from 32 to 512, no dilation."""
    return _small_arm("increasing", WINDOWS)


def small_decreasing() -> Recipe:
    """Table 4 at 9M on novels, two minutes: windows from 512 down to 32."""
    return _small_arm("decreasing", WINDOWS[::-1])


def small_fixed() -> Recipe:
    """Table 4 at 9M on novels, two minutes: a window of 230 in every layer."""
    return _small_arm("fixed", (230,) * len(WINDOWS))


def small_dilation() -> Recipe:
    """Table 4 at 9M on novels, two minutes: dilation on two heads, increasing windows."""
    return _small_arm("dilation", WINDOWS, DILATION)
