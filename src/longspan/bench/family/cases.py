"""What is measured of the family: one layer at many lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longspan.bench.benchmark import Case, Job


@dataclass(frozen=True)
class FamilyCase(Case):
    """One document for a self-attention layer with its projections.

    `reach` is what each mechanism looks at for a token, in its own terms: keys of a window, rank,
    features, keys in blocks.
    """

    hidden: int = 768
    heads: int = 12
    reach: int = 512
    causal: bool = False

    def __str__(self) -> str:
        return f"{'decoder' if self.causal else 'encoder'}, {self.tokens:,} tokens"

    def small(self) -> "FamilyCase":
        return replace(self, tokens=64, hidden=32, heads=2, reach=16)


ENCODERS = (
    *("window", "linformer", "performer", "bigbird", "poolingformer"),
    *("blockwise", "bp", "funnel", "clusterformer", "reformer", "routing", "dense"),
)
DECODERS = (
    *("causal-window", "causal-performer", "causal-bigbird", "causal-poolingformer"),
    *("causal-blockwise", "sparse-strided", "sparse-fixed", "adaptive-span", "causal-bp"),
    *("shortformer", "causal-reformer", "causal-routing", "causal-dense"),
)
# Those that are of the order n * sqrt(n), as published, and those that are of n * n.
ROOT = ("sparse-strided", "sparse-fixed", "routing", "causal-routing")
QUADRATIC = ("funnel", "dense", "causal-dense")
# Public implementations, see `rivals`, measured where they are installed; and ours in the setting
# of one of them, to be compared with it alone.
_BESIDE = {
    "performer": ("performer-pytorch",),
    "linformer": ("linformer-package",),
    "bigbird": ("transformers-bigbird",),
    "reformer": ("reformer-pytorch", "transformers-reformer"),
    "routing": ("routing-matched", "routing-transformer"),
    "causal-performer": ("causal-performer-pytorch",),
    "causal-reformer": ("causal-reformer-pytorch", "causal-transformers-reformer"),
    "causal-routing": ("causal-routing-matched", "causal-routing-transformer"),
}
MATCHED = ("routing-matched", "causal-routing-matched")
BESIDE_ENCODERS, BESIDE_DECODERS = (
    tuple(name for kind in kinds for name in _BESIDE.get(kind, ()))
    for kinds in (ENCODERS, DECODERS)
)
# The longest document on a CPU for what is quadratic, which would take it hours, and for rivals,
# some of which keep all that they compute.
_CPU_MOST = 16_384


def suite(
    *, device: str, dtype: str, quick: bool = False, lengths: Sequence[int] | None = None
) -> list[Job]:
    """The jobs of one run, of them those at `lengths` where given, in that order."""
    base = FamilyCase(tokens=0, dtype=dtype)
    known = (4096, 16_384, 65_536, 262_144)
    if quick:
        base = replace(base, hidden=128, heads=2, reach=128)
        known = (512, 1024, 2048)
    elif device == "cpu":
        base = replace(base, hidden=128, heads=2)
    # Kind by kind, so that a machine that changes its speed does so between kinds, not between the
    # lengths of one or between ours and theirs.
    return [
        Job(replace(base, tokens=n, causal=causal), contenders)
        for causal, kinds in ((False, ENCODERS), (True, DECODERS))
        for kind in kinds
        for n in lengths or known
        if n in known and (contenders := _side_by_side(kind, n, device))
    ]


def _side_by_side(kind: str, tokens: int, device: str) -> tuple[str, ...]:
    if device == "cpu" and tokens > _CPU_MOST:
        return () if kind in QUADRATIC else (kind,)
    return (kind, *_BESIDE.get(kind, ()))
