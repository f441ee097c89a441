"""Transformers' Auto classes learn of our models, whichever of the two packages comes first.

Our models need transformers, which takes seconds to import, and `import longspan` shall not wait
for it. So they are imported (and thereby registered) once transformers' own registry is there: at
once if it is already, else by a finder that waits for it and then steps aside. Much of
transformers imports much else of it halfway through, so it waits until the outermost of these
imports is done.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_REGISTRY = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Register now or later; calling it again changes nothing."""
    if _REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterRegistry) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterRegistry())


def _register() -> None:
    try:
        importlib.import_module("longspan.models")
    except ImportError as error:
        # Somebody is importing transformers, perhaps without any thought of us.
        warnings.warn(f"longspan's models cannot be used here: {error}", stacklevel=2)


class _AfterRegistry(MetaPathFinder):
    """Finds what Python would find; it adds a step to how transformers' modules are loaded."""

    def __init__(self) -> None:
        self.depth = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "transformers":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            self.depth += 1
            try:
                execute(module)
            finally:
                self.depth -= 1
            if self.depth == 0 and _REGISTRY in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = execute_and_register
        return spec
