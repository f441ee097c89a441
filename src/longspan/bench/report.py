"""Results as tables for a terminal."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan.bench.cases import PASSES, Case, Pass
from longspan.bench.claims import Claim
from longspan.bench.contenders import CONTENDERS
from longspan.bench.measure import OUT_OF_MEMORY
from longspan.bench.store import Results

_OURS = {"op": "longspan", "layer": "longspan-layer"}
_TITLES = {
    "op": "Attention alone, 12 heads x 64 and window 512 unless said otherwise",
    "layer": "A self-attention layer with its projections, 12 heads x 64, window 512",
}


def show(results: Results, claims: Iterable[Claim], console: Console) -> None:
    """Print what was measured, then which targets it meets."""
    for level in ("layer", "op"):
        cases = sorted(
            {case for case, _, _ in results.points if case.level == level},
            key=lambda c: (c.dilation, c.globals, c.head_dim, c.window, c.tokens),
        )
        if cases:
            console.print(_points_table(level, cases, results))
    for failure in _failures(results):
        console.print(f"[red]{failure}[/]")
    known = [claim for claim in claims if claim.met is not None]
    if known:
        console.print(_claims_table(known))
    head = results.header
    versions = ", ".join(f"{k} {v}" for k, v in head["versions"].items() if v)
    console.print(Text(f"{head['machine']}; {versions}", style="dim"))


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _points_table(level: str, cases: list[Case], results: Results) -> Table:
    table = _table(_TITLES[level])
    table.add_column("case")
    table.add_column("contender")
    for kind in ("fwd", "fwd+bwd"):
        for unit in ("ms", "over ours", "MiB"):
            table.add_column(f"{kind}\n{unit}", justify="right")
    for case in cases:
        names = [n for n in CONTENDERS if any((case, n, kind) in results.points for kind in PASSES)]
        for i, name in enumerate(names):
            cells = [str(case) if i == 0 else "", CONTENDERS[name].label]
            for kind in PASSES:
                cells += _cells(results, case, name, kind)
            table.add_row(*cells, style="bold" if name == _OURS[case.level] else None)
    return table


def _cells(results: Results, case: Case, name: str, kind: Pass) -> list[str]:
    point = results.get(case, name, kind)
    if point is None:
        return ["", "", ""]
    if point.ms is None or point.mib is None:
        return ["no memory" if point.error == OUT_OF_MEMORY else "failed", "", ""]
    ours = results.get(case, _OURS[case.level], kind)
    factor = "" if ours is None or not ours.ms or ours is point else f"{point.ms / ours.ms:.2f}x"
    return [_three_digits(point.ms), factor, f"{point.mib:,.0f}"]


def _three_digits(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" if ms >= 1 else f"{ms:.3f}"


def _failures(results: Results) -> list[str]:
    return sorted(
        {
            f"{p.contender} failed: {p.error}"
            for p in results.points.values()
            if p.error not in (None, OUT_OF_MEMORY)
        }
    )


def _claims_table(claims: list[Claim]) -> Table:
    table = _table("Targets")
    table.add_column("what")
    table.add_column("target", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    for claim in claims:
        verdict = "[green]met[/]" if claim.met else "[red]not met[/]"
        sign = ">=" if claim.at_least else "<="
        table.add_row(claim.text, f"{sign} {claim.target:g}x", f"{claim.measured:.2f}x", verdict)
    return table
