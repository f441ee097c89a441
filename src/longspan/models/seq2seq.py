"""The encoder-decoder: a whole document in, a short text out."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.activations import ACT2FN
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils.generic import can_return_tuple

from longspan.layers.cross import CrossBlock
from longspan.models.encoder import Embeddings, LongspanModel, LongspanPreTrainedModel
from longspan.models.inputs import as_bool, check_documents
from longspan.models.outputs import LongspanOutput, LongspanSeq2SeqOutput
from longspan.models.presets import choose_global
from longspan.models.seq2seq_config import LongspanSeq2SeqConfig
from longspan.models.steps import StepCache
from longspan.models.targets import (
    check_decoder_input,
    check_labels,
    check_target_length,
    shift_right,
)

# Ways to generate that add a token to each row and never take one back.
_STEPWISE = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


class SourceEncoder(LongspanModel):
    """The encoder, with its preset of global tokens: `generate` calls it by itself."""

    @can_return_tuple
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        max_global_tokens: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> LongspanOutput:
        like = input_ids if input_ids is not None else inputs_embeds
        if global_attention_mask is None and isinstance(like, Tensor) and like.dim() >= 2:
            global_attention_mask, most = choose_global(
                self.config.global_preset or "first",
                like,
                input_ids=input_ids,
                sep_token_id=self.config.sep_token_id,
                attention_mask=as_bool("attention_mask", attention_mask, like),
            )
            max_global_tokens = max_global_tokens if most is None else most
        return super().forward(
            input_ids,
            attention_mask,
            global_attention_mask,
            inputs_embeds=inputs_embeds,
            max_global_tokens=max_global_tokens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )


class TargetDecoder(nn.Module):
    """Hidden states of the target so far, each token having seen those before it and the source."""

    def __init__(self, config: LongspanSeq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        heads, hidden_dim = config.decoder_attention_heads, config.decoder_intermediate_size
        assert heads is not None  # the config fills these in
        assert hidden_dim is not None
        self.embeddings = Embeddings(config, config.decoder_positions)
        self.layers = nn.ModuleList(
            CrossBlock(
                config.hidden_size,
                heads,
                hidden_dim,
                layer=layer,
                activation=ACT2FN[config.hidden_act],
                norm_eps=config.layer_norm_eps,
                dropout=config.hidden_dropout_prob,
                attention_dropout=config.attention_probs_dropout_prob,
                inner_dropout=config.activation_dropout,
                norm_first=config.norm_first,
                bias=config.bias,
            )
            for layer in range(config.decoder_layers or 0)
        )
        self.norm = None
        if config.norm_first:
            self.norm = nn.LayerNorm(
                config.hidden_size, eps=config.layer_norm_eps, bias=config.bias
            )
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor,
        source: Tensor,
        *,
        target_mask: Tensor | None = None,
        source_mask: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Tensor, ...]:
        """Hidden states [batch, tokens, dim] behind the embeddings and each layer.

        `target_mask` [batch, cached + tokens] and `source_mask` [documents, source], True = token,
        may be left out where there is no padding. `cache`: an `EncoderDecoderCache`, added to.
        """
        tokens = input_ids.shape[1]
        before = 0 if cache is None else cache.get_seq_length()
        check_target_length(self.config, before + tokens)
        in_place = cache.self_attention_cache if isinstance(cache, StepCache) else None
        if in_place is not None:
            position_ids, visible = in_place.take(tokens)
        else:
            position_ids = torch.arange(before, before + tokens, device=input_ids.device)[None]
            visible = _visible(target_mask, before, position_ids[0])
        hidden = self.embeddings(self.embeddings.look_up(input_ids), position_ids)
        if source_mask is not None:
            # Whoever may see nothing would get NaN from some of PyTorch's kernels.
            source_mask = (source_mask | ~source_mask.any(dim=1, keepdim=True))[:, None, None]
        about = source, visible, source_mask
        states = (hidden,)
        for block in cast("list[CrossBlock]", self.layers):
            if self.gradient_checkpointing and self.training:
                recompute = cast(Any, self)._gradient_checkpointing_func
                hidden = recompute(block.__call__, hidden, *about)
            else:
                hidden = block(hidden, *about, cache)
            states = (*states, hidden)
        if in_place is not None:
            in_place.advance(tokens)
        return states if self.norm is None else (*states[:-1], self.norm(hidden))


def _visible(real: Tensor | None, before: int, position_ids: Tensor) -> Tensor | None:
    """[batch or 1, 1, tokens, before + tokens]: each token, and those that precede it; None where
    PyTorch's own causal mask, or none at all, says the same."""
    tokens = position_ids.shape[0]
    if real is None and (before == 0 or tokens == 1):
        return None
    place = torch.arange(before + tokens, device=position_ids.device)
    seen = (place <= position_ids[:, None])[None, None]
    if real is None:
        return seen
    # Padding sees itself, so that no row is empty.
    return (seen & real[:, None, None]) | (place == position_ids[:, None])


class LongspanForConditionalGeneration(LongspanPreTrainedModel, GenerationMixin):
    """Reads a document through windows and global tokens, and writes a text about it: LED.

    The first token is global unless a mask or `config.global_preset` says otherwise. `generate` is
    transformers' own and takes the same masks; on a GPU its steps are captured as a CUDA graph
    unless `capture_steps` is set to False.
    """

    capture_steps: bool = True

    config_class = LongspanSeq2SeqConfig
    config: LongspanSeq2SeqConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    head_may_be_new = False
    _no_split_modules = ["Block", "CrossBlock"]  # noqa: RUF012 (as the base class declares it)
    _tied_weights_keys = {  # noqa: RUF012
        "decoder.embeddings.words.weight": "encoder.embeddings.words.weight",
        "lm_head.weight": "encoder.embeddings.words.weight",
    }

    def __init__(self, config: LongspanSeq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder = SourceEncoder(config)
        self.decoder = TargetDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # As BART has it: added to the scores, not trained.
        self.register_buffer("final_logits_bias", torch.zeros(1, config.vocab_size))
        self.final_logits_bias: Tensor
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embeddings.words

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embeddings.words = cast(nn.Embedding, value)
        if self.config.tie_word_embeddings:
            self.decoder.embeddings.words = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        """As in transformers; new words have no bias."""
        made = super().resize_token_embeddings(*arguments, **options)
        bias = self.final_logits_bias.new_zeros(1, self.config.vocab_size)
        kept = min(bias.shape[1], self.final_logits_bias.shape[1])
        bias[:, :kept] = self.final_logits_bias[:, :kept]
        self.final_logits_bias = bias
        return made

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder is given to predict `labels`: collators of transformers ask for it."""
        return shift_right(self.config, labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        global_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        max_global_tokens: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> LongspanSeq2SeqOutput:
        """Scores [batch, target, words] of the token after each of the target.

        Args:
            input_ids, attention_mask, global_attention_mask, inputs_embeds, max_global_tokens:
                the document, as `LongspanModel` takes it; or `encoder_outputs` made of it before,
                with its `attention_mask`. Of these, each may have several targets in a row.
            decoder_input_ids: [batch, target], behind what `past_key_values` holds; made from the
                labels if left out.
            decoder_attention_mask: [batch, held + target], 1 = token, 0 = padding.
            labels: [batch, target], -100 where nothing is asked; gives the loss.
            past_key_values: an `EncoderDecoderCache` that grows, as `generate` makes it.
            output_attentions: the encoder's weights, as `AttentionMap`s.
        """
        if labels is not None:
            check_labels(self.config, labels)
            if decoder_input_ids is None:
                decoder_input_ids = shift_right(self.config, labels)
        target = check_decoder_input(self.config, decoder_input_ids, labels)
        several = 1
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids,
                attention_mask,
                global_attention_mask,
                inputs_embeds,
                max_global_tokens,
                output_hidden_states,
                output_attentions,
            )
        else:
            several = max(1, target.shape[0] // encoder_outputs[0].shape[0])
        encoded = encoder_outputs
        if not isinstance(encoded, LongspanOutput):
            encoded = LongspanOutput(last_hidden_state=cast(Any, encoded[0]))
        source = cast(Tensor, encoded.last_hidden_state)
        if source.shape[0] * several != target.shape[0]:
            raise ValueError(f"{source.shape[0]} documents, but {target.shape[0]} targets")

        cache = self._cache(past_key_values, use_cache, labels)
        held = 0 if cache is None else cache.get_seq_length()
        in_place = isinstance(cache, StepCache)
        if in_place and held:
            source_mask = cache.source_mask
        else:
            source_mask = as_bool("attention_mask", attention_mask, source)
            check_documents(source_mask, None)
            if in_place:
                cache.source_mask = source_mask
        whole = target.new_empty(0).expand(target.shape[0], held + target.shape[1], 0)
        target_mask = as_bool("decoder_attention_mask", decoder_attention_mask, whole)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: tuple[Tensor, ...] = ()

        def write(target: Tensor) -> Tensor:
            nonlocal states
            states = self.decoder(
                target, source, target_mask=target_mask, source_mask=source_mask, cache=cache
            )
            return self.lm_head(states[-1]) + self.final_logits_bias

        if in_place and target.shape[1] == 1 and not output_hidden_states:
            logits = cache.step(write, target)
        else:
            logits = write(target)
        loss: Any = None
        if labels is not None:
            loss = cross_entropy(
                logits.flatten(0, 1),
                labels.to(logits.device).flatten(),
                label_smoothing=self.config.label_smoothing,
            )
        return LongspanSeq2SeqOutput(
            loss=loss,
            logits=cast(Any, logits),
            past_key_values=cache,
            decoder_hidden_states=states if output_hidden_states else None,
            encoder_last_hidden_state=cast(Any, source),
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
            global_attention_mask=encoded.global_attention_mask,
        )

    def _cache(self, given: Any, use: bool | None, labels: Tensor | None) -> Any:
        """What the target's and the source's keys and values are kept in, if they are."""
        recomputing = self.decoder.gradient_checkpointing and self.training
        use = self.config.use_cache and labels is None if use is None else use
        if given is None:
            if not use or recomputing:
                return None
            return EncoderDecoderCache(DynamicCache(), DynamicCache())
        if not isinstance(given, EncoderDecoderCache) or given.is_compileable:
            raise TypeError(
                f"past_key_values must be an EncoderDecoderCache that grows, got {given!r}: leave "
                "cache_implementation out"
            )
        return given

    def _expand_inputs_for_generation(self, *arguments: Any, **options: Any) -> Any:
        """Of what `generate` has, repeated for each beam: the target alone. All beams of a document
        read it where it is, and a mask that hides nothing is left out."""
        names = ("encoder_outputs", "attention_mask", "global_attention_mask")
        source = {name: options.pop(name) for name in names if name in options}
        mask = source.get("attention_mask")
        if mask is not None:
            # This looks at the mask, which waits for a GPU, but only once in a text.
            check_documents(mask.bool().cpu(), None)
            source["attention_mask"] = None if bool((mask != 0).all()) else mask
        own: Any = super()  # whose protocol for mixins no model of transformers fulfils
        options["is_encoder_decoder"] = False
        target, expanded = own._expand_inputs_for_generation(*arguments, **options)
        return target, expanded | source

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: Any,
        generation_mode: Any,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        # Before the first token is generated, not at the one that has no position.
        check_target_length(self.config, generation_config.max_length - 1)
        if generation_config.guidance_scale not in (None, 1):
            raise ValueError(
                f"guidance_scale={generation_config.guidance_scale}: transformers compares with a "
                "text without its prompt, which an encoder-decoder has not; leave it out"
            )
        plain = (
            generation_mode in _STEPWISE
            and generation_config.use_cache is not False
            and generation_config.cache_implementation is None
            and model_kwargs.get("past_key_values") is None
            and model_kwargs.get("decoder_attention_mask") is None
        )
        if plain:
            # Weights that are spread over devices are fetched on the way, which no graph can do.
            spread = len(set(getattr(self, "hf_device_map", {}).values())) > 1
            model_kwargs["past_key_values"] = StepCache(
                len(self.decoder.layers),
                generation_config.max_length,
                self.device,
                capture=self.capture_steps and not self.training and not spread,
            )
            return
        own: Any = super()
        own._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, *arguments, **options
        )

    def _reorder_cache(self, past_key_values: Any, beam_idx: Tensor) -> Any:
        """Beams change places within their document only, and all of one document see the same
        source: of the two caches only the target's, which is short, is copied."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values
