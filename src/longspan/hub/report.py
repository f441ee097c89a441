"""What `longspan convert` prints."""

from rich.console import Console
from rich.table import Table

from longspan.hub.checkpoint import Conversion


def show(made: Conversion, console: Console) -> None:
    trained, longest = made.positions
    window = "" if made.window is None else f"window {made.window:,}, "
    console.print(
        f"{made.source} -> {made.result}: {trained:,} -> {longest:,} positions, "
        f"{window}{made.parameters / 1e6:.1f} M parameters",
        highlight=False,
    )
    if made.parity:
        console.print(_parity(made))
    if made.megabytes is not None:
        before, after = made.megabytes
        console.print(
            f"int8 weights: {before:,.1f} -> {after:,.1f} MB; embeddings, norms and head as before",
            highlight=False,
        )
        console.print(_rounding(made))
    for note in made.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True, highlight=False)


def _parity(made: Conversion) -> Table:
    table = Table(title="Outputs of the two models, float32", title_justify="left")
    table.add_column("on")
    alike = any(row.alike is not None for row in made.parity)
    names = ("tokens", "largest difference", "rounded alike", "in float64", "largest output")
    for name in names if alike else (name for name in names if name != "rounded alike"):
        table.add_column(name, justify="right")

    def number(one: float | None) -> str:
        return "" if one is None else f"{one:.1e}"

    for row in made.parity:
        found = (row.largest, *((row.alike,) if alike else ()), row.exact)
        table.add_row(row.what, f"{row.tokens:,}", *map(number, found), f"{row.size:.3g}")
    return table


def _rounding(made: Conversion) -> Table:
    table = Table(title="Hidden states with int8 weights against float32", title_justify="left")
    table.add_column("on")
    for name in ("tokens", "largest difference", "mean", "largest state", "cosine of embeddings"):
        table.add_column(name, justify="right")
    for row in made.rounding:
        numbers = (f"{row.largest:.1e}", f"{row.mean:.1e}", f"{row.size:.3g}", f"{row.cosine:.5f}")
        table.add_row(row.what, f"{row.tokens:,}", *numbers)
    return table
