"""Models as transformers knows them. Importing this registers them with its Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from longspan.models.config import LongspanConfig
from longspan.models.coreference import LongspanForCoreference
from longspan.models.decoder import DecoderState, LongspanForCausalLM
from longspan.models.decoder_config import LongspanDecoderConfig
from longspan.models.encoder import LongspanModel, LongspanPreTrainedModel
from longspan.models.heads import (
    LongspanForMaskedLM,
    LongspanForMultipleChoice,
    LongspanForQuestionAnswering,
    LongspanForSequenceClassification,
    LongspanForTokenClassification,
)
from longspan.models.multihop import LongspanForMultihop
from longspan.models.packing import Packing, pad, unpad
from longspan.models.presets import explain_global
from longspan.models.sampling import Sampler

__all__ = [
    "DecoderState",
    "LongspanConfig",
    "LongspanDecoderConfig",
    "LongspanForCausalLM",
    "LongspanForCoreference",
    "LongspanForMaskedLM",
    "LongspanForMultihop",
    "LongspanForMultipleChoice",
    "LongspanForQuestionAnswering",
    "LongspanForSequenceClassification",
    "LongspanForTokenClassification",
    "LongspanModel",
    "LongspanPreTrainedModel",
    "Packing",
    "Sampler",
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

AutoConfig.register("longspan_decoder", LongspanDecoderConfig)
AutoModelForCausalLM.register(LongspanDecoderConfig, LongspanForCausalLM)
