"""What is measured of language models: single cases, and the suites made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longspan.bench.benchmark import Case, Job

# Of a model of 12 layers; the windows of others are spread in the same way.
_WINDOWS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 1024, 1024, 1024)


@dataclass(frozen=True)
class LMCase(Case):
    """A batch for a byte model of 40M, the size of Longformer's small one, unless said otherwise.

    Layers see 1/16 of `window` to the left at the bottom and all of it at the top. The last
    `dilated` heads of the layers with the longest windows are dilated by two.
    """

    layers: int = 12
    hidden: int = 512
    heads: int = 8
    feed_forward: int = 2240
    window: int = 1024
    dilated: int = 0

    def __str__(self) -> str:
        dilated = f", {self.dilated} heads dilated" if self.dilated else ""
        return f"{self.tokens:,} x {self.batch}{dilated}"

    @property
    def windows(self) -> list[int]:
        """Tokens to the left, layer by layer."""
        spread = [_WINDOWS[layer * len(_WINDOWS) // self.layers] for layer in range(self.layers)]
        return [max(1, left * self.window // max(_WINDOWS)) for left in spread]

    def characters_per_second(self, ms: float) -> float:
        """Of a step that takes `ms`."""
        return 1e3 * self.tokens * self.batch / ms

    def small(self) -> "LMCase":
        return replace(self, tokens=64, batch=1, layers=1, window=32)


STEP = ("forward+backward",)
EVERYONE = ("longspan", "flex", "dense")


def gpu_suite(dtype: str) -> list[Job]:
    """131,072 characters a step, as rows of 8,192 and of 32,768."""
    base = LMCase(tokens=8192, batch=16, dtype=dtype)
    long = replace(base, tokens=32_768, batch=4)
    return [
        *(Job(case, ("longspan",), STEP) for case in (base, long)),
        *(Job(case, EVERYONE[1:], STEP) for case in (base, long)),
        Job(replace(base, dilated=2), ("longspan",), STEP),
    ]


def small_suite(dtype: str, lengths: Sequence[int]) -> list[Job]:
    """A small model at a few lengths, for where there is no GPU or no time."""
    tiny = LMCase(
        tokens=0, layers=3, hidden=128, heads=4, feed_forward=512, window=256, dtype=dtype
    )
    longest = max(lengths)
    return [Job(replace(tiny, tokens=n, batch=longest // n), EVERYONE, STEP) for n in lengths]


def suite(
    *, device: str, dtype: str, quick: bool = False, lengths: Sequence[int] | None = None
) -> list[Job]:
    """The jobs of one run, of them those at `lengths` where given."""
    if quick:
        jobs = small_suite(dtype, (512, 1024, 2048))
    elif device == "cuda":
        jobs = gpu_suite(dtype)
    else:
        jobs = small_suite(dtype, (1024, 2048, 4096, 8192))
    return [job for job in jobs if lengths is None or job.case.tokens in lengths]
