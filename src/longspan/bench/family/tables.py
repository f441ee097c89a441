"""Time and memory of every mechanism, as tables for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from longspan.bench.benchmark import PASSES
from longspan.bench.drawing import spoken
from longspan.bench.family.cases import DECODERS, ENCODERS
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.report import make_table, refusal
from longspan.bench.store import Results


def tables(results: Results) -> Iterator[Table]:
    for causal, names in ((False, ENCODERS), (True, DECODERS)):
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
                for case in cases:
                    point = results.get(case, name, kind)
                    if point is None:
                        cells.append("")
                    elif point.ms is None or point.mib is None:
                        cells.append(refusal(point))
                    else:
                        cells.append(f"{point.ms:.3g} / {point.mib:,.0f}")
                table.add_row(*cells)
            yield table
