"""The encoder: ids to hidden states, any length, padded or packed."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils.generic import can_return_tuple

from longspan.layers.block import Block
from longspan.layers.position import sinusoids, tile_positions
from longspan.layers.window import WindowAttention
from longspan.models.config import LongspanConfig
from longspan.models.outputs import LongspanOutput
from longspan.models.presets import readable
from longspan.ops import global_positions
from longspan.ops.window import Visibility, visibility
from longspan.ops.window.api import check_masks


class Embeddings(nn.Module):
    """Words, positions and token types, added and normalised."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__()
        size = config.embedding_size
        assert size is not None  # the config fills it in
        self.words = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.positions = None
        if config.position == "learned":
            last_reserved = config.position_offset - 1 if config.position_offset else None
            self.positions = nn.Embedding(
                config.max_position_embeddings, size, padding_idx=last_reserved
            )
        types = config.type_vocab_size
        self.types = nn.Embedding(types, size) if types else None
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.project = None
        if size != config.hidden_size:
            self.project = nn.Linear(size, config.hidden_size)

    def forward(self, words: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        if self.positions is not None:
            hidden = words + self.positions(position_ids)
        else:
            hidden = words + sinusoids(position_ids, words.shape[-1], words.dtype)
        if self.types is not None:
            # Without types every token is of the first; no lookup needed.
            hidden = hidden + (
                self.types.weight[0] if token_type_ids is None else self.types(token_type_ids)
            )
        hidden = self.dropout(self.norm(hidden))
        return hidden if self.project is None else self.project(hidden)


class Pooler(nn.Module):
    """BERT's: a layer with tanh over the first token of each document."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return torch.tanh(self.dense(first_tokens(hidden, cu_seqlens)))


def first_tokens(hidden: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[batch, tokens, dim] -> [documents, dim]; a row is one document unless it is packed."""
    if cu_seqlens is None:
        return hidden[:, 0]
    return hidden[0, cu_seqlens[:-1].to(hidden.device).long().clamp(max=hidden.shape[1] - 1)]


class LongspanPreTrainedModel(PreTrainedModel):
    """What the encoder and its heads share."""

    config_class = LongspanConfig
    config: LongspanConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the base class declares it)
    # Losses are means over the batch; Trainer scales them when it accumulates gradients.
    accepts_loss_kwargs = False

    def initialize_weights(self) -> None:
        """As transformers does it; then the global projections start as copies of the local."""
        super().initialize_weights()
        for module in self.modules():
            if isinstance(module, WindowAttention) and module.qkv_global is not None:
                # Unlike `copy_global`, this leaves alone what came from a checkpoint.
                init.copy_(module.qkv_global.weight, module.qkv.weight)
                init.copy_(module.qkv_global.bias, module.qkv.bias)

    def extend_positions(self, length: int) -> None:
        """Make room for documents of `length` tokens by repeating the learned positions.

        The new positions are a starting point that a little finetuning improves. Sinusoidal
        positions reach any length as they are.
        """
        config = self.config
        table = cast(LongspanModel, self.base_model).embeddings.positions
        if table is None or length == config.longest:
            return
        grown = tile_positions(table.weight.detach(), config.position_offset, length)
        table.weight = nn.Parameter(grown, requires_grad=table.weight.requires_grad)
        table.num_embeddings = config.max_position_embeddings = grown.shape[0]


class LongspanModel(LongspanPreTrainedModel):
    """Encoder of whole documents, called as transformers' encoders are.

    Args:
        add_pooling_layer: None follows the config.
    """

    def __init__(self, config: LongspanConfig, add_pooling_layer: bool | None = None) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(
            Block(
                config.build_attention(setting),
                config.hidden_size,
                config.intermediate_size,
                activation=ACT2FN[config.hidden_act],
                norm_eps=config.layer_norm_eps,
                dropout=config.hidden_dropout_prob,
            )
            for setting in config.attention
        )
        pooled = config.pooler if add_pooling_layer is None else add_pooling_layer
        self.pooler = Pooler(config) if pooled else None
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.words

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.words = cast(nn.Embedding, value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_global_tokens: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> LongspanOutput:
        """Hidden states of every token.

        Args:
            input_ids: [batch, tokens], or `inputs_embeds` [batch, tokens, embedding_size].
            attention_mask: [batch, tokens], 1 = token, 0 = padding.
            global_attention_mask: [batch, tokens], 1 = sees, and is seen by, its whole document.
            token_type_ids, position_ids: [batch, tokens]; positions as rows of the table.
            cu_seqlens: [documents + 1] boundaries of documents packed into a single row, whose
                positions count from the beginning of each. Poolers return one row per document.
            max_global_tokens: most global tokens in any row, see `LongspanConfig`.
            output_attentions: also return each layer's weights, computed once more for that, as
                an `AttentionMap` of a band, columns and rows; n x n weights are never formed.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        words = self._words(input_ids, inputs_embeds)
        tokens_mask = _as_bool("attention_mask", attention_mask, words)
        global_mask = _as_bool("global_attention_mask", global_attention_mask, words)
        for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            _check_shape(name, ids, words)
        check_masks(words, attention_mask=None, global_mask=None, cu_seqlens=cu_seqlens)
        if global_mask is not None and tokens_mask is not None:
            global_mask = global_mask & tokens_mask
        seen, places = self._describe(
            words, tokens_mask, global_mask, cu_seqlens, max_global_tokens
        )
        if position_ids is None:
            self._check_length(words.shape[1], cu_seqlens)
            position_ids = self._position_ids(input_ids, words, seen, cu_seqlens)
        else:
            self._check_positions(position_ids)
        self._check_types(token_type_ids)

        hidden = self.embeddings(words, position_ids, token_type_ids)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states, maps = (hidden,), ()
        for block in self.layers:
            if output_attentions:
                attention = cast(WindowAttention, block.attention)
                maps = (*maps, attention.map(hidden, seen=seen, positions=places))
            if self.gradient_checkpointing and self.training:
                hidden = self._gradient_checkpointing_func(block.__call__, hidden, seen, places)
            else:
                hidden = block(hidden, seen, places)
            if output_hidden_states:
                states = (*states, hidden)
        return LongspanOutput(
            last_hidden_state=hidden,
            pooler_output=None if self.pooler is None else self.pooler(hidden, cu_seqlens),
            hidden_states=states if output_hidden_states else None,
            attentions=cast(Any, maps) if output_attentions else None,
            global_attention_mask=global_mask,
        )

    def _describe(
        self,
        words: Tensor,
        tokens_mask: Tensor | None,
        global_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        most: int | None,
    ) -> tuple[Visibility, Tensor | None]:
        """What all layers need to know of the masks: who sees whom, and where global tokens are."""
        places = None
        if global_mask is not None:
            most = self.config.max_global_tokens if most is None else most
            if most is None and torch.compiler.is_compiling():
                raise ValueError(
                    "a compiled model needs to know how many global tokens a row has at most: "
                    "give max_global_tokens, or set it in the config"
                )
            places = global_positions(global_mask, most)
            if places.shape[1] == 0:
                global_mask = places = None
        seen = visibility(
            words, attention_mask=tokens_mask, global_mask=global_mask, cu_seqlens=cu_seqlens
        )
        return seen, places

    def _words(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """[batch, tokens, embedding_size]: embedded ids, or the embeddings that were given."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is None:
            words = cast(Tensor, inputs_embeds)
            wanted = self.config.embedding_size
            if words.dim() != 3 or words.shape[2] != wanted:
                raise ValueError(
                    f"inputs_embeds must be [batch, tokens, {wanted}], got {tuple(words.shape)}"
                )
            given = words
        else:
            if input_ids.dim() != 2:
                raise ValueError(f"input_ids must be [batch, tokens], got {tuple(input_ids.shape)}")
            given = input_ids
        if given.shape[0] == 0 or given.shape[1] == 0:
            raise ValueError(f"an empty batch: [batch, tokens] = {tuple(given.shape[:2])}")
        if input_ids is None:
            return given
        if readable(input_ids):
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"token ids from {low} to {high}, but the vocabulary has ids from 0 to "
                    f"{self.config.vocab_size - 1}: is the tokenizer another model's?"
                )
        return self.embeddings.words(input_ids)

    def _position_ids(
        self,
        input_ids: Tensor | None,
        words: Tensor,
        seen: Visibility,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """[batch, tokens]: counted from the beginning of each document, behind reserved rows."""
        batch, tokens = words.shape[:2]
        offset, padding = self.config.position_offset, self.config.pad_token_id
        place = torch.arange(tokens, device=words.device)
        if cu_seqlens is not None:
            assert seen.start is not None
            assert seen.stop is not None
            return torch.where(seen.stop > 0, place - seen.start, 0) + offset
        if offset > 0 and padding is not None and input_ids is not None:
            real = input_ids != padding
            return real.cumsum(dim=1) * real + (offset - 1)
        return (place + offset).expand(batch, tokens)

    def _check_length(self, tokens: int, cu_seqlens: Tensor | None) -> None:
        most = self.config.longest
        if most is None:
            return
        if cu_seqlens is not None:
            if not readable(cu_seqlens):
                return  # the lookup in the table refuses what is beyond it
            tokens = int(cu_seqlens.diff().max())
        if tokens > most:
            raise ValueError(
                f"a document of {tokens} tokens, but the model has positions for {most}. Nothing "
                f"is cut silently: call model.extend_positions({tokens}), best followed by some "
                "finetuning, or shorten the input yourself"
            )

    def _check_positions(self, position_ids: Tensor) -> None:
        if self.config.position != "learned" or not readable(position_ids):
            return
        low, high = int(position_ids.min()), int(position_ids.max())
        rows = self.config.max_position_embeddings
        if low < 0 or high >= rows:
            raise ValueError(
                f"position_ids from {low} to {high}, but the table has rows 0 to {rows - 1}; "
                "model.extend_positions(length) adds rows"
            )

    def _check_types(self, token_type_ids: Tensor | None) -> None:
        if token_type_ids is None:
            return
        types = self.config.type_vocab_size
        if types == 0:
            raise ValueError("this model has no token types: leave token_type_ids out")
        if readable(token_type_ids):
            low, high = int(token_type_ids.min()), int(token_type_ids.max())
            if low < 0 or high >= types:
                raise ValueError(
                    f"token_type_ids from {low} to {high}, but the model has types 0 to {types - 1}"
                )


def _check_shape(name: str, tensor: Tensor | None, words: Tensor) -> None:
    if tensor is None:
        return
    if tensor.shape != words.shape[:2]:
        raise ValueError(
            f"{name} must be [batch, tokens] = {tuple(words.shape[:2])}, got {tuple(tensor.shape)}"
        )
    if tensor.device != words.device:
        raise ValueError(f"{name} is on {tensor.device}, the model is on {words.device}")


def _as_bool(name: str, mask: Tensor | None, words: Tensor) -> Tensor | None:
    """A 0/1 mask of any dtype as bool."""
    _check_shape(name, mask, words)
    if mask is not None and mask.is_floating_point() and readable(mask) and bool((mask < 0).any()):
        raise ValueError(f"{name} is 1 = yes, 0 = no; one of 0 and -inf is something else")
    return None if mask is None else mask != 0
