"""Heads: what a task makes of the encoder's hidden states, with transformers' losses."""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers.activations import ACT2FN
from transformers.utils.generic import can_return_tuple

from longspan.models.config import LongspanConfig
from longspan.models.encoder import (
    LongspanModel,
    LongspanPreTrainedModel,
    first_tokens,
    mean_tokens,
)
from longspan.models.outputs import (
    LongspanMaskedLMOutput,
    LongspanMultipleChoiceOutput,
    LongspanOutput,
    LongspanQuestionAnsweringOutput,
    LongspanSequenceClassifierOutput,
    LongspanTokenClassifierOutput,
)
from longspan.models.presets import choose_global, warn_if_none
from longspan.ops.window.pattern import check_masks


class Transform(nn.Module):
    """A layer, an activation and a norm: what a head may begin with."""

    def __init__(self, config: LongspanConfig, size: int, activation: str) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, size, bias=config.bias)
        self.activation = ACT2FN[activation]
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden)))


class LanguageModelHead(Transform):
    """Scores of every word for every token."""

    def __init__(self, config: LongspanConfig) -> None:
        size = config.embedding_size
        assert size is not None  # the config fills it in
        super().__init__(config, size, config.lm_act)
        self.decoder = nn.Linear(size, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.decoder(super().forward(hidden))


class ClassificationHead(nn.Module):
    """Scores of a document, from its first token or from the mean of them all."""

    def __init__(self, config: LongspanConfig, labels: int) -> None:
        super().__init__()
        assert config.classifier_dropout is not None  # the config fills it in
        size = config.hidden_size
        self.mean = config.classifier_pooling == "mean"
        self.dense = nn.Linear(size, size, bias=config.bias)
        self.activation = ACT2FN[config.classifier_act]
        self.norm = None
        if config.classifier_norm:
            self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps, bias=config.bias)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out = nn.Linear(size, labels)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """[batch, tokens, dim] -> [documents, labels]"""
        if self.mean:
            document = mean_tokens(hidden, attention_mask, cu_seqlens)
        else:
            document = first_tokens(hidden, cu_seqlens)
        if self.norm is None:
            inner = self.activation(self.dense(self.dropout(document)))
        else:
            inner = self.norm(self.activation(self.dense(document)))
        return self.out(self.dropout(inner))


class _Head(LongspanPreTrainedModel):
    """An encoder, and the preset of global tokens for when no mask is given."""

    preset: ClassVar[str] = "none"

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.encoder = LongspanModel(config, add_pooling_layer=False)

    def _encode(
        self,
        input_ids: Tensor | None,
        global_attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        max_global_tokens: int | None,
        **rest: Tensor | bool | None,
    ) -> LongspanOutput:
        like = input_ids if input_ids is not None else inputs_embeds
        # What is no tensor, or none of tokens, is refused by the encoder.
        if global_attention_mask is None and isinstance(like, Tensor) and like.dim() >= 2:
            check_masks(like, attention_mask=None, global_mask=None, cu_seqlens=cu_seqlens)
            global_attention_mask, most = choose_global(
                self.config.global_preset or self.preset,
                like,
                input_ids=input_ids,
                sep_token_id=self.config.sep_token_id,
                cu_seqlens=cu_seqlens,
            )
            max_global_tokens = max_global_tokens if most is None else most
        encoded = self.encoder(
            input_ids,
            global_attention_mask=global_attention_mask,
            inputs_embeds=inputs_embeds,
            cu_seqlens=cu_seqlens,
            max_global_tokens=max_global_tokens,
            return_dict=True,
            **rest,
        )
        if self.preset != "none":
            warn_if_none(type(self).__name__, encoded.global_attention_mask)
        return encoded


class LongspanForMaskedLM(_Head):
    """Predicts masked tokens. No token is global unless a mask says so, as in pretraining."""

    _tied_weights_keys = {  # noqa: RUF012 (as the base class declares it)
        "lm_head.decoder.weight": "encoder.embeddings.words.weight"
    }

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.lm_head = LanguageModelHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_global_tokens: int | None = None,
        logits_to_keep: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> LongspanMaskedLMOutput:
        """`labels` [batch, tokens], -100 = not asked for; the rest as in `LongspanModel`.

        Scores of every word for every token take much memory where few are asked for:
        `logits_to_keep` [kept], places in each row, makes `logits` and `labels` [batch, kept, ...].
        """
        encoded = self._encode(
            input_ids,
            global_attention_mask,
            inputs_embeds,
            cu_seqlens,
            max_global_tokens,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden = cast(Tensor, encoded.last_hidden_state)
        if logits_to_keep is not None:
            hidden = hidden.index_select(1, logits_to_keep)
        logits = self.lm_head(hidden)
        loss = None if labels is None else _token_loss(logits, labels)
        return LongspanMaskedLMOutput(logits=logits, **_kept(encoded, loss))


class LongspanForTokenClassification(_Head):
    """A label for every token. No token is global unless a mask says so."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        assert config.classifier_dropout is not None  # the config fills it in
        self.transform = _token_transform(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_global_tokens: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> LongspanTokenClassifierOutput:
        """`labels` [batch, tokens], -100 = not asked for; the rest as in `LongspanModel`."""
        encoded = self._encode(
            input_ids,
            global_attention_mask,
            inputs_embeds,
            cu_seqlens,
            max_global_tokens,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.classifier(self.dropout(self.transform(encoded.last_hidden_state)))
        loss = None if labels is None else _token_loss(logits, labels)
        return LongspanTokenClassifierOutput(logits=logits, **_kept(encoded, loss))


class LongspanForSequenceClassification(_Head):
    """A label, several, or a number for each document; its first token is global."""

    preset = "first"

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.classifier = ClassificationHead(config, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_global_tokens: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> LongspanSequenceClassifierOutput:
        """`labels` [documents], or [documents, labels] for several; a packed row has as many
        documents as it holds. The rest as in `LongspanModel`."""
        encoded = self._encode(
            input_ids,
            global_attention_mask,
            inputs_embeds,
            cu_seqlens,
            max_global_tokens,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.classifier(encoded.last_hidden_state, attention_mask, cu_seqlens)
        loss = None if labels is None else self._loss(logits, labels.to(logits.device))
        return LongspanSequenceClassifierOutput(logits=logits, **_kept(encoded, loss))

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """By `config.problem_type`, or by what the labels look like, as transformers does it."""
        problem = self.config.problem_type
        if problem is None:
            whole = labels.dtype in (torch.int64, torch.int32)
            several = "single_label" if whole else "multi_label"
            problem = "regression" if self.num_labels == 1 else f"{several}_classification"
        if problem == "regression":
            return mse_loss(logits.view(labels.shape), labels.to(logits.dtype))
        if problem == "single_label_classification":
            return cross_entropy(logits, labels.long().view(-1))
        return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


class LongspanForQuestionAnswering(_Head):
    """Where an answer begins and ends; the question, all before the first separator, is global."""

    preset = "question"

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.transform = _token_transform(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_global_tokens: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> LongspanQuestionAnsweringOutput:
        """`start_positions`, `end_positions` [documents], counted from the beginning of each; ones
        behind the last token are ignored. The rest as in `LongspanModel`."""
        encoded = self._encode(
            input_ids,
            global_attention_mask,
            inputs_embeds,
            cu_seqlens,
            max_global_tokens,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden = self.transform(encoded.last_hidden_state)
        start, end = self.qa_outputs(hidden).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = _place_loss(start, start_positions, cu_seqlens)
            loss = (loss + _place_loss(end, end_positions, cu_seqlens)) / 2
        return LongspanQuestionAnsweringOutput(
            start_logits=start, end_logits=end, **_kept(encoded, loss)
        )


class LongspanForMultipleChoice(_Head):
    """The best of several candidates, each read as `tokenizer(text, question + candidate)` has it:
    what stands behind the text, question and candidate, is global, as in Longformer."""

    preset = "candidates"

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.classifier = ClassificationHead(config, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        choices: int | None = None,
        max_global_tokens: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> LongspanMultipleChoiceOutput:
        """Everything is [batch, choices, tokens]; `labels` [batch] is the right choice.

        Or a packed row as in `LongspanModel`, in which as many documents as there are `choices`
        follow one another for each question; None = all of them are about one.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        rows: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "global_attention_mask": global_attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if cu_seqlens is None:
            if not isinstance(given, Tensor) or given.dim() < 3:
                got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise ValueError(f"input_ids must be a tensor [batch, choices, tokens], got {got}")
            if choices not in (None, given.shape[1]):
                raise ValueError(f"choices={choices}, but input_ids has {given.shape[1]} of them")
            choices = given.shape[1]
            rows = {name: _one_row_each(name, one, given) for name, one in rows.items()}
        elif choices is not None and (choices < 1 or (len(cu_seqlens) - 1) % choices):
            raise ValueError(
                f"cu_seqlens: {len(cu_seqlens) - 1} documents are no questions of "
                f"choices={choices} each"
            )
        encoded = self._encode(
            cu_seqlens=cu_seqlens,
            max_global_tokens=max_global_tokens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **rows,
        )
        mask = rows["attention_mask"]
        scores = self.classifier(encoded.last_hidden_state, mask, cu_seqlens)
        logits = scores.view(-1, scores.shape[0] if choices is None else choices)
        loss = None if labels is None else cross_entropy(logits, labels.to(logits.device))
        return LongspanMultipleChoiceOutput(logits=logits, **_kept(encoded, loss))


def _one_row_each(name: str, given: Any, like: Tensor) -> Any:
    """[batch, choices, tokens, ...] -> [batch * choices, tokens, ...], if it is shaped like `like`:
    flattened, [choices, batch, ...] would look the same. What is no tensor the encoder refuses."""
    if not isinstance(given, Tensor) or (name == "position_ids" and given.dim() == 2):
        return given  # a row of positions serves all documents
    wanted = given.shape[:3] if name == "inputs_embeds" else given.shape
    if given is not like and wanted != like.shape[:3]:
        raise ValueError(
            f"{name} must be [batch, choices, tokens] = {tuple(like.shape[:3])}, "
            f"got {tuple(given.shape)}"
        )
    return given.flatten(0, 1)


def _token_transform(config: LongspanConfig) -> nn.Module:
    """What stands before the last layer of heads that score tokens: nothing, in most families."""
    if not config.classifier_norm:
        return nn.Identity()
    return Transform(config, config.hidden_size, config.classifier_act)


def _kept(encoded: LongspanOutput, loss: Tensor | None) -> dict[str, Any]:
    """The loss, and what a head passes on of the encoder's output."""
    return {
        "loss": loss,
        "hidden_states": encoded.hidden_states,
        "attentions": encoded.attentions,
        "global_attention_mask": encoded.global_attention_mask,
    }


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.to(logits.device).flatten())


def _place_loss(logits: Tensor, place: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Of logits [batch, tokens], or of a packed row: each document's are its own tokens'."""
    tokens = logits.shape[1]
    place = place.to(logits.device).view(-1).clamp(0, tokens)
    if cu_seqlens is not None:
        if len(place) != len(cu_seqlens) - 1:
            raise ValueError(
                f"{len(place)} positions of answers for the {len(cu_seqlens) - 1} documents of "
                "cu_seqlens: give one for each"
            )
        bounds = cu_seqlens.to(logits.device).long()
        start, stop = bounds[:-1, None], bounds[1:, None]
        token = torch.arange(tokens, device=logits.device)
        logits = torch.where((token >= start) & (token < stop), logits, -torch.inf)
        place = torch.where(place < bounds.diff(), place + bounds[:-1], tokens)
    return cross_entropy(logits, place, ignore_index=tokens)
