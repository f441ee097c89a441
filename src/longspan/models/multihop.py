"""Heads for answers whose evidence stands in several paragraphs, as HotpotQA asks for them."""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.utils.generic import can_return_tuple

from longspan.models.config import LongspanConfig
from longspan.models.encoder import LongspanModel, LongspanPreTrainedModel
from longspan.models.heads import ClassificationHead
from longspan.models.outputs import LongspanMultihopOutput


class TokenScore(nn.Module):
    """One score for a token that stands for something, by two layers."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__()
        assert config.classifier_dropout is not None  # the config fills it in
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.classifier_act]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, dim] -> [tokens]"""
        return self.out(self.dropout(self.activation(self.dense(hidden)))).squeeze(-1)


class LongspanForMultihop(LongspanPreTrainedModel):
    """Where an answer begins and ends, of which kind it is, and what it follows from.

    The kind is read off each document's first token; paragraphs and sentences have tokens that
    stand for them. Which tokens are global is up to the caller.
    """

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.encoder = LongspanModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.kind = ClassificationHead(config, config.num_labels or 3)
        self.paragraph = TokenScore(config)
        self.sentence = TokenScore(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        paragraphs: Tensor | None = None,
        sentences: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_global_tokens: int | None = None,
    ) -> LongspanMultihopOutput:
        """`paragraphs` and `sentences` are places of tokens in the flattened [batch, tokens], and
        have one score each. The rest as in `LongspanModel`."""
        encoded = self.encoder(
            input_ids,
            attention_mask=attention_mask,
            global_attention_mask=global_attention_mask,
            token_type_ids=token_type_ids,
            cu_seqlens=cu_seqlens,
            max_global_tokens=max_global_tokens,
        )
        hidden = encoded.last_hidden_state
        start, end = self.qa_outputs(hidden).unbind(-1)
        flat = hidden.flatten(0, 1)
        none = torch.zeros(0, dtype=torch.long, device=hidden.device)
        return LongspanMultihopOutput(
            start_logits=start,
            end_logits=end,
            kind_logits=self.kind(hidden, attention_mask, cu_seqlens),
            paragraph_logits=self.paragraph(flat[none if paragraphs is None else paragraphs]),
            sentence_logits=self.sentence(flat[none if sentences is None else sentences]),
            global_attention_mask=encoded.global_attention_mask,
        )
