"""Transformers' Auto classes learn of our models, whichever of the two packages comes first.

Our models need transformers, which takes seconds to import, and `import longspan` shall not wait
for it. So they are imported (and thereby registered) once transformers' own registry is: at once
if that has happened already, else by a finder that waits for it and then steps aside. Modules of
transformers import one another in circles, so it waits until the outermost of them is whole.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
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
    """Finds nothing itself; it adds a step to how transformers' modules are loaded."""

    def __init__(self) -> None:
        self.depth = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "transformers":
            return None
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)  # so that the others are asked
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(place, self)
        if spec is not None and spec.loader is not None:
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
