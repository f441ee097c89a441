"""Imports go one way, and importing longspan needs nothing but torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

PACKAGE = Path(longspan.__path__[0])

# Each part, and what of ours it may import besides itself. `__init__` holds the version and the
# public names, so everybody may import the package; it alone reaches straight down to `ops`.
MAY_IMPORT = {
    "ops": set(),
    "layers": {"ops"},
    "graphs": set(),
    "models": {"layers", "ops", "graphs"},
    "hub": {"models", "layers", "ops"},
    "data": set(),
    "train": {"data", "machine", "layers"},
    "tasks": {"train", "data", "machine", "models", "hub", "layers"},
    "recipes": {"train", "data", "layers"},
    "registration": {"models"},
    "machine": set(),
    "doctor": {"machine", "ops"},
    "bench": {"machine", "recipes", "tasks", "hub", "train", "data", "models", "layers", "ops"}
    | {"graphs"},
    "analyze": {"bench", "machine", "tasks", "train", "models", "ops", "data"},
    "demo": {"analyze", "bench", "hub", "layers", "machine", "models", "tasks"},
    "cli_settings": {"recipes", "train"},
    "cli_tasks": {"cli_settings", "analyze", "recipes", "tasks", "train"},
    "cli_train": {"cli_settings", "cli_tasks", "analyze", "recipes", "tasks", "train", "models"},
    "cli_study": {"cli_settings", "cli_train", "analyze", "recipes", "tasks", "train"},
    "cli": {"cli_train", "cli_tasks", "cli_study", "doctor", "bench", "hub", "demo", "machine"}
    | {"tasks"},
    "__main__": {"cli"},
    "__init__": {"ops", "models", "hub", "tasks", "registration"},
}


def part_of(path: Path) -> str:
    """The first component below the package: a folder, or a module without its ending."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The parts of longspan that a file imports, anywhere in it."""
    tree = ast.parse(path.read_text(), filename=str(path))
    package = ["longspan", *path.relative_to(PACKAGE).parts[:-1]]
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            names += [".".join([*base, alias.name]) for alias in node.names]
    parts = [name.split(".") for name in names]
    known = {part_of(p) for p in PACKAGE.rglob("*.py")}
    return {p[1] for p in parts if p[0] == "longspan" and len(p) > 1 and p[1] in known}


@pytest.mark.parametrize("part", sorted({part_of(p) for p in PACKAGE.rglob("*.py")}))
def test_direction(part: str) -> None:
    assert part in MAY_IMPORT, f"say in MAY_IMPORT what longspan.{part} may import"
    for path in PACKAGE.rglob("*.py"):
        if part_of(path) == part:
            wrong = imported_parts(path) - MAY_IMPORT[part] - {part}
            assert not wrong, f"{path.relative_to(PACKAGE)} must not import {sorted(wrong)}"


def test_no_cycles() -> None:
    """The table above is itself one-way."""
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [p for p, below in MAY_IMPORT.items() if p not in order and below <= set(order)]
        assert free, f"a cycle among {sorted(set(MAY_IMPORT) - set(order))}"
        order += free


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_needs_no_optional_package() -> None:
    """In a fresh process where these packages do not exist, the op still computes."""
    done = run_python(
        """
import sys
for name in ("triton", "transformers", "matplotlib", "typer", "rich"):
    sys.modules[name] = None  # makes `import name` raise ImportError
import torch
import longspan
q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
print(longspan.window_attention(q, k, v, window=4).shape)
"""
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 9, 2, 16])" in done.stdout


def test_import_is_light() -> None:
    """Importing longspan imports nothing heavy beside torch."""
    heavy = ("triton", "transformers", "matplotlib", "typer", "rich", "torch._inductor")
    done = run_python(
        f"import sys, longspan; print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
