"""longspan: transformers that read whole documents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan.ops import global_attention, window_attention

if TYPE_CHECKING:
    from longspan.hub.patch import is_patched, patch, unpatch

__version__ = "0.1.0.dev0"

__all__ = [
    "__version__",
    "global_attention",
    "is_patched",
    "patch",
    "unpatch",
    "window_attention",
]

# Imported on first use, so that `import longspan` stays light.
_LAZY = {
    "is_patched": "longspan.hub.patch",
    "patch": "longspan.hub.patch",
    "unpatch": "longspan.hub.patch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
