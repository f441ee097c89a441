"""The target of the family, judged from a results file alone: none of it is quadratic."""

from longspan.bench.benchmark import Claim, ratio
from longspan.bench.family.cases import DECODERS, ENCODERS, ROOT
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.store import Results

# How much longer a step may take when a document gets four times as long: linear is 4, n * sqrt(n)
# 8, quadratic 16.
_LINEAR, _ROOT = 5.0, 10.0


def claims(results: Results) -> list[Claim]:
    """For every mechanism, from the longest document but one to the longest."""
    made = []
    for causal, names in ((False, ENCODERS), (True, DECODERS)):
        cases = sorted(
            {case for case, _, _ in results.points if case.causal == causal},
            key=lambda case: case.tokens,
        )
        for name in names:
            pairs = [(a, b) for a in cases for b in cases if b.tokens == 4 * a.tokens]
            if "dense" in name or not pairs:
                continue
            short, long = pairs[-1]
            kind = "forward+backward"
            measured = ratio(results.value(long, name, kind), results.value(short, name, kind))
            made.append(
                Claim(
                    f"{CONTENDERS[name].label}{', causal' if causal else ''}: time at "
                    f"{long.tokens:,} over that at {short.tokens:,}, {kind}",
                    _ROOT if name in ROOT else _LINEAR,
                    measured,
                    at_least=False,
                )
            )
    return made
