"""Tokens per second of finetuning and of tokenising, as tables for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from longspan.bench.benchmark import Point
from longspan.bench.finetuning.cases import CHARACTERS
from longspan.bench.finetuning.contenders import CONTENDERS
from longspan.bench.report import make_table, refusal
from longspan.bench.store import Results


def tables(results: Results) -> Iterator[Table]:
    order = list(CONTENDERS)
    points = sorted(results.points.values(), key=lambda point: order.index(point.contender))
    steps = [point for point in points if point.contender != "tokens"]
    if steps:
        case = steps[0].case
        table = make_table(f"Finetuning an encoder of {case.layers} layers of {case.hidden}")
        table.add_column("tokens x documents")
        table.add_column("what is timed")
        for name in ("tokens/s", "of the bare step's", "GiB"):
            table.add_column(name, justify="right")
        for place, point in enumerate(steps):
            where = str(point.case) if place == 0 else ""
            table.add_row(where, CONTENDERS[point.contender].label, *_cells(results, point))
        yield table
    texts = [point for point in points if point.contender == "tokens"]
    if texts:
        table = make_table("Text to tokens")
        for name in ("words of the tokenizer", "characters/s"):
            table.add_column(name, justify="right")
        for point in texts:
            speed = refusal(point) if point.ms is None else f"{1e3 * CHARACTERS / point.ms:,.0f}"
            table.add_row(f"{point.case.vocab:,}", speed)
        yield table


def _cells(results: Results, point: Point) -> list[str]:
    if point.ms is None or point.mib is None:
        return [refusal(point), "", ""]
    speed = float(f"{point.case.tokens_per_second(point.ms):.3g}")
    share = results.speedup(point.case, point.contender, "step", point.kind)
    bare = share is None or point.contender == "step"
    return [f"{speed:,.0f}", "" if bare else f"{share:.0%}", f"{point.mib / 1024:.3g}"]
