"""Results as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan.bench.benchmark import OUT_OF_MEMORY, Claim, Point
from longspan.bench.store import Results


def show(results: Results, console: Console) -> None:
    """Print what was measured, then which targets it meets."""
    for table in results.benchmark.tables(results):
        console.print(table)
    for failure in _failures(results):
        console.print(Text(failure, "red"))
    known = [claim for claim in results.benchmark.claims(results) if claim.met is not None]
    if known:
        console.print(_claims_table(known))
    head = results.header
    versions = ", ".join(f"{k} {v}" for k, v in head["versions"].items() if v)
    console.print(Text(f"{head['machine']}; {versions}", style="dim"))


def make_table(title: str) -> Table:
    """A table in the style of all our tables."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def parameter_count(number: int) -> str:
    """In millions, or in the thousands of toys."""
    if number >= 1_000_000:
        return f"{number / 1e6:.2f}M"
    return f"{number / 1e3:.1f}K" if number >= 1000 else str(number)


def refusal(point: Point) -> str:
    """What stands in place of numbers that there are none of."""
    return "no memory" if point.error == OUT_OF_MEMORY else "failed"


def _failures(results: Results) -> list[str]:
    return sorted(
        {
            f"{p.contender} failed: {p.error}"
            for p in results.points.values()
            if p.error not in (None, OUT_OF_MEMORY)
        }
    )


def _claims_table(claims: list[Claim]) -> Table:
    table = make_table("Targets")
    table.add_column("what")
    table.add_column("target", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    for claim in claims:
        verdict = Text("met", "green") if claim.met else Text("not met", "red")
        sign = ">=" if claim.at_least else "<="
        table.add_row(
            claim.text,
            f"{sign} {claim.target:g}{claim.unit}",
            f"{claim.measured:.2f}{claim.unit}",
            verdict,
        )
    return table
