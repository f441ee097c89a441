"""Time, memory and error of every mechanism, as tables for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from longspan.bench.benchmark import PASSES
from longspan.bench.drawing import spoken
from longspan.bench.family.cases import BESIDE_DECODERS, BESIDE_ENCODERS, DECODERS, ENCODERS
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.report import make_table, refusal
from longspan.bench.store import Results


def tables(results: Results) -> Iterator[Table]:
    for causal, names in (
        (False, ENCODERS + BESIDE_ENCODERS),
        (True, DECODERS + BESIDE_DECODERS),
    ):
        cases = sorted(
            {case for case, _, _ in results.points if case.causal == causal},
            key=lambda case: case.tokens,
        )
        for kind in PASSES:
            if not cases:
                continue
            whose = "Decoder" if causal else "Encoder"
            table = make_table(f"{whose} layer, {spoken(kind)}: ms and MiB by tokens")
            table.add_column("mechanism")
            for case in cases:
                table.add_column(f"{case.tokens:,}", justify="right")
            for name in names:
                cells = [CONTENDERS[name].label]
                points = [results.get(case, name, kind) for case in cases]
                if not any(points):
                    continue
                for point in points:
                    if point is None:
                        cells.append("")
                    elif point.ms is None or point.mib is None:
                        cells.append(refusal(point))
                    else:
                        cells.append(f"{point.ms:.3g} / {point.mib:,.0f}")
                table.add_row(*cells)
            yield table
    yield from _errors(results)


def _errors(results: Results) -> Iterator[Table]:
    """Of those that approximate softmax attention, by what they may look at for a token."""
    found = results.header.get("errors", [])
    for documents in dict.fromkeys(one["documents"] for one in found):
        own = [one for one in found if one["documents"] == documents]
        budgets = sorted({one["budget"] for one in own})
        tokens = own[0]["tokens"]
        table = make_table(f"Error against softmax attention, {tokens:,} {documents} tokens")
        table.add_column("mechanism")
        for budget in budgets:
            table.add_column(f"{budget:,}", justify="right")
        for name in dict.fromkeys(one["mechanism"] for one in own):
            by_budget = {one["budget"]: one["error"] for one in own if one["mechanism"] == name}
            cells = [f"{by_budget[b]:.3f}" if b in by_budget else "" for b in budgets]
            table.add_row(CONTENDERS[name].label, *cells)
        yield table
