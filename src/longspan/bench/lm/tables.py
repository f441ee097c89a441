"""Characters per second and memory of a training step, as a table for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from longspan.bench.lm.cases import STEP
from longspan.bench.lm.contenders import CONTENDERS
from longspan.bench.report import make_table, refusal
from longspan.bench.store import Results


def tables(results: Results) -> Iterator[Table]:
    cases = sorted({case for case, _, _ in results.points}, key=lambda c: (c.dilated, c.tokens))
    if not cases:
        return
    first = cases[0]
    table = make_table(f"Training step of a byte model, {first.layers} layers of {first.hidden}")
    table.add_column("characters x rows")
    table.add_column("contender")
    for name in ("characters/s", "ours over it", "GiB"):
        table.add_column(name, justify="right")
    for case in cases:
        names = [name for name in CONTENDERS if (case, name, STEP[0]) in results.points]
        for place, name in enumerate(names):
            cells = [str(case) if place == 0 else "", CONTENDERS[name].label]
            point = results.get(case, name, STEP[0])
            assert point is not None
            if point.ms is None or point.mib is None:
                cells += [refusal(point), "", ""]
            else:
                speed = float(f"{case.characters_per_second(point.ms):.3g}")
                factor = results.speedup(case, "longspan", name, STEP[0])
                shown = "" if factor is None or name == "longspan" else f"{factor:.2f}x"
                cells += [f"{speed:,.0f}", shown, f"{point.mib / 1024:.3g}"]
            table.add_row(*cells, style="bold" if name == "longspan" else None)
    yield table
