"""What is measured of finetuning: single cases, and the suites made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longspan.bench.benchmark import Case, Job
from longspan.bench.models.cases import ModelCase

CHARACTERS = 1_000_000  # that are tokenised


@dataclass(frozen=True)
class FinetuningCase(Case):
    """A run of `steps` steps on `batch` documents of nearly `tokens` tokens each, for an encoder
    of base size unless said otherwise."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocab: int = 50_265
    window: int = 512
    steps: int = 40

    def __str__(self) -> str:
        layers = f", {self.layers} layers" if self.layers != 12 else ""
        return f"{self.tokens:,} x {self.batch}{layers}"

    @property
    def bare(self) -> ModelCase:
        """The same model and batch as `bench models` has them: random ids, all of one length."""
        return ModelCase(
            self.tokens,
            self.batch,
            self.dtype,
            self.threads,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocab=self.vocab,
            window=self.window,
        )

    @property
    def every(self) -> int:
        """Steps that are timed together."""
        return max(1, self.steps // 8)

    def tokens_per_second(self, ms: float) -> float:
        return 1e3 * self.tokens * self.batch / ms

    def ms(self, tokens_per_second: float) -> float:
        """That as many tokens take as a batch without gaps has, to be compared with its step."""
        return 1e3 * self.tokens * self.batch / tokens_per_second

    def small(self) -> "FinetuningCase":
        return replace(self, tokens=64, batch=2, layers=1, window=32, vocab=300, steps=8)


STEP = ("forward+backward",)
RUNS = ("finetuning", "finetuning-plain")


def _jobs(case: FinetuningCase) -> list[Job]:
    return [Job(case, ("step", *RUNS), STEP), Job(case, ("tokens",), ("forward",))]


def suite(
    *, device: str, dtype: str, quick: bool = False, lengths: Sequence[int] | None = None
) -> list[Job]:
    """The jobs of one run; `lengths` are not for choice."""
    base = FinetuningCase(tokens=4096, batch=8, dtype=dtype)
    if quick:
        return _jobs(
            replace(base, tokens=512, batch=4, layers=2, hidden=256, heads=4, vocab=2000, steps=16)
        )
    # A step of base size takes a CPU a minute.
    return _jobs(base if device == "cuda" else replace(base, batch=1, layers=2, steps=8))
