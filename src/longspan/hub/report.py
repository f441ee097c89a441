"""What `longspan convert` prints."""

from rich.console import Console
from rich.table import Table

from longspan.hub.checkpoint import Conversion


def show(made: Conversion, console: Console) -> None:
    trained, longest = made.positions
    console.print(
        f"{made.source} -> {made.result}: {trained:,} -> {longest:,} positions, "
        f"window {made.window:,}, {made.parameters / 1e6:.1f} M parameters",
        highlight=False,
    )
    table = Table(title="Outputs of the two models, float32", title_justify="left")
    table.add_column("on")
    table.add_column("tokens", justify="right")
    table.add_column("largest difference", justify="right")
    table.add_column("largest output", justify="right")
    for row in made.parity:
        table.add_row(row.what, f"{row.tokens:,}", f"{row.largest:.1e}", f"{row.size:.3g}")
    console.print(table)
    for note in made.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True, highlight=False)
