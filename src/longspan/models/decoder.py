"""The decoder: a language model whose layers attend each in its own way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils.generic import ModelOutput, can_return_tuple

from longspan.layers.causal import Attended, CausalAttention, CausalWindow, RelativePositions
from longspan.layers.decoder_block import DecoderBlock
from longspan.layers.reversible import decode
from longspan.models.decoder_config import LongspanDecoderConfig
from longspan.models.loading import load_weights, read_own, refuse_missing, refuse_stray
from longspan.models.presets import readable
from longspan.models.sampling import Sampler

IGNORED = -100  # a label that is not to be predicted


class DecoderState(NamedTuple):
    """What a decoder knows of the tokens it has read."""

    tokens: int | Tensor  # how many
    layers: tuple[Any, ...]  # each layer's own state


@dataclass
class LongspanCausalLMOutput(ModelOutput):
    """`loss` is the mean over predicted tokens in nats, plus `auxiliary_loss` if there is one."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: DecoderState | None = None
    auxiliary_loss: Tensor | None = None


class LongspanForCausalLM(PreTrainedModel):
    """A language model over long text: bytes by default, any vocabulary by configuration.

    State goes in and comes out: `model(ids, state=state, keep_state=True).state`. The module is
    never changed by a call, and a state may be used again, for another continuation.
    """

    config_class = LongspanDecoderConfig
    config: LongspanDecoderConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012 (as the base class declares it)
    accepts_loss_kwargs = False

    def __init__(self, config: LongspanDecoderConfig) -> None:
        super().__init__(config)
        norms = {
            "layer": nn.LayerNorm,
            "rms": nn.RMSNorm,
            "unit": partial(nn.RMSNorm, elementwise_affine=False),
        }
        norm = partial(norms[config.norm], eps=config.layer_norm_eps)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(
            DecoderBlock(
                config.build_attention(setting),
                config.hidden_size,
                config.intermediate_size,
                activation=ACT2FN[config.hidden_act],
                norm=norm,
                pre_norm=config.pre_norm,
                dropout=config.hidden_dropout_prob,
                activation_dropout=cast(float, config.activation_dropout),
                attention_bias=config.attention_bias,
                feed_forward_bias=config.feed_forward_bias,
            )
            for setting in config.attention
        )
        attention = [cast(CausalAttention, block.attention) for block in self._blocks()]
        for layer, one in enumerate(attention):
            one.follow(attention[:layer])
        self.norm = norm(config.hidden_size) if config.pre_norm else None
        self.output = None
        if not config.tie_word_embeddings:
            self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any
    ) -> Any:
        """As in transformers, but for safetensors alone, and for whole models."""
        source = pretrained_model_name_or_path
        if options.get("state_dict") is not None or source is None:
            return super().from_pretrained(source, *arguments, **options)
        if options.pop("use_safetensors", None) is False:
            raise ValueError("use_safetensors=False: pickled weights can run code; none are read")
        read_own(source, cls.__name__, **options)
        tell = options.pop("output_loading_info", False)
        model, info = load_weights(super().from_pretrained, source, *arguments, **options)
        refuse_missing(source, cls.__name__, info["missing_keys"])
        refuse_stray(source, cls.__name__, info["unexpected_keys"])
        return (model, info) if tell else model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RelativePositions):
            for parameter in (module.content_bias, module.position_bias):
                init.normal_(parameter, std=self.config.initializer_range)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.output  # None: the input's are used again

    def set_windows(self, left: Sequence[int]) -> None:
        """Give each window layer another window, as staged training does between phases."""
        windows = [block.attention for block in self._blocks()]
        if len(left) != len(windows):
            raise ValueError(f"{len(left)} windows for {len(windows)} layers: give one per layer")
        for layer, (attention, steps) in enumerate(zip(windows, left, strict=True)):
            if not isinstance(attention, CausalWindow):
                kind = self.config.attention[layer]["kind"]
                raise ValueError(f"layer {layer} is of kind {kind!r} and has no window to set")
            attention.set_window(steps)
            self.config.attention[layer]["left"] = steps

    def _blocks(self) -> Iterator[DecoderBlock]:
        for block in self.layers:
            yield cast(DecoderBlock, block)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        state: DecoderState | None = None,
        keep_state: bool = False,
    ) -> LongspanCausalLMOutput:
        """Logits [batch, tokens, vocabulary] of the token after each.

        Args:
            input_ids: [batch, tokens]. Pad at the right if at all, and label padding -100: no
                token looks there.
            labels: [batch, tokens], as transformers means it: input_ids themselves, shifted here.
            targets: [batch, tokens], the token after each; for segments of a longer text, whose
                last token has a successor too. -100 is not predicted.
            state: of the tokens before these; None = these are the first.
            keep_state: whether to return the state after them.
        """
        self._check(input_ids, labels, targets, state)
        first = 0 if state is None else state.tokens
        hidden = self.embeddings(input_ids)
        if self.config.embedding_scale:
            hidden = hidden * self.config.hidden_size**0.5
        if self.config.half_residual and torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        hidden = self.dropout(hidden)
        states = [None] * len(self.layers) if state is None else state.layers
        if self.config.reversible:
            hidden, kept, losses = decode([*self._blocks()], hidden, first, states, keep_state)
        else:
            hidden, kept, losses = self._through(hidden, first, states, keep_state)
        if self.norm is not None:
            hidden = self.norm(hidden)
        hidden = self.dropout(hidden)
        if self.output is None:
            logits = linear(hidden, self.embeddings.weight)
        else:
            logits = self.output(hidden)
        if labels is not None:
            targets = pad(labels[:, 1:], (0, 1), value=IGNORED)
        auxiliary = torch.stack(losses).sum() if losses else None
        loss = None
        if targets is not None:
            loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            if auxiliary is not None:
                loss = loss + auxiliary
        after = DecoderState(first + input_ids.shape[1], tuple(kept)) if keep_state else None
        return LongspanCausalLMOutput(loss, cast(Any, logits), after, auxiliary)

    def _through(
        self, hidden: Tensor, first: int | Tensor, states: Sequence[Any], keep_state: bool
    ) -> tuple[Tensor, list[Any], list[Tensor]]:
        """What the layers make of it, each one's next state, and their losses."""
        kept, losses = [], []
        for block, before in zip(self.layers, states, strict=True):
            if self.gradient_checkpointing and self.training:
                done = self._gradient_checkpointing_func(
                    block.__call__, hidden, first, before, keep_state
                )
                done = Attended(*done)  # a reentrant checkpoint makes a plain tuple of it
            else:
                done = block(hidden, first, before, keep_state)
            hidden = done.out
            kept.append(done.state)
            if done.loss is not None:
                losses.append(done.loss)
        return hidden, kept, losses

    @torch.no_grad()
    def stream(
        self, input_ids: Tensor, max_new_tokens: int, sampler: Sampler | None = None
    ) -> Iterator[Tensor]:
        """Continue input_ids [batch, tokens], one [batch] of new tokens after the other.

        What is kept of the text stays as long as the layers' windows and memories, however long
        it gets; "full", "sparse", "bigbird", "reformer" and "routing" layers keep everything.

        Args:
            sampler: how to choose; the likeliest token by default.
        """
        sampler = Sampler() if sampler is None else sampler
        generator = sampler.generator(input_ids.device)
        state, ids = None, input_ids
        for _ in range(max_new_tokens):
            done = self(ids, state=state, keep_state=True)
            # This state is nobody else's, so windows may write the new token over the oldest.
            state = done.state if state is not None else self._rings(done.state)
            chosen = sampler.choose(done.logits[:, -1], generator)
            yield chosen
            ids = chosen[:, None]

    def _rings(self, state: DecoderState) -> DecoderState:
        made = [
            block.attention.ring(own, int(state.tokens))
            if isinstance(block.attention, CausalWindow)
            else own
            for block, own in zip(self._blocks(), state.layers, strict=True)
        ]
        return state._replace(layers=tuple(made))

    def generate(
        self, input_ids: Tensor, max_new_tokens: int = 256, sampler: Sampler | None = None
    ) -> Tensor:
        """[batch, tokens + max_new_tokens]: input_ids and their continuation, see `stream`."""
        new = list(self.stream(input_ids, max_new_tokens, sampler))
        return torch.cat([input_ids, *(chosen[:, None] for chosen in new)], dim=1)

    def _check(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        targets: Tensor | None,
        state: DecoderState | None,
    ) -> None:
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must be [batch, tokens], at least one each, not {[*input_ids.shape]}"
            )
        if labels is not None and targets is not None:
            raise ValueError("give labels (shifted here) or targets (shifted already), not both")
        for name, tensor in (("labels", labels), ("targets", targets)):
            if tensor is not None and tensor.shape != input_ids.shape:
                raise ValueError(
                    f"{name} must be shaped like input_ids, {[*input_ids.shape]}, "
                    f"not {[*tensor.shape]}"
                )
        if state is not None and len(state.layers) != len(self.layers):
            raise ValueError(
                f"a state of {len(state.layers)} layers, but the model has {len(self.layers)}"
            )
        if readable(input_ids):
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"token ids from {low} to {high}, but the vocabulary has ids from 0 to "
                    f"{self.config.vocab_size - 1}"
                )
