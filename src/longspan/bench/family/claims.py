"""The targets of the family, judged from a results file alone: none of it is quadratic, in time or
in memory, and none much slower than the best public implementation."""

from collections.abc import Iterator

from longspan.bench.benchmark import PASSES, Claim, Pass, ratio
from longspan.bench.family.cases import (
    BESIDE_DECODERS,
    DECODERS,
    ENCODERS,
    QUADRATIC,
    ROOT,
    FamilyCase,
)
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.family.rivals import RIVALS
from longspan.bench.store import Results

# How many times as long a step may take, and as much memory, when a document gets four times as
# long: linear is 4, n * sqrt(n) 8, quadratic 16.
_LINEAR, _ROOT = 5.0, 10.0
_RIVAL = 1.2  # of a rival's time


def claims(results: Results) -> list[Claim]:
    return [*_growth(results), *_against_rivals(results)]


def _against_rivals(results: Results) -> Iterator[Claim]:
    for name, rival in RIVALS.items():
        for kind in PASSES:
            found = worst_share(results, name, kind)
            if found is not None:
                worst, tokens = found
                ours = "causal " if name in BESIDE_DECODERS else ""
                ours += CONTENDERS[rival.ours].label
                text = f"our {ours}: time over that of {rival.label}, {kind}, {tokens:,} tokens"
                yield Claim(text, _RIVAL, worst, at_least=False)


def worst_share(results: Results, rival: str, kind: Pass) -> tuple[float, int] | None:
    """Our time over a rival's, at the length at which it compares best."""
    found = [
        (share, case.tokens)
        for case in {case for case, _, _ in results.points}
        if (share := _share(results, case, RIVALS[rival].ours, rival, kind)) is not None
    ]
    return max(found, default=None)


def _share(results: Results, case: FamilyCase, ours: str, theirs: str, kind: Pass) -> float | None:
    """Our time over theirs, both called from Python: no rival is captured as a CUDA graph."""
    mine, other = (
        results.value(case, name, kind, "eager_ms") or results.value(case, name, kind)
        for name in (ours, theirs)
    )
    return ratio(mine, other)


def _growth(results: Results) -> list[Claim]:
    """For every mechanism, from the longest document but one to the longest."""
    made = []
    for causal, names in ((False, ENCODERS), (True, DECODERS)):
        cases = sorted(
            {case for case, _, _ in results.points if case.causal == causal},
            key=lambda case: case.tokens,
        )
        for name in names:
            pairs = [(a, b) for a in cases for b in cases if b.tokens == 4 * a.tokens]
            if name in QUADRATIC or not pairs:
                continue
            short, long = pairs[-1]
            kind = "forward+backward"
            for what, unit in (("time", "ms"), ("memory", "mib")):
                measured = ratio(
                    results.value(long, name, kind, unit), results.value(short, name, kind, unit)
                )
                made.append(
                    Claim(
                        f"{CONTENDERS[name].label}{', causal' if causal else ''}: {what} at "
                        f"{long.tokens:,} over that at {short.tokens:,}, {kind}",
                        _ROOT if name in ROOT else _LINEAR,
                        measured,
                        at_least=False,
                    )
                )
    return made
