"""Models as transformers knows them. Importing this registers them with its Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from longspan.models.captured import capture, release
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
from longspan.models.quantize import quantize
from longspan.models.sampling import Sampler
from longspan.models.seq2seq import LongspanForConditionalGeneration
from longspan.models.seq2seq_config import LongspanSeq2SeqConfig

__all__ = [
    "DecoderState",
    "LongspanConfig",
    "LongspanDecoderConfig",
    "LongspanForCausalLM",
    "LongspanForConditionalGeneration",
    "LongspanForCoreference",
    "LongspanForMaskedLM",
    "LongspanForMultihop",
    "LongspanForMultipleChoice",
    "LongspanForQuestionAnswering",
    "LongspanForSequenceClassification",
    "LongspanForTokenClassification",
    "LongspanModel",
    "LongspanPreTrainedModel",
    "LongspanSeq2SeqConfig",
    "Packing",
    "Sampler",
    "capture",
    "explain_global",
    "pad",
    "quantize",
    "release",
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

AutoConfig.register("longspan_seq2seq", LongspanSeq2SeqConfig)
AutoModelForSeq2SeqLM.register(LongspanSeq2SeqConfig, LongspanForConditionalGeneration)
