"""What is measured of whole models: single cases, and the suites made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from longspan.bench.benchmark import Case, Job


@dataclass(frozen=True)
class ModelCase(Case):
    """One batch for an encoder, of base size unless said otherwise.

    Documents have `tokens` tokens each; or, with `shortest`, lengths between the two.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocab: int = 50_265
    window: int = 512
    globals: int = 1
    shortest: int | None = None
    checkpointing: bool = False

    def __str__(self) -> str:
        length = f"{self.tokens:,} x {self.batch}"
        if self.shortest is not None:
            length = f"{self.shortest:,} to {length}"
        extras = [f"{self.layers} layers"] if self.layers != 12 else []
        extras += ["checkpointing"] if self.checkpointing else []
        return ", ".join([length, *extras])

    @cached_property
    def lengths(self) -> list[int]:
        """Real tokens of each document."""
        if self.shortest is None:
            return [self.tokens] * self.batch
        drawn = torch.randint(
            self.shortest,
            self.tokens + 1,
            (self.batch,),
            generator=torch.Generator().manual_seed(0),
        )
        return drawn.tolist()

    @property
    def real_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def places(self) -> int:
        """Tokens of the padded batch."""
        return self.tokens * self.batch

    def tokens_per_second(self, ms: float) -> float:
        """Of a pass that takes `ms`. Padding does not count."""
        return 1e3 * self.real_tokens / ms

    def small(self) -> "ModelCase":
        return replace(
            self, tokens=64, batch=1, layers=1, window=32, vocab=100, shortest=self.shortest and 32
        )


RIVALS = ("longformer", "roberta", "modernbert")


def gpu_suite(dtype: str) -> list[Job]:
    """Every target on a GPU, what the targets need first."""
    base = ModelCase(tokens=4096, batch=8, dtype=dtype)
    middle = replace(base, tokens=16_384, batch=2)
    long = replace(base, tokens=65_536, batch=1)
    return [
        *(Job(case, ("longspan",)) for case in (base, middle, long)),
        Job(replace(base, tokens=512, batch=64), ("longspan", "longspan-captured", "roberta")),
        *(Job(case, ("longspan-lean",), ("forward+backward",)) for case in (long, middle, base)),
        Job(base, ("longspan-patch", *RIVALS)),
        Job(
            replace(long, tokens=1_048_576, checkpointing=True),
            ("longspan",),
            ("forward+backward",),
        ),
        Job(replace(base, batch=16, shortest=256), ("longspan", "longspan-unpadded")),
        *(Job(case, ("longspan-patch", *RIVALS)) for case in (middle, long)),
    ]


def cpu_suite(dtype: str) -> list[Job]:
    """Base size forward; a training step and an uneven batch on two of its layers."""
    base = ModelCase(tokens=4096, dtype=dtype)
    shallow = replace(base, layers=2)
    longformers = ("longspan", "longspan-patch", "longformer")
    rounded = ("longspan-bfloat16", "longspan-int8") if dtype == "float32" else ()
    return [
        # Those of the target take turns among themselves, so that there is time for more rounds.
        Job(base, longformers, ("forward",)),
        # By themselves: what else a process has allocated moves the times of transformers' model.
        Job(base, rounded, ("forward",)),
        Job(
            replace(shallow, tokens=2048, batch=4, shortest=128), ("longspan", "longspan-unpadded")
        ),
        Job(replace(shallow, tokens=2048, batch=2), ("longspan",)),
        Job(replace(base, tokens=512, batch=4), ("longspan", *RIVALS), ("forward",)),
        Job(replace(base, tokens=2048), ("longspan", *RIVALS), ("forward",)),
        Job(base, ("roberta", "modernbert"), ("forward",)),
        Job(shallow, longformers, ("forward+backward",)),
    ]


def quick_suite(dtype: str) -> list[Job]:
    """A try-out in a minute: a small model at a few lengths."""
    tiny = ModelCase(
        tokens=512, batch=4, layers=2, hidden=256, heads=4, vocab=1000, window=256, dtype=dtype
    )
    everyone = ("longspan", "longspan-patch", *RIVALS)
    return [
        *(Job(replace(tiny, tokens=n, batch=2048 // n), everyone) for n in (512, 1024, 2048)),
        Job(replace(tiny, tokens=1024, shortest=64), ("longspan", "longspan-unpadded")),
    ]


def suite(
    *, device: str, dtype: str, quick: bool = False, lengths: Sequence[int] | None = None
) -> list[Job]:
    """The jobs of one run, of them those at `lengths` where given."""
    make = quick_suite if quick else gpu_suite if device == "cuda" else cpu_suite
    return [job for job in make(dtype) if lengths is None or job.case.tokens in lengths]
