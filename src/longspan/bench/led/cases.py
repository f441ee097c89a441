"""What is measured of encoder-decoders: single cases, and the suites made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from longspan.bench.benchmark import Case, Job, Pass


@dataclass(frozen=True)
class LEDCase(Case):
    """Documents of `tokens` tokens and texts of `target` about them, for a model of LED's base size
    unless said otherwise.

    With `beams` the texts are generated, token by token; else they are given.
    """

    target: int = 256
    layers: int = 6
    hidden: int = 768
    heads: int = 12
    vocab: int = 50_265
    window: int = 1024
    globals: int = 1
    beams: int = 0

    def __str__(self) -> str:
        beams = f", {self.beams} beams" if self.beams else ""
        size = f" x {self.batch}" if self.batch > 1 else ""
        extras = f", window {self.window}" if self.window != 1024 else ""
        extras += f", {self.globals} global" if self.globals != 1 else ""
        return f"{self.tokens:,} to {self.target:,}{size}{beams}{extras}"

    def small(self) -> "LEDCase":
        return replace(self, tokens=64, target=8, layers=1, window=32, vocab=100, globals=1)


STEP: tuple[Pass, ...] = ("forward+backward",)
FORWARD: tuple[Pass, ...] = ("forward",)
EVERYONE = ("longspan", "longspan-patch", "led")
_RIVALS = ("longspan", "led")


def around(base: LEDCase, *, lengths: Sequence[int], targets: Sequence[int]) -> list[LEDCase]:
    """Cases that differ from one in a single respect each: what memory follows is read off them."""
    cases = [
        *(replace(base, tokens=n) for n in lengths),
        *(replace(base, target=n) for n in targets),
        replace(base, window=base.window // 4),
        replace(base, globals=base.window // 8),
        # Two at once: without it the product of lengths could be told from neither.
        replace(base, tokens=min(lengths), target=max(targets)),
    ]
    return list(dict.fromkeys(case for case in cases if case != base))


def gpu_suite(dtype: str) -> list[Job]:
    """Every target on a GPU, what the targets need first: a run that is broken off has judged
    those it came to."""
    base = LEDCase(tokens=16_384, dtype=dtype)
    beams = replace(base, beams=4)
    others = around(base, lengths=(4096, 8192, 32_768), targets=(64, 512, 1024))
    return [
        Job(base, ("longspan", "longspan-captured", "led"), STEP),
        Job(beams, _RIVALS, FORWARD),
        *(Job(case, (name,), STEP) for name in _RIVALS for case in others),
        Job(replace(base, tokens=4096, beams=4), _RIVALS, FORWARD),
        Job(base, ("longspan-patch",), STEP),
        Job(beams, ("longspan-patch",), FORWARD),
    ]


def cpu_suite(dtype: str) -> list[Job]:
    """Base size forward; the rest of a small model."""
    base = LEDCase(tokens=4096, dtype=dtype)
    return [
        Job(base, EVERYONE, FORWARD),
        Job(replace(base, tokens=2048, target=32, beams=4), EVERYONE, FORWARD),
        *_small(dtype, 4096, (1024, 2048, 8192), (64, 512, 1024)),
    ]


def quick_suite(dtype: str) -> list[Job]:
    """A try-out in a minute or two."""
    beams = replace(_tiny(dtype, 1024), target=16, beams=4)
    return [*_small(dtype, 1024, (512, 2048), (64, 256)), Job(beams, EVERYONE, FORWARD)]


def _tiny(dtype: str, tokens: int) -> LEDCase:
    return LEDCase(
        tokens=tokens,
        target=128,
        layers=2,
        hidden=256,
        heads=4,
        vocab=1000,
        window=256,
        dtype=dtype,
    )


def _small(dtype: str, tokens: int, lengths: Sequence[int], targets: Sequence[int]) -> chain[Job]:
    base = _tiny(dtype, tokens)
    others = around(base, lengths=lengths, targets=targets)
    return chain([Job(base, EVERYONE, STEP)], (Job(case, _RIVALS, STEP) for case in others))


def suite(
    *, device: str, dtype: str, quick: bool = False, lengths: Sequence[int] | None = None
) -> list[Job]:
    """The jobs of one run, of them those at `lengths` where given."""
    make = quick_suite if quick else gpu_suite if device == "cuda" else cpu_suite
    return [job for job in make(dtype) if lengths is None or job.case.tokens in lengths]
