"""The targets for encoder-decoders, judged from a results file alone."""

from collections.abc import Iterator
from dataclasses import replace

from longspan.bench.benchmark import Claim, ratio
from longspan.bench.led.cases import FORWARD, STEP, LEDCase
from longspan.bench.led.memory import fit, measured, model_of
from longspan.bench.store import Results


def claims(results: Results) -> list[Claim]:
    """Every target for the device of `results`, in the order in which they were set."""
    made = _cuda if results.header["settings"]["device"] == "cuda" else _cpu
    return [*made(results), *_memory(results)]


def _cuda(results: Results) -> Iterator[Claim]:
    base = LEDCase(tokens=16_384)
    # Both as called from Python, which is what a training loop does.
    both = ("longspan-captured", "led")
    ours, theirs = (results.value(base, name, STEP[0], "eager_ms") for name in both)
    yield Claim(
        "16,384 to 256, training step, captured: speed-up over transformers LED",
        6.0,
        ratio(theirs, ours),
    )
    ours, theirs = (results.value(base, name, STEP[0], "mib") for name in both)
    text = "16,384 to 256, training step, captured: memory over transformers LED's"
    yield Claim(text, 0.25, ratio(ours, theirs), at_least=False)
    yield Claim(
        "16,384 to 256, generation with 4 beams: speed-up over transformers LED",
        2.0,
        results.speedup(replace(base, beams=4), "longspan", "led", FORWARD[0]),
    )


def _cpu(results: Results) -> Iterator[Claim]:
    yield Claim(
        "4,096 to 256, forward: speed-up over transformers LED",
        2.0,
        results.speedup(LEDCase(tokens=4096, dtype="float32"), "longspan", "led", FORWARD[0]),
    )


def _memory(results: Results) -> Iterator[Claim]:
    models = dict.fromkeys(model_of(case) for case, _, kind in results.points if kind == STEP[0])
    for model in models:
        found = fit(measured(results, "longspan", model))
        if found is not None:
            text = f"{model.layers} layers x {model.hidden}: memory of a step, error of the fit"
            yield Claim(text, 10.0, 100 * found.error, at_least=False, unit="%")
