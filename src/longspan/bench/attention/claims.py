"""The targets longspan set itself, judged from a results file alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

from longspan.bench.attention.cases import TARGETED, AttentionCase
from longspan.bench.benchmark import PASSES, Claim, Pass, ratio
from longspan.bench.store import Results


def claims(results: Results) -> list[Claim]:
    """Every target for the device of `results`, in the order in which they were set."""
    made = _cuda if results.header["settings"]["device"] == "cuda" else _cpu
    return list(made(results))


def _cuda(results: Results) -> Iterator[Claim]:
    base = AttentionCase(tokens=16_384)
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
            results.speedup(case, "longspan", "flex", kind),
        )
    sweeps = {
        "head sizes 32 to 128": [replace(base, head_dim=d) for d in (32, 64, 96, 128)],
        "windows 64 to 4,096": [
            replace(base, window=w) for w in (64, 128, 256, 512, 1024, 2048, 4096)
        ],
    }
    for (name, cases), kind in product(sweeps.items(), PASSES):
        ratios = [results.speedup(case, "longspan", "flex", kind) for case in cases]
        text = f"{name}, {kind}: smallest speed-up over FlexAttention"
        yield Claim(text, 1.0, _worst(min, ratios))
    short, long = replace(base, tokens=65_536), replace(base, tokens=1_048_576)
    for quantity, kind in product(("ms", "mib"), PASSES):
        what = "time" if quantity == "ms" else "memory"
        growth = ratio(
            results.value(long, "longspan", kind, quantity),
            results.value(short, "longspan", kind, quantity),
        )
        per_token = None if growth is None else growth * short.tokens / long.tokens
        text = f"{what} per token at n=1,048,576 over that at 65,536, {kind}"
        yield Claim(text, 1.15, per_token, at_least=False)
    for kind in PASSES:
        plain = results.value(base, "longspan", kind)
        costs = [
            ratio(results.value(replace(base, dilation=d), "longspan", kind), plain) for d in (2, 4)
        ]
        text = f"dilation 2 and 4, {kind}: largest time over no dilation"
        yield Claim(text, 1.3, _worst(max, costs), at_least=False)
    for count, (kind, target) in product((0, 16), zip(PASSES, (25.0, 12.0), strict=True)):
        case = replace(base, level="layer", globals=count)
        yield Claim(
            f"layer, n=16,384, {count} global, {kind}: speed-up over transformers Longformer",
            target,
            results.speedup(case, "longspan-layer", "longformer-layer", kind),
        )


# Of a layer over transformers', forward and forward+backward, by dtype.
_BLOCKED = {"float32": (2.8, 3.0)}
_NATIVE = {"float32": (3.6, 4.4), "bfloat16": (4.8, 4.6)}


def _cpu(results: Results) -> Iterator[Claim]:
    if results.header["settings"]["threads"] != 1:
        return  # the targets are for one thread
    short = AttentionCase(tokens=4096, level="layer", dtype="float32")
    yield from _over_longformer(results, short, "longspan-blocked-layer", _BLOCKED, 0.4)
    for dtype, n in product(_NATIVE, TARGETED):
        case = replace(short, dtype=dtype, tokens=n)
        yield from _over_longformer(results, case, "longspan-layer", _NATIVE, 0.15)
        what = f"`native`, layer, n={n:,}, {dtype}"
        for kind in PASSES:
            ours = results.value(case, "longspan-layer", kind)
            more = results.value(replace(case, globals=16), "longspan-layer", kind)
            text = f"{what}, {kind}: 16 global tokens over none"
            yield Claim(text, 1.2, ratio(more, ours), at_least=False)
        for kind in PASSES:
            ours = results.value(case, "longspan-layer", kind)
            both = results.value(replace(case, threads=2), "longspan-layer", kind)
            yield Claim(f"{what}, {kind}: two threads over one", 1.8, ratio(ours, both))


def _over_longformer(
    results: Results,
    case: AttentionCase,
    ours: str,
    targets: dict[str, tuple[float, float]],
    most: float,
) -> Iterator[Claim]:
    """Time and memory of one of our layers against transformers' own."""
    name = "`blocked`" if "blocked" in ours else "`native`"
    what = f"{name}, layer, n={case.tokens:,}, {case.dtype}"
    for kind, target in zip(PASSES, targets[case.dtype], strict=True):
        yield Claim(
            f"{what}, {kind}: speed-up over transformers Longformer",
            target,
            results.speedup(case, ours, "longformer-layer", kind),
        )
    for kind in PASSES:
        memory = ratio(
            results.value(case, ours, kind, "mib"),
            results.value(case, "longformer-layer", kind, "mib"),
        )
        text = f"{what}, {kind}: peak memory over transformers Longformer's"
        yield Claim(text, most, memory, at_least=False)


def _worst(
    pick: Callable[[Iterable[float]], float], ratios: Iterable[float | None]
) -> float | None:
    """The worst of all ratios; None unless every one was measured."""
    known = list(ratios)
    measured = [ratio for ratio in known if ratio is not None]
    return pick(measured) if len(measured) == len(known) else None
