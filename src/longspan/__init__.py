"""longspan: transformers that read whole documents.

Models need the transformers package, which takes seconds to import, so their names are looked up
on first use; transformers' Auto classes know them all the same, see `registration`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan.ops import global_attention, visibility, window_attention
from longspan.registration import register_with_transformers

if TYPE_CHECKING:
    from longspan.hub.convert import convert, to_transformers
    from longspan.hub.patch import is_patched, patch, unpatch
    from longspan.models import (
        LongspanConfig,
        LongspanDecoderConfig,
        LongspanForCausalLM,
        LongspanForConditionalGeneration,
        LongspanForCoreference,
        LongspanForMaskedLM,
        LongspanForMultipleChoice,
        LongspanForQuestionAnswering,
        LongspanForSequenceClassification,
        LongspanForTokenClassification,
        LongspanModel,
        LongspanSeq2SeqConfig,
        Sampler,
        capture,
        explain_global,
        pad,
        quantize,
        release,
        unpad,
    )
    from longspan.tasks.embed import embed, embed_query
    from longspan.tasks.predict import pipeline

__version__ = "0.1.0.dev0"

__all__ = [
    "LongspanConfig",
    "LongspanDecoderConfig",
    "LongspanForCausalLM",
    "LongspanForConditionalGeneration",
    "LongspanForCoreference",
    "LongspanForMaskedLM",
    "LongspanForMultipleChoice",
    "LongspanForQuestionAnswering",
    "LongspanForSequenceClassification",
    "LongspanForTokenClassification",
    "LongspanModel",
    "LongspanSeq2SeqConfig",
    "Sampler",
    "__version__",
    "capture",
    "convert",
    "embed",
    "embed_query",
    "explain_global",
    "global_attention",
    "is_patched",
    "pad",
    "patch",
    "pipeline",
    "quantize",
    "release",
    "to_transformers",
    "unpad",
    "unpatch",
    "visibility",
    "window_attention",
]

# Imported on first use, so that `import longspan` stays light.
_LAZY = {
    "convert": "longspan.hub.convert",
    "to_transformers": "longspan.hub.convert",
    "is_patched": "longspan.hub.patch",
    "patch": "longspan.hub.patch",
    "unpatch": "longspan.hub.patch",
    "LongspanConfig": "longspan.models",
    "LongspanDecoderConfig": "longspan.models",
    "LongspanForCausalLM": "longspan.models",
    "LongspanForConditionalGeneration": "longspan.models",
    "LongspanForCoreference": "longspan.models",
    "LongspanForMaskedLM": "longspan.models",
    "LongspanForMultipleChoice": "longspan.models",
    "LongspanForQuestionAnswering": "longspan.models",
    "LongspanForSequenceClassification": "longspan.models",
    "LongspanForTokenClassification": "longspan.models",
    "LongspanModel": "longspan.models",
    "LongspanSeq2SeqConfig": "longspan.models",
    "Sampler": "longspan.models",
    "capture": "longspan.models",
    "explain_global": "longspan.models",
    "pad": "longspan.models",
    "quantize": "longspan.models",
    "release": "longspan.models",
    "unpad": "longspan.models",
    "embed": "longspan.tasks.embed",
    "embed_query": "longspan.tasks.embed",
    "pipeline": "longspan.tasks.predict",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
