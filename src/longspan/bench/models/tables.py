"""Tokens per second and memory of whole models, as a table for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from longspan.bench.benchmark import PASSES, Pass
from longspan.bench.models.cases import ModelCase
from longspan.bench.models.contenders import CONTENDERS
from longspan.bench.report import make_table, refusal
from longspan.bench.store import Results


def tables(results: Results) -> Iterator[Table]:
    cases = sorted(
        {case for case, _, _ in results.points},
        key=lambda c: (c.shortest is not None, -c.layers, c.tokens, c.batch),
    )
    if not cases:
        return
    first = cases[0]
    table = make_table(f"Encoders of size {first.hidden}, 12 layers unless said otherwise")
    table.add_column("tokens x documents")
    table.add_column("contender")
    for kind in ("forward", "step"):
        for unit in ("k tokens/s", "ours over it", "GiB"):
            table.add_column(f"{kind}\n{unit}", justify="right")
    for case in cases:
        names = [n for n in CONTENDERS if any((case, n, kind) in results.points for kind in PASSES)]
        for i, name in enumerate(names):
            cells = [str(case) if i == 0 else "", CONTENDERS[name].label]
            for kind in PASSES:
                cells += _cells(results, case, name, kind)
            table.add_row(*cells, style="bold" if name == "longspan" else None)
    yield table


def _cells(results: Results, case: ModelCase, name: str, kind: Pass) -> list[str]:
    point = results.get(case, name, kind)
    if point is None:
        return ["", "", ""]
    if point.ms is None or point.mib is None:
        return [refusal(point), "", ""]
    thousands = case.tokens_per_second(point.ms) / 1e3
    speedup = None if name == "longspan" else results.speedup(case, "longspan", name, kind)
    factor = "" if speedup is None else f"{speedup:.2f}x"
    return [
        f"{thousands:,.0f}" if thousands >= 100 else f"{thousands:.3g}",
        factor,
        f"{point.mib / 1024:.3g}",
    ]
