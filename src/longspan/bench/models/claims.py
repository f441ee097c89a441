"""The targets for whole models, judged from a results file alone."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from longspan.bench.benchmark import PASSES, Claim, Pass, ratio
from longspan.bench.models.cases import ModelCase
from longspan.bench.store import Results

# Millions of tokens per second, wanted at each of these sizes: (tokens, batch).
_SIZES = ((4096, 8), (16_384, 2), (65_536, 1))
_SPEEDS: dict[str, dict[Pass, float]] = {
    "longspan": {"forward": 1.8, "forward+backward": 0.55},
    # Recomputing concerns the backward pass alone.
    "longspan-lean": {"forward+backward": 0.55},
}
# What measuring and launching may add to a cost that is in proportion.
_PROPORTION = 1.15


def claims(results: Results) -> list[Claim]:
    """Every target for the device of `results`, in the order in which they were set."""
    made = _cuda if results.header["settings"]["device"] == "cuda" else _cpu
    return [*made(results), *_uneven(results)]


def _cuda(results: Results) -> Iterator[Claim]:
    base = ModelCase(tokens=4096, batch=8)
    long = replace(base, tokens=65_536, batch=1)
    # Speed and memory are judged of one contender at a time: no picking the best of each.
    for name, targets in _SPEEDS.items():
        label = "" if name == "longspan" else "lean, "
        for (n, batch), (kind, target) in product(_SIZES, targets.items()):
            case = replace(base, tokens=n, batch=batch)
            ms = results.value(case, name, kind)
            millions = None if ms is None else case.tokens_per_second(ms) / 1e6
            yield Claim(f"{label}{n:,} x {batch}, {kind}: tokens/s", target, millions, unit="M")
        yield _memory_claim(results, long, name, 14.0, f"{label}65,536 x 1, forward+backward")
    longest = replace(base, tokens=1_048_576, batch=1, checkpointing=True)
    text = "1,048,576 x 1, forward+backward with checkpointing"
    yield _memory_claim(results, longest, "longspan", 100.0, text)
    short = replace(base, tokens=512, batch=64)
    for kind in PASSES:
        # Both as called from Python. Ours is captured, as transformers' model cannot be; its layers
        # are few launches, which keep ahead of the GPU.
        both = ("longspan-captured", "roberta")
        ours, theirs = (results.value(short, name, kind, "eager_ms") for name in both)
        text = f"512 x 64, {kind}, captured: time over dense RoBERTa's"
        yield Claim(text, 1.05, ratio(ours, theirs), at_least=False)
    for kind in PASSES:
        yield Claim(
            f"4,096 x 8, {kind}: patched transformers Longformer's speed-up",
            5.0,
            results.speedup(base, "longspan-patch", "longformer", kind),
        )


def _memory_claim(results: Results, case: ModelCase, name: str, most: float, what: str) -> Claim:
    mib = results.value(case, name, "forward+backward", "mib")
    gigabytes = None if mib is None else mib * 2**20 / 1e9
    return Claim(f"{what}: peak memory", most, gigabytes, at_least=False, unit=" GB")


def _cpu(results: Results) -> Iterator[Claim]:
    case = ModelCase(tokens=4096, dtype="float32")
    yield Claim(
        "4,096 x 1, forward: speed-up over transformers Longformer",
        3.0,
        results.speedup(case, "longspan", "longformer", "forward"),
    )
    for name in ("bfloat16", "int8"):
        yield Claim(
            f"4,096 x 1, forward: speed-up of {name} over float32",
            1.0,
            results.speedup(case, f"longspan-{name}", "longspan", "forward"),
        )


def in_proportion(results: Results, case: ModelCase, kind: Pass) -> float | None:
    """What the tokens of an uneven batch would take, at what one of them takes in a batch of
    documents that are all as long as its longest."""
    for even, name, passed in results.points:
        assert isinstance(even, ModelCase)
        alike = replace(even, batch=case.batch, shortest=case.shortest) == case
        if alike and even.shortest is None and (name, passed) == ("longspan", kind):
            ms = results.value(even, name, kind)
            return None if ms is None else ms * case.real_tokens / even.real_tokens
    return None


def _uneven(results: Results) -> Iterator[Claim]:
    """A batch of uneven lengths costs in proportion to its tokens."""
    cases = dict.fromkeys(case for case, name, _ in results.points if name == "longspan-unpadded")
    for case in cases:
        assert isinstance(case, ModelCase)
        for kind in PASSES:
            ms = results.value(case, "longspan-unpadded", kind)
            text = f"{case}, {kind}: time per token, unpadded, over an even batch's"
            cost = ratio(ms, in_proportion(results, case, kind))
            yield Claim(text, _PROPORTION, cost, at_least=False)
