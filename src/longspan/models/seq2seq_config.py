"""What a longspan encoder-decoder is: an encoder as `LongspanConfig` has it, and a decoder."""

from typing import Any

from longspan.models.config import LongspanConfig

# What an encoder may be and an encoder-decoder is not: setting, what it has to be.
_FIXED = (
    ("position", "learned"),
    ("position_offset", 0),
    ("gated", False),
    ("pooler", False),
    ("quantize", None),
)


class LongspanSeq2SeqConfig(LongspanConfig):
    """Configuration of `LongspanForConditionalGeneration`. The defaults are LED's base size.

    Settings of `LongspanConfig` are the encoder's; sizes, norms, activation and dropout of the
    decoder are the same unless they stand here.

    Args:
        decoder_layers, decoder_attention_heads, decoder_intermediate_size: None = the encoder's.
        decoder_positions: the longest target.
        decoder_start_token_id: what a target is begun with.
        wrap_target: a target is begun with its own last token instead, which in mBART names its
            language.
        label_smoothing: how much of the loss asks for all words alike.
    """

    model_type = "longspan_seq2seq"
    keys_to_ignore_at_inference = ["past_key_values", "global_attention_mask"]  # noqa: RUF012

    num_hidden_layers: int = 6
    max_position_embeddings: int = 16384
    position_offset: int = 0
    type_vocab_size: int = 0
    pooler: bool = False
    attention_probs_dropout_prob: float = 0.0
    decoder_layers: int | None = None
    decoder_attention_heads: int | None = None
    decoder_intermediate_size: int | None = None
    decoder_positions: int = 1024
    decoder_start_token_id: int | None = 2
    wrap_target: bool = False
    label_smoothing: float = 0.0
    is_encoder_decoder: bool = True
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.attention = {"window": 1024} if self.attention is None else self.attention
        self.decoder_layers = self.decoder_layers or self.num_hidden_layers
        self.decoder_attention_heads = self.decoder_attention_heads or self.num_attention_heads
        self.decoder_intermediate_size = self.decoder_intermediate_size or self.intermediate_size
        super().__post_init__(**kwargs)

    def _check_numbers(self) -> None:
        super()._check_numbers()
        for name, wanted in (*_FIXED, ("embedding_size", self.hidden_size)):
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: an encoder-decoder has {name}={wanted!r}"
                )
        for name in ("decoder_layers", "decoder_attention_heads", "decoder_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be in [0, 1)")
        if self.hidden_size % (self.decoder_attention_heads or 1):
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by "
                f"decoder_attention_heads={self.decoder_attention_heads}"
            )
