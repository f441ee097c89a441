"""The encoder: ids to hidden states, any length, padded or packed."""

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils.generic import can_return_tuple

from longspan.layers.block import Block
from longspan.layers.position import sinusoids, tile_positions
from longspan.layers.quantized import quantize_layers
from longspan.layers.reversible import encode
from longspan.layers.window import WindowAttention
from longspan.models.config import LongspanConfig
from longspan.models.inputs import (
    as_bool,
    check_documents,
    check_length,
    check_positions,
    check_shape,
    check_tokens,
    check_types,
    readable,
    whole,
)
from longspan.models.loading import (
    load_weights,
    read_own,
    refuse_missing,
    refuse_stray,
    refuse_surplus,
    shortest,
    tell_new,
)
from longspan.models.outputs import LongspanOutput
from longspan.ops import global_positions
from longspan.ops.shorten import Pools, shorten
from longspan.ops.window import Visibility, visibility
from longspan.ops.window.api import BACKENDS
from longspan.ops.window.pattern import check_masks


class Embeddings(nn.Module):
    """Words, and positions and token types where there are any, added and normalised."""

    def __init__(self, config: LongspanConfig, rows: int | None = None) -> None:
        """`rows` of the learned table, if not those the config has for an encoder."""
        super().__init__()
        size = config.embedding_size
        assert size is not None  # the config fills it in
        self.scale = math.sqrt(config.hidden_size) if config.embedding_scale else None
        self.words = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.positions = None
        if config.position == "learned":
            last_reserved = config.position_offset - 1 if config.position_offset else None
            rows = rows or config.max_position_embeddings
            self.positions = nn.Embedding(rows, size, padding_idx=last_reserved)
        types = config.type_vocab_size
        self.types = nn.Embedding(types, size) if types else None
        self.sinusoidal = config.position == "sinusoidal"
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps, bias=config.bias)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.project = None
        if size != config.hidden_size:
            self.project = nn.Linear(size, config.hidden_size, bias=config.bias)

    def look_up(self, input_ids: Tensor) -> Tensor:
        words = self.words(input_ids)
        return words if self.scale is None else words * self.scale

    def forward(
        self, words: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        hidden = words
        if self.positions is not None:
            hidden = hidden + self.positions(position_ids)
        elif self.sinusoidal:
            hidden = hidden + sinusoids(position_ids, words.shape[-1], words.dtype)
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


def mean_tokens(hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """[batch, tokens, dim] -> [documents, dim], the mean over each document's tokens."""
    batch, tokens, dim = hidden.shape
    # Half precision can neither count nor add up thousands of tokens.
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    real = wide.new_ones(batch, tokens, 1)
    if attention_mask is not None:
        real = real * (attention_mask != 0)[..., None]
    sums = torch.cat((wide * real, real), dim=-1)
    if cu_seqlens is None:
        sums = sums.sum(dim=1)
    else:
        bounds = cu_seqlens.to(hidden.device)
        place = torch.arange(tokens, device=hidden.device, dtype=bounds.dtype)
        # Tokens outside all documents share one row more, behind the others.
        document = (torch.searchsorted(bounds, place, right=True) - 1) % bounds.shape[0]
        sums = sums.new_zeros(bounds.shape[0], dim + 1).index_add(0, document, sums[0])[:-1]
    return (sums[:, :-1] / sums[:, -1:].clamp(min=1)).to(hidden.dtype)


def _restored(hidden: Tensor, shortened: list[Pools], before: Any) -> Any:
    """As many tokens as there were, each with what became of its pool added to what it was."""
    for pools in reversed(shortened):
        hidden = pools.spread(hidden)
    return before + hidden


class LongspanPreTrainedModel(PreTrainedModel):
    """What the encoder and its heads share."""

    config_class = LongspanConfig
    config: LongspanConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the base class declares it)
    # Losses are means over the batch; Trainer scales them when it accumulates gradients.
    accepts_loss_kwargs = False
    # Whether a checkpoint may lack all but the encoder: a head for a task begins anew.
    head_may_be_new: ClassVar[bool] = True

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any
    ) -> Any:
        """As in transformers, but for safetensors alone, and whole: the head of another task may be
        new, and is then named in a warning; an encoder that lacks weights or has layers left over
        is refused, and so is any weight more or less in what this very class has saved."""
        source = pretrained_model_name_or_path
        if options.get("state_dict") is not None or source is None:
            return super().from_pretrained(source, *arguments, **options)
        if options.pop("use_safetensors", None) is False:
            raise ValueError("use_safetensors=False: pickled weights can run code; none are read")
        known = read_own(source, cls.__name__, **options)
        tell = options.pop("output_loading_info", False)
        model, info = load_weights(super().from_pretrained, source, *arguments, **options)
        changed = options.keys() & model.config.to_dict().keys() - {"dtype", "torch_dtype"}
        same = (known.get("architectures") or [None])[0] == cls.__name__ and not changed
        prefix = f"{cls.base_model_prefix}."
        head_may_be_new = cls.head_may_be_new and not same
        missing = info["missing_keys"]
        pooler = {name for name in model.state_dict() if "pooler." in name}
        # Many encoders were saved without a pooler, none with half of one.
        may_lack = pooler if pooler <= set(missing) else set()
        refuse_missing(
            source,
            cls.__name__,
            (
                name
                for name in missing
                if (name.startswith(prefix) or not head_may_be_new) and name not in may_lack
            ),
        )
        refuse_surplus(source, cls.__name__, info["unexpected_keys"])
        if same:
            refuse_stray(source, cls.__name__, info["unexpected_keys"])
        tell_new(source, cls.__name__, missing)
        if model.config.quantize is not None:
            model.base_model.requires_grad_(False)  # loading makes new parameters
        return (model, info) if tell else model

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        """As in transformers. What of an int8 model is not int8 takes no more room in the file than
        it took before; loading makes float32 of it again, which CPUs are fastest with."""
        if self.config.quantize is not None and not arguments and "state_dict" not in options:
            options["state_dict"] = shortest(self.state_dict())
        super().save_pretrained(save_directory, *arguments, **options)

    def initialize_weights(self) -> None:
        """As transformers does it; then the global projections start as copies of the local."""
        super().initialize_weights()
        for module in self.modules():
            if isinstance(module, WindowAttention) and module.qkv_global is not None:
                # Unlike `copy_global`, this leaves alone what came from a checkpoint.
                for name, copied in module.qkv_global.named_parameters():
                    init.copy_(copied, module.qkv.get_parameter(name))

    def set_backend(self, backend: str) -> None:
        """What computes the windows of all layers, see `window_attention`; "auto" unless the config
        says otherwise, which stays as it is: the choice is not saved with the weights.

        "chunks" makes everything that is not packed as transformers' Longformer makes it, padding
        to whole windows included: in float32 on a CPU the same to the last digit, and as slow.
        """
        known = ("auto", *(one.name for one in BACKENDS))
        if backend not in known:
            raise ValueError(f"backend={backend!r} is unknown; choose from {', '.join(known)}")
        blocks: Any = cast(LongspanModel, self.base_model).layers
        having = [block.attention for block in blocks if hasattr(block.attention, "backend")]
        if not having:
            raise ValueError(f"backend={backend!r} is for windows, and no layer here has any")
        for layer in having:
            layer.backend = backend
        if backend == "chunks":
            # MKL rounds products of a single row by where the weight begins in memory: where torch
            # has put it, or, if it still lies in a file, anywhere.
            for parameter in self.parameters():
                if parameter.device.type == "cpu" and parameter.data_ptr() % 64:
                    parameter.data = parameter.data.clone()

    def extend_positions(self, length: int) -> None:
        """Make room for documents of `length` tokens.

        Learned positions are repeated: a starting point that a little finetuning improves. Rotary
        ones have nothing to repeat, only their limit rises: a window never spans more distance
        than before, and just the global tokens look further than they were trained to. Sinusoidal
        positions reach any length as they are.
        """
        config, length = self.config, whole("length", length)
        if config.longest is None or length == config.longest:
            return
        table = cast(LongspanModel, self.base_model).embeddings.positions
        if length < config.longest:
            raise ValueError(
                f"cannot make {config.longest} positions {length}: positions are only ever added"
            )
        config.max_position_embeddings = config.position_offset + length
        if table is not None:
            grown = tile_positions(table.weight.detach(), config.position_offset, length)
            table.weight = nn.Parameter(grown, requires_grad=table.weight.requires_grad)
            table.num_embeddings = grown.shape[0]


class LongspanModel(LongspanPreTrainedModel):
    """Encoder of whole documents, called as transformers' encoders are.

    Args:
        add_pooling_layer: None follows the config.
    """

    head_may_be_new = False

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
                inner_dropout=config.activation_dropout,
                norm_first=config.norm_first,
                normed=layer == 0 and not config.first_norm,  # by the embeddings
                gated=config.gated,
                bias=config.bias,
            )
            for layer, setting in enumerate(config.attention)
        )
        attention = [block.attention for block in cast("list[Block]", self.layers)]
        for layer, one in enumerate(attention):
            one.follow(attention[:layer])
        self.norm = None
        if config.norm_first:
            self.norm = nn.LayerNorm(
                config.hidden_size, eps=config.layer_norm_eps, bias=config.bias
            )
        pooled = config.pooler if add_pooling_layer is None else add_pooling_layer
        self.pooler = Pooler(config) if pooled else None
        self.gradient_checkpointing = False
        if config.quantize is not None:
            quantize_layers(self.layers)
            self.requires_grad_(False)
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
            token_type_ids, position_ids: [batch, tokens]; positions as rows of the table, or
                [1, tokens] for all documents alike.
            cu_seqlens: [documents + 1] boundaries of documents packed into a single row, whose
                positions count from the beginning of each. Poolers return one row per document.
            max_global_tokens: most global tokens in any row, see `LongspanConfig`.
            output_hidden_states: also return those of each layer, of fewer tokens where layers made
                the document shorter.
            output_attentions: also return each layer's weights, computed once more for that, as
                an `AttentionMap` of a band, columns and rows; n x n weights are never formed.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        given = check_tokens(self.config, input_ids, inputs_embeds)
        if isinstance(position_ids, Tensor) and position_ids.shape == (1, given.shape[1]):
            position_ids = position_ids.expand(given.shape[:2])
        tokens_mask = as_bool("attention_mask", attention_mask, given)
        global_mask = as_bool("global_attention_mask", global_attention_mask, given)
        for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            check_shape(name, ids, given)
        check_masks(given, attention_mask=None, global_mask=None, cu_seqlens=cu_seqlens)
        check_documents(tokens_mask, cu_seqlens)
        check_types(self.config, token_type_ids)
        if global_mask is not None and tokens_mask is not None:
            global_mask = global_mask & tokens_mask
        most = self.config.max_global_tokens if max_global_tokens is None else max_global_tokens
        asked = most, bool(output_attentions)
        seen, places = self._describe(given, tokens_mask, global_mask, cu_seqlens, *asked)
        if position_ids is None:
            check_length(self.config, given.shape[1], cu_seqlens)
            position_ids = self._position_ids(input_ids, given, seen, cu_seqlens)
        else:
            check_positions(self.config, position_ids)

        words = given if input_ids is None else self.embeddings.look_up(input_ids)
        hidden: Any = self.embeddings(words, position_ids, token_type_ids)
        tokens, window = hidden.shape[1], self._whole_window() if cu_seqlens is None else None
        if window is not None:
            # Nobody sees what is added, but sums over more tokens, and over more room for global
            # ones than they take, may be rounded otherwise.
            extra = 0, -tokens % window
            hidden, position_ids = pad(hidden, (0, 0, *extra)), pad(position_ids, extra)
            real = torch.ones_like(hidden[:, :tokens, 0], dtype=torch.bool)
            real = pad(real if tokens_mask is None else tokens_mask, extra)
            chosen = None if global_mask is None else pad(global_mask, extra)
            room = None if readable(hidden) else most
            seen, places = self._describe(hidden, real, chosen, None, room, asked[1])
        whole = seen, places, position_ids
        states, maps = (hidden,), ()
        shortened: list[Pools] = []
        before = hidden  # what it was before it was made shorter
        blocks = cast("list[Block]", self.layers)
        if self.config.reversible:
            if output_hidden_states or output_attentions:
                raise ValueError(
                    "a reversible model keeps nothing of the layers on the way: call it without "
                    "output_hidden_states and output_attentions"
                )
            hidden, blocks = encode([*blocks], hidden, *whole), []
        for layer, block in enumerate(blocks):
            if shortened and layer == len(self.layers) - self.config.restored_layers:
                hidden, shortened = _restored(hidden, shortened, before), []
                seen, places, position_ids = whole
            if output_attentions:
                described = {"seen": seen, "positions": places, "position_ids": position_ids}
                maps = (*maps, block.attention.map(block.attention_input(hidden), **described))
            pools = None
            if block.attention.shortens > 1:
                pools = shorten(hidden, seen, block.attention.shortens)
                before = before if shortened else hidden
                shortened.append(pools)
            about = seen, places, position_ids, pools
            if self.gradient_checkpointing and self.training:
                hidden = self._gradient_checkpointing_func(block.__call__, hidden, *about)
            else:
                hidden = block(hidden, *about)
            if pools is not None:
                seen, places = self._describe_pools(hidden, pools, seen, *asked)
                position_ids = pools.earliest(position_ids)
            if output_hidden_states:
                states = (*states, hidden)
        if shortened:
            hidden = _restored(hidden, shortened, before)
            states = (*states[:-1], hidden)
        if self.norm is not None:
            hidden = self.norm(hidden)
            states = (*states[:-1], hidden)
        if window is not None:
            hidden, maps = hidden[:, :tokens], tuple(one.cut(tokens) for one in maps)
            states = tuple(one[:, :tokens] for one in states)
        return LongspanOutput(
            last_hidden_state=hidden,
            pooler_output=None if self.pooler is None else self.pooler(hidden, cu_seqlens),
            hidden_states=states if output_hidden_states else None,
            attentions=cast(Any, maps) if output_attentions else None,
            global_attention_mask=global_mask,
        )

    def _whole_window(self) -> int | None:
        """What transformers would pad to a multiple of, if all layers are to round as it does."""
        windows = [block.attention.whole_window for block in cast("list[Block]", self.layers)]
        known = [window for window in windows if window is not None]
        return max(known) if len(known) == len(windows) else None

    def _describe(
        self,
        given: Tensor,
        tokens_mask: Tensor | None,
        global_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        most: int | None,
        listed: bool,
    ) -> tuple[Visibility, Tensor | None]:
        """What all layers need to know of the masks: who sees whom, and where global tokens are,
        if that shall be `listed` or a layer needs it."""
        places = None
        blocks = cast("list[Block]", self.layers)
        listed = listed or any(block.attention.needs_positions for block in blocks)
        if global_mask is not None and listed:
            if most is None and torch.compiler.is_compiling():
                raise ValueError(
                    "a compiled model needs to know how many global tokens a row has at most: "
                    "give max_global_tokens, or set it in the config"
                )
            places = global_positions(global_mask, most)
            if places.shape[1] == 0:
                global_mask = places = None
        seen = visibility(
            given, attention_mask=tokens_mask, global_mask=global_mask, cu_seqlens=cu_seqlens
        )
        return seen, places

    def _describe_pools(
        self,
        coarse: Tensor,
        pools: Pools,
        seen: Visibility,
        most: int | None,
        listed: bool,
    ) -> tuple[Visibility, Tensor | None]:
        """The same for a batch made shorter."""
        valid, chosen = (
            None if m is None else pools.any(m) for m in (seen.valid(), seen.is_global())
        )
        return self._describe(coarse, valid, chosen, pools.bounds, most, listed)

    def _position_ids(
        self,
        input_ids: Tensor | None,
        given: Tensor,
        seen: Visibility,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """[batch, tokens]: counted from the beginning of each document, behind reserved rows."""
        batch, tokens = given.shape[:2]
        offset, padding = self.config.position_offset, self.config.pad_token_id
        place = torch.arange(tokens, device=given.device)
        if cu_seqlens is not None:
            assert seen.start is not None
            assert seen.stop is not None
            return torch.where(seen.stop > 0, place - seen.start, 0) + offset
        if offset > 0 and padding is not None and input_ids is not None:
            real = input_ids != padding
            return real.cumsum(dim=1) * real + (offset - 1)
        return (place + offset).expand(batch, tokens)
