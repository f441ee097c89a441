"""The targets longspan set itself, judged from a results file alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from longspan.bench.cases import PASSES, Case, Pass
from longspan.bench.store import Results


@dataclass(frozen=True)
class Claim:
    """A ratio, what it should be, and what was measured (None: not measured yet)."""

    text: str
    target: float
    measured: float | None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def claims(results: Results) -> list[Claim]:
    """Every target for the device of `results`, in the order in which they were set."""
    made = _cuda if results.header["settings"]["device"] == "cuda" else _cpu
    return list(made(results))


def _cuda(results: Results) -> Iterator[Claim]:
    base = Case(tokens=16_384)
    targets: dict[tuple[int, Pass], float] = {
        (0, "forward"): 1.4,
        (0, "forward+backward"): 1.3,
        (16, "forward"): 3.0,
        (16, "forward+backward"): 3.0,
    }
    for ((count, kind), target), n in product(targets.items(), (16_384, 65_536)):
        case = replace(base, tokens=n, globals=count)
        pattern = f"window + {count} global" if count else "window"
        yield Claim(
            f"{pattern}, n={n:,}, {kind}: speed-up over FlexAttention",
            target,
            _speedup(results, case, "longspan", "flex", kind),
        )
    sweeps = {
        "head sizes 32 to 128": [replace(base, head_dim=d) for d in (32, 64, 96, 128)],
        "windows 64 to 4,096": [
            replace(base, window=w) for w in (64, 128, 256, 512, 1024, 2048, 4096)
        ],
    }
    for (name, cases), kind in product(sweeps.items(), PASSES):
        ratios = [_speedup(results, case, "longspan", "flex", kind) for case in cases]
        text = f"{name}, {kind}: smallest speed-up over FlexAttention"
        yield Claim(text, 1.0, _worst(min, ratios))
    short, long = replace(base, tokens=65_536), replace(base, tokens=1_048_576)
    for quantity, kind in product(("ms", "mib"), PASSES):
        what = "time" if quantity == "ms" else "memory"
        ratio = _ratio(
            _value(results, long, "longspan", kind, quantity),
            _value(results, short, "longspan", kind, quantity),
        )
        per_token = None if ratio is None else ratio * short.tokens / long.tokens
        text = f"{what} per token at n=1,048,576 over that at 65,536, {kind}"
        yield Claim(text, 1.15, per_token, at_least=False)
    for kind in PASSES:
        plain = _value(results, base, "longspan", kind)
        costs = [
            _ratio(_value(results, replace(base, dilation=d), "longspan", kind), plain)
            for d in (2, 4)
        ]
        text = f"dilation 2 and 4, {kind}: largest time over no dilation"
        yield Claim(text, 1.3, _worst(max, costs), at_least=False)
    for count, (kind, target) in product((0, 16), zip(PASSES, (25.0, 12.0), strict=True)):
        case = replace(base, level="layer", globals=count)
        yield Claim(
            f"layer, n=16,384, {count} global, {kind}: speed-up over transformers Longformer",
            target,
            _speedup(results, case, "longspan-layer", "longformer-layer", kind),
        )


def _cpu(results: Results) -> Iterator[Claim]:
    if results.header["settings"]["threads"] != 1:
        return  # the targets are for one thread
    case = Case(tokens=4096, level="layer", dtype="float32")
    for kind, target in zip(PASSES, (2.8, 3.0), strict=True):
        yield Claim(
            f"layer, n=4,096, {kind}: speed-up over transformers Longformer",
            target,
            _speedup(results, case, "longspan-layer", "longformer-layer", kind),
        )
    for kind in PASSES:
        memory = _ratio(
            _value(results, case, "longspan-layer", kind, "mib"),
            _value(results, case, "longformer-layer", kind, "mib"),
        )
        text = f"layer, n=4,096, {kind}: peak memory over transformers Longformer's"
        yield Claim(text, 0.4, memory, at_least=False)


def _value(
    results: Results, case: Case, contender: str, kind: Pass, quantity: str = "ms"
) -> float | None:
    point = results.get(case, contender, kind)
    return None if point is None else getattr(point, quantity)


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _speedup(results: Results, case: Case, ours: str, other: str, kind: Pass) -> float | None:
    return _ratio(_value(results, case, other, kind), _value(results, case, ours, kind))


def _worst(
    pick: Callable[[Iterable[float]], float], ratios: Iterable[float | None]
) -> float | None:
    """The worst of all ratios; None unless every one was measured."""
    known = list(ratios)
    measured = [ratio for ratio in known if ratio is not None]
    return pick(measured) if len(measured) == len(known) else None
