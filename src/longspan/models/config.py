"""What a longspan encoder is: sizes, and one attention setting per layer."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from longspan.layers.base import AttentionLayer
from longspan.layers.registry import build_attention
from longspan.models.settings import per_layer, try_out

POSITIONS = ("learned", "sinusoidal", "rotary")
POOLING = ("first", "mean")
PRESETS = ("none", "first", "question", "candidates")  # of global tokens
QUANTIZED = (None, "int8")


class LongspanConfig(PreTrainedConfig):
    """Configuration of `LongspanModel` and its heads.

    Args:
        attention: how layers attend: one setting for all, or one per layer. A setting names the
            layer's "kind" ("window" if absent) and its options, for windows `window`, `dilation`
            (one number, or one per head), `global_tokens`, `separate_global`, `backend` (see
            `set_backend`) and, with rotary positions, the base of the `rotary` (10,000 if absent).
        restored_layers: if layers of kind "funnel" shorten a document, as many of the last layers
            read all of its tokens again: what became of a pool is repeated for its tokens, and
            what they were before the first pooling is added. With 0 that is done at the very end.
        embedding_size: of the embeddings where it differs from `hidden_size`, as in ELECTRA.
        type_vocab_size: 0 for no token types at all.
        position: "learned", "sinusoidal", or "rotary": queries and keys are turned by their
            positions inside the attention, and global tokens share the projections of all others.
        max_position_embeddings: rows of the learned table, reserved ones included; the same number
            limits rotary positions, which have no table.
        position_offset: reserved rows at its front. With any, padding takes the last of them and
            is not counted (RoBERTa, Longformer); with none, every place counts (BERT).
        max_global_tokens: room for global tokens per row; needed by `torch.compile`, and spares
            a GPU the wait for their number. None reads the number from each batch.
        global_preset: which tokens a head makes global when it is given no mask: "none", "first",
            "question" (all before the first separator) or "candidates" (all behind the
            separators that end the first text); None leaves it to the task.
        norm_first, gated, bias: of the blocks, see `Block`; without `bias` neither they nor the
            heads have any but behind their last layer. With `norm_first` a last norm follows.
        first_norm: with `norm_first`, the first layer too has a norm before its attention, though
            the embeddings are normed (mBART); ModernBERT has none there.
        reversible: with `norm_first`, layers are computed back from the last one's output while
            training, so that memory does not grow with their number, see `layers/reversible.py`.
        embedding_scale: multiply words by sqrt(hidden_size), as mBART does.
        activation_dropout: inside the feed-forward part.
        pooler: whether the bare model has BERT's pooler on its first token.
        lm_act, classifier_act: inside the heads for masked tokens and for whole documents.
        classifier_norm: every head begins with a layer, `classifier_act` and a norm, as ModernBERT
            has it.
        classifier_pooling: what a document's scores come from: its "first" token, or the "mean".
        classifier_dropout: in the heads; None takes `hidden_dropout_prob`.
        quantize: "int8" keeps the weights of the layers as int8, for inference on a CPU; see
            `longspan.quantize`, which makes such a model.
    """

    model_type = "longspan"
    # Trainer would otherwise gather the masks of an evaluation together with its predictions. It
    # adds to this list, so a tuple will not do.
    keys_to_ignore_at_inference = ["global_attention_mask"]  # noqa: RUF012

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    embedding_size: int | None = None
    attention: Any = None
    restored_layers: int = 0
    norm_first: bool = False
    first_norm: bool = False
    reversible: bool = False
    gated: bool = False
    bias: bool = True
    hidden_act: str = "gelu"
    lm_act: str = "gelu"
    classifier_act: str = "tanh"
    classifier_norm: bool = False
    classifier_pooling: str = "first"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    activation_dropout: float = 0.0
    classifier_dropout: float | None = None
    position: str = "learned"
    max_position_embeddings: int = 4098
    position_offset: int = 2
    type_vocab_size: int = 1
    embedding_scale: bool = False
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_global_tokens: int | None = None
    global_preset: str | None = None
    pooler: bool = True
    quantize: str | None = None
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | None = 2
    sep_token_id: int | None = 2
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.embedding_size = self.embedding_size or self.hidden_size
        if self.classifier_dropout is None:
            self.classifier_dropout = self.hidden_dropout_prob
        self._check_numbers()
        self.attention = self._per_layer(self.attention)
        self.check_quantize()
        super().__post_init__(**kwargs)

    @property
    def longest(self) -> int | None:
        """The longest document there are positions for; None = any length."""
        if self.position == "sinusoidal":
            return None
        return self.max_position_embeddings - self.position_offset

    def _check_numbers(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("hidden_act", "lm_act", "classifier_act"):
            if getattr(self, name) not in ACT2FN:
                raise ValueError(f"{name}={getattr(self, name)!r} is not an activation")
        for name in (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "activation_dropout",
            "classifier_dropout",
        ):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        for name, known in (
            ("position", POSITIONS),
            ("classifier_pooling", POOLING),
            ("global_preset", (None, *PRESETS)),
            ("quantize", QUANTIZED),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; choose from "
                    f"{', '.join(map(str, known))}"
                )
        if self.position_offset < 0 or (self.longest is not None and self.longest < 1):
            raise ValueError(
                f"max_position_embeddings={self.max_position_embeddings} leaves no position "
                f"behind the position_offset={self.position_offset} reserved rows"
            )
        if self.reversible and not self.norm_first:
            raise ValueError("reversible=True needs norm_first=True: norms stand inside its halves")
        if self.max_global_tokens is not None and self.max_global_tokens < 0:
            raise ValueError(f"max_global_tokens={self.max_global_tokens} must not be negative")

    def check_quantize(self) -> None:
        # Other kinds may share projections between layers, behind the back of who replaces them.
        others = {one["kind"] for one in self.attention} - {"window"}
        if self.quantize is not None and others:
            raise ValueError(
                f"quantize={self.quantize!r} is for layers of windows; here are "
                f"{', '.join(sorted(others))}"
            )

    def _per_layer(self, given: Any) -> list[dict[str, Any]]:
        """One setting per layer, each tried out on a layer without memory."""
        given = {"window": 512} if given is None else given
        rotary = {"rotary": 10_000.0} if self.position == "rotary" else {}
        given = per_layer(given, self.num_hidden_layers)
        settings = [{"kind": "window", **rotary, **one} for one in given]
        try_out(settings, self.build_attention)
        last = self.num_hidden_layers - self.restored_layers
        if not 0 < last <= self.num_hidden_layers:
            raise ValueError(
                f"restored_layers={self.restored_layers} must be from 0 to "
                f"{self.num_hidden_layers - 1}, one less than there are layers"
            )
        for layer, setting in enumerate(settings):
            with torch.device("meta"):
                shorter = self.build_attention(setting).shortens > 1
            if shorter and self.reversible:
                raise ValueError(
                    f"layer {layer} makes documents shorter, which cannot be computed back: "
                    "reversible=True needs layers that keep their length"
                )
            if shorter and layer >= last:
                raise ValueError(
                    f"layer {layer} makes documents shorter, but restored_layers="
                    f"{self.restored_layers} wants it to read all tokens"
                )
        return settings

    def build_attention(self, setting: Mapping[str, Any]) -> AttentionLayer:
        """A layer's attention, of this model's size."""
        if (self.position == "rotary") != (setting.get("rotary") is not None):
            raise ValueError(
                f"rotary={setting.get('rotary')!r} does not go with position={self.position!r}"
            )
        return build_attention(
            self.hidden_size,
            self.num_attention_heads,
            setting,
            dropout=self.attention_probs_dropout_prob,
            bias=self.bias,
        )
