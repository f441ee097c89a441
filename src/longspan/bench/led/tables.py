"""Time and memory of encoder-decoders, as a table for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from longspan.bench.benchmark import PASSES, Pass
from longspan.bench.led.cases import STEP, LEDCase
from longspan.bench.led.contenders import CONTENDERS
from longspan.bench.led.memory import TERMS, fit, measured, model_of
from longspan.bench.report import make_table, refusal
from longspan.bench.store import Results


def tables(results: Results) -> Iterator[Table]:
    """One for each size of model."""
    every: dict[tuple[LEDCase, Pass], None] = dict.fromkeys(
        (case, kind) for case, _, kind in results.points
    )
    models = {(case.layers, case.hidden): None for case, _ in every}
    for layers, hidden in models:
        rows = [key for key in every if (key[0].layers, key[0].hidden) == (layers, hidden)]
        rows.sort(key=lambda row: (bool(row[0].beams), PASSES.index(row[1]), _order(row[0])))
        table = make_table(f"Encoder-decoders of {layers} + {layers} layers x {hidden}")
        for name in ("tokens read to written", "what", "contender"):
            table.add_column(name)
        for name in ("ms", "ours over it", "GiB"):
            table.add_column(name, justify="right")
        for case, kind in rows:
            names = [name for name in CONTENDERS if (case, name, kind) in results.points]
            for place, name in enumerate(names):
                cells = [str(case), _what(case, kind)] if place == 0 else ["", ""]
                cells += [CONTENDERS[name].label, *_cells(results, case, name, kind)]
                table.add_row(*cells, style="bold" if name == "longspan" else None)
        yield table
    yield from _memory(results)


def _memory(results: Results) -> Iterator[Table]:
    """What the memory of the longest step consists of, by the fit."""
    steps = [case for case, _, kind in results.points if kind == STEP[0]]
    for model in dict.fromkeys(map(model_of, steps)):
        found = {name: measured(results, name, model) for name in CONTENDERS}
        fits = {name: made for name, points in found.items() if (made := fit(points)) is not None}
        if not fits:
            continue
        case = max((c for c in steps if model_of(c) == model), key=lambda c: c.tokens * c.target)
        table = make_table(f"MiB of a training step, {case}, by what they grow with")
        table.add_column("contender")
        for term in (*TERMS, "fit", "measured"):
            table.add_column(term, justify="right")
        for name, made in fits.items():
            parts = made.parts(case)
            own = found[name].get(case)
            cells = [f"{parts.get(term, 0.0):,.0f}" for term in TERMS]
            cells += [f"{made(case):,.0f}", "" if own is None else f"{own:,.0f}"]
            table.add_row(CONTENDERS[name].label, *cells)
        yield table


def _order(case: LEDCase) -> tuple[int, ...]:
    return case.tokens, case.target, case.window, case.globals


def _what(case: LEDCase, kind: Pass) -> str:
    if case.beams:
        return "generation"
    return "forward" if kind == "forward" else "step"


def _cells(results: Results, case: LEDCase, name: str, kind: Pass) -> list[str]:
    point = results.get(case, name, kind)
    assert point is not None
    if point.ms is None or point.mib is None:
        return [refusal(point), "", ""]
    factor = None if name == "longspan" else results.speedup(case, "longspan", name, kind)
    shown = "" if factor is None else f"{factor:.2f}x"
    return [f"{float(f'{point.ms:.3g}'):,g}", shown, f"{point.mib / 1024:.3g}"]
