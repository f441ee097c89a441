"""Milliseconds and MiB of attention, as tables for a terminal."""

from collections.abc import Iterator
from itertools import product

from rich.table import Table

from longspan.bench.attention.cases import AttentionCase
from longspan.bench.attention.contenders import CONTENDERS
from longspan.bench.benchmark import PASSES, Pass, ratio
from longspan.bench.report import make_table, refusal
from longspan.bench.store import Results

_OURS = {"op": "longspan", "layer": "longspan-layer"}
_TITLES = {
    "op": "Attention alone, 12 heads x 64 and window 512 unless said otherwise",
    "layer": "A self-attention layer with its projections, 12 heads x 64, window 512",
}


def tables(results: Results) -> Iterator[Table]:
    dtypes = dict.fromkeys(case.dtype for case, _, _ in results.points)
    for level, dtype in product(("layer", "op"), dtypes):
        found = {c for c, _, _ in results.points if (c.level, c.dtype) == (level, dtype)}
        cases = sorted(
            found,
            key=lambda c: (c.threads or 0, c.dilation, c.globals, c.head_dim, c.window, c.tokens),
        )
        if cases:
            yield _table(f"{_TITLES[level]}, {dtype}", cases, results)
            if any(results.value(case, _OURS[level], "forward", "busy_ms") for case in cases):
                yield _busy_table(f"{_TITLES[level].split(',')[0]}, without rests", cases, results)


def _busy_table(title: str, cases: list[AttentionCase], results: Results) -> Table:
    """Milliseconds at the clock that a chip keeps under this load alone."""
    table = make_table(title)
    table.add_column("case")
    table.add_column("contender")
    for kind, unit in product(("fwd", "fwd+bwd"), ("ms", "over ours")):
        table.add_column(f"{kind}\n{unit}", justify="right")
    for case in cases:
        label = str(case)
        for name in CONTENDERS:
            times = [results.value(case, name, kind, "busy_ms") for kind in PASSES]
            ours = [results.value(case, _OURS[case.level], kind, "busy_ms") for kind in PASSES]
            if not any(times):
                continue
            cells = [label, CONTENDERS[name].label]
            for mine, time in zip(ours, times, strict=True):
                over = ratio(time, mine) if name != _OURS[case.level] else None
                cells += ["" if time is None else _three_digits(time)]
                cells += ["" if over is None else f"{over:.2f}x"]
            table.add_row(*cells, style="bold" if name == _OURS[case.level] else None)
            label = ""
    return table


def _table(title: str, cases: list[AttentionCase], results: Results) -> Table:
    table = make_table(title)
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


def _cells(results: Results, case: AttentionCase, name: str, kind: Pass) -> list[str]:
    point = results.get(case, name, kind)
    if point is None:
        return ["", "", ""]
    if point.ms is None or point.mib is None:
        return [refusal(point), "", ""]
    ours = results.get(case, _OURS[case.level], kind)
    factor = "" if ours is None or not ours.ms or ours is point else f"{point.ms / ours.ms:.2f}x"
    return [_three_digits(point.ms), factor, f"{point.mib:,.0f}"]


def _three_digits(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" if ms >= 1 else f"{ms:.3f}"
