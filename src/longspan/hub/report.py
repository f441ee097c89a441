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
    for name in ("tokens", "largest difference", "in float64", "largest output"):
        table.add_column(name, justify="right")
    for row in made.parity:
        exact = "" if row.exact is None else f"{row.exact:.1e}"
        numbers = (f"{row.largest:.1e}", exact, f"{row.size:.3g}")
        table.add_row(row.what, f"{row.tokens:,}", *numbers)
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
