"""A figure drawn from a results file alone."""

from pathlib import Path

from longspan.bench.store import Results


def draw(results: Results, stem: Path) -> list[Path]:
    return []
