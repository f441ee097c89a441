"""transformers' outputs, and with them which tokens were global."""

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import ModelOutput


@dataclass
class LongspanOutput(BaseModelOutputWithPooling):
    """`global_attention_mask` is the mask in use, given or chosen by the preset; None = none."""

    global_attention_mask: Tensor | None = None


@dataclass
class LongspanMaskedLMOutput(MaskedLMOutput):
    global_attention_mask: Tensor | None = None


@dataclass
class LongspanSequenceClassifierOutput(SequenceClassifierOutput):
    global_attention_mask: Tensor | None = None


@dataclass
class LongspanQuestionAnsweringOutput(QuestionAnsweringModelOutput):
    global_attention_mask: Tensor | None = None


@dataclass
class LongspanTokenClassifierOutput(TokenClassifierOutput):
    global_attention_mask: Tensor | None = None


@dataclass
class LongspanMultipleChoiceOutput(MultipleChoiceModelOutput):
    global_attention_mask: Tensor | None = None


@dataclass
class LongspanSeq2SeqOutput(Seq2SeqLMOutput):
    """Attention weights are the encoder's; those of the decoder are never formed."""

    global_attention_mask: Tensor | None = None


@dataclass
class LongspanMultihopOutput(ModelOutput):
    """Of every token, of every document, and of the tokens that stand for parts of it."""

    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    kind_logits: Tensor | None = None
    paragraph_logits: Tensor | None = None
    sentence_logits: Tensor | None = None
    global_attention_mask: Tensor | None = None
