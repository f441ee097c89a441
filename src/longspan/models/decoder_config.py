"""What a longspan decoder is: sizes, and one causal attention setting per layer."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from longspan.layers.causal import CausalAttention
from longspan.layers.registry import build_causal_attention
from longspan.models.settings import per_layer, try_out

NORMS = ("layer", "rms", "unit")


class LongspanDecoderConfig(PreTrainedConfig):
    """Configuration of `LongspanForCausalLM`. The defaults are a small model of bytes.

    Args:
        attention: how layers attend: one setting for all, or one per layer. A setting names the
            layer's "kind" ("window" if absent; "xl", "compressive", "full") and its options, for
            windows `left`, `dilation` and `position`; see the layers themselves.
        norm: "layer", "rms", or "unit", which is "rms" without weights: the projection behind it
            can learn them too, and their gradient need not be computed.
        pre_norm: norms before attention and feed-forward, and one at the end; False puts them
            behind, as in Transformer-XL.
        embedding_scale: multiply embeddings by sqrt(hidden_size), as in Transformer-XL.
        attention_bias, feed_forward_bias: whether these projections have one.
        activation_dropout: inside the feed-forward part; None = `hidden_dropout_prob`.
        half_residual: under autocast, add layers up in half precision rather than in float32.
        reversible: layers are computed back from the last one's output while training, so that
            memory does not grow with their number, see `layers/reversible.py`. It needs norms in
            front, and sums in float32.
    """

    model_type = "longspan_decoder"

    vocab_size: int = 256
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    attention: Any = None
    hidden_act: str = "gelu"
    norm: str = "layer"
    pre_norm: bool = True
    embedding_scale: bool = False
    attention_bias: bool = False
    feed_forward_bias: bool = True
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    activation_dropout: float | None = None
    half_residual: bool = False
    reversible: bool = False
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.activation_dropout is None:
            self.activation_dropout = self.hidden_dropout_prob
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is not an activation")
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm!r} is unknown; choose from {', '.join(NORMS)}")
        if self.reversible and not self.pre_norm:
            raise ValueError("reversible=True needs pre_norm=True: norms stand inside its halves")
        if self.reversible and self.half_residual:
            raise ValueError(
                "reversible=True needs half_residual=False: what is added up in half precision "
                "cannot be computed back"
            )
        self.attention = self._per_layer(self.attention)
        super().__post_init__(**kwargs)

    def _per_layer(self, given: Any) -> list[dict[str, Any]]:
        """One setting per layer, each tried out on a layer without memory."""
        given = {"left": 256} if given is None else given
        given = per_layer(given, self.num_hidden_layers)
        settings = [{"kind": "window", **one} for one in given]
        try_out(settings, self.build_attention)
        return settings

    def build_attention(self, setting: Mapping[str, Any]) -> CausalAttention:
        """A layer's attention, of this model's size."""
        return build_causal_attention(
            self.hidden_size,
            self.num_attention_heads,
            setting,
            dropout=self.attention_probs_dropout_prob,
            bias=self.attention_bias,
        )
