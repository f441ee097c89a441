"""Models as transformers knows them. Importing this registers them with its Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from longspan.models.config import LongspanConfig
from longspan.models.encoder import LongspanModel, LongspanPreTrainedModel
from longspan.models.heads import (
    LongspanForMaskedLM,
    LongspanForMultipleChoice,
    LongspanForQuestionAnswering,
    LongspanForSequenceClassification,
    LongspanForTokenClassification,
)
from longspan.models.packing import Packing, pad, unpad
from longspan.models.presets import explain_global

__all__ = [
    "LongspanConfig",
    "LongspanForMaskedLM",
    "LongspanForMultipleChoice",
    "LongspanForQuestionAnswering",
    "LongspanForSequenceClassification",
    "LongspanForTokenClassification",
    "LongspanModel",
    "LongspanPreTrainedModel",
    "Packing",
    "explain_global",
    "pad",
    "unpad",
]

AutoConfig.register("longspan", LongspanConfig)
AutoModel.register(LongspanConfig, LongspanModel)
AutoModelForMaskedLM.register(LongspanConfig, LongspanForMaskedLM)
AutoModelForMultipleChoice.register(LongspanConfig, LongspanForMultipleChoice)
AutoModelForQuestionAnswering.register(LongspanConfig, LongspanForQuestionAnswering)
AutoModelForSequenceClassification.register(LongspanConfig, LongspanForSequenceClassification)
AutoModelForTokenClassification.register(LongspanConfig, LongspanForTokenClassification)
