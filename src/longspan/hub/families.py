"""Encoders that exist already: how their configs and weights are named, and what ours call them.

Weights are compared by module: `modules()` says for each module of ours which of theirs hold its
weight and bias, in the order in which they are joined. The same table serves both directions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longspan import models

# A head's class name is its family's name and one of these.
HEADS: dict[str, type[models.LongspanPreTrainedModel]] = {
    "Model": models.LongspanModel,
    "ForMaskedLM": models.LongspanForMaskedLM,
    "ForSequenceClassification": models.LongspanForSequenceClassification,
    "ForQuestionAnswering": models.LongspanForQuestionAnswering,
    "ForTokenClassification": models.LongspanForTokenClassification,
    "ForMultipleChoice": models.LongspanForMultipleChoice,
}


@dataclass(frozen=True)
class Family:
    """One architecture of transformers; module names as it has them."""

    name: str  # of its classes
    prefix: str  # of the encoder in a model with a head
    settings: Callable[[Any], dict[str, Any]]  # its config -> what ours needs to know
    # Its config and the window asked for -> how our layers attend.
    attention: Callable[[Any, int], Any] = lambda config, window: {"window": window}
    embeddings: Mapping[str, str] | None = None
    layer: str = "encoder.layer.{}."
    qkv: tuple[str, ...] = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
    block: Mapping[str, str] | None = None
    heads: Mapping[str, Mapping[str, str]] | None = None
    global_suffix: str = ""  # of the global projections; short models copy the local ones
    long: bool = False
    # Heads that are more than one of ours: what is kept of them.
    partial: Mapping[str, str] | None = None


_BLOCK = {
    "project": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
_EMBEDDINGS = {
    "words": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
# In these, "{}" is the prefix of the encoder.
_POOLED = {"classifier.dense": "{}.pooler.dense", "classifier.out": "classifier"}
_SIMPLE = {
    "Model": {},
    "ForQuestionAnswering": {"qa_outputs": "qa_outputs"},
    "ForTokenClassification": {"classifier": "classifier"},
    "ForMultipleChoice": _POOLED,
}
_FIRST_TOKEN = {"classifier.dense": "classifier.dense", "classifier.out": "classifier.out_proj"}
_ROBERTA = _SIMPLE | {
    "ForSequenceClassification": _FIRST_TOKEN,
    "ForMaskedLM": {
        "lm_head.dense": "lm_head.dense",
        "lm_head.norm": "lm_head.layer_norm",
        "lm_head.decoder": "lm_head.decoder",
    },
}
_BERT = _SIMPLE | {
    "ForSequenceClassification": _POOLED,
    "ForMaskedLM": {
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.norm": "cls.predictions.transform.LayerNorm",
        "lm_head.decoder": "cls.predictions.decoder",
    },
}
_DISTILBERT_DOCUMENT = {"classifier.dense": "pre_classifier", "classifier.out": "classifier"}
_DISTILBERT = _SIMPLE | {
    "ForSequenceClassification": _DISTILBERT_DOCUMENT,
    "ForMultipleChoice": _DISTILBERT_DOCUMENT,
    "ForMaskedLM": {
        "lm_head.dense": "vocab_transform",
        "lm_head.norm": "vocab_layer_norm",
        "lm_head.decoder": "vocab_projector",
    },
}
_ELECTRA = _SIMPLE | {
    "ForSequenceClassification": _FIRST_TOKEN,
    "ForMultipleChoice": {
        "classifier.dense": "sequence_summary.summary",
        "classifier.out": "classifier",
    },
    "ForMaskedLM": {
        "lm_head.dense": "generator_predictions.dense",
        "lm_head.norm": "generator_predictions.LayerNorm",
        "lm_head.decoder": "generator_lm_head",
    },
}


def _bert_settings(config: Any) -> dict[str, Any]:
    """What BERT's descendants call alike."""
    same = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act "
        "hidden_dropout_prob attention_probs_dropout_prob max_position_embeddings type_vocab_size "
        "layer_norm_eps initializer_range"
    )
    return {
        **{name: getattr(config, name) for name in same.split()},
        "lm_act": config.hidden_act,
        "classifier_dropout": getattr(config, "classifier_dropout", None),
        "position_offset": 0,
    }


def _roberta_settings(config: Any) -> dict[str, Any]:
    # Positions are counted from behind the padding's id, and the rows up to it are reserved.
    return _bert_settings(config) | {"lm_act": "gelu", "position_offset": config.pad_token_id + 1}


def _electra_settings(config: Any) -> dict[str, Any]:
    return _bert_settings(config) | {
        "embedding_size": config.embedding_size,
        "lm_act": "gelu",
        "classifier_act": "gelu",
    }


def _distilbert_settings(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.hidden_dim,
        "hidden_act": config.activation,
        "lm_act": config.activation,
        "classifier_act": "relu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout": config.seq_classif_dropout,
        "max_position_embeddings": config.max_position_embeddings,
        "position_offset": 0,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-12,
        "initializer_range": config.initializer_range,
    }


def _longformer_attention(config: Any, window: int) -> Any:
    given = config.attention_window
    windows = [given] * config.num_hidden_layers if isinstance(given, int) else given
    return [{"window": one} for one in windows]


_MODERNBERT_HEAD = {"classifier.dense": "head.dense", "classifier.norm": "head.norm"}
_MODERNBERT_TOKENS = {"transform.dense": "head.dense", "transform.norm": "head.norm"}
_MODERNBERT = {
    "Model": {},
    "ForMaskedLM": {
        "lm_head.dense": "head.dense",
        "lm_head.norm": "head.norm",
        "lm_head.decoder": "decoder",
    },
    "ForSequenceClassification": _MODERNBERT_HEAD | {"classifier.out": "classifier"},
    "ForMultipleChoice": _MODERNBERT_HEAD | {"classifier.out": "classifier"},
    "ForTokenClassification": _MODERNBERT_TOKENS | {"classifier": "classifier"},
    "ForQuestionAnswering": _MODERNBERT_TOKENS | {"qa_outputs": "classifier"},
}


def _modernbert_settings(config: Any) -> dict[str, Any]:
    same = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
        "max_position_embeddings classifier_dropout initializer_range"
    )
    biases = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
    return {
        **{name: getattr(config, name) for name in same.split()},
        "position": "rotary",
        "position_offset": 0,
        "type_vocab_size": 0,
        "norm_first": True,
        "gated": True,
        # Ours has all or none; one that theirs has not is zero.
        "bias": any(getattr(config, name) for name in biases),
        "hidden_act": config.hidden_activation,
        "lm_act": config.classifier_activation,
        "classifier_act": config.classifier_activation,
        "classifier_norm": True,
        "classifier_pooling": "first" if config.classifier_pooling == "cls" else "mean",
        # Theirs may differ between embeddings and feed-forward; what was released has none.
        "hidden_dropout_prob": config.mlp_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.norm_eps,
    }


def _modernbert_attention(config: Any, window: int) -> Any:
    """Its local layers keep their window and know of no global tokens, so that they compute what
    they did; those that saw everything get the window asked for."""
    layers = []
    for kind in config.layer_types:
        rope = config.rope_parameters[kind]
        if rope["rope_type"] != "default":
            raise ValueError(
                f"cannot convert ModernBERT with rope_type {rope['rope_type']!r}; only "
                "'default' has an equivalent"
            )
        local = {"window": 2 * config.sliding_window, "global_tokens": False}
        reach = local if kind == "sliding_attention" else {"window": window}
        layers.append({**reach, "rotary": float(rope["rope_theta"])})
    return layers


# By transformers' model_type.
FAMILIES = {
    "longformer": Family(
        "Longformer",
        "longformer",
        _roberta_settings,
        _longformer_attention,
        heads=_ROBERTA,
        global_suffix="_global",
        long=True,
    ),
    "roberta": Family("Roberta", "roberta", _roberta_settings, heads=_ROBERTA),
    "xlm-roberta": Family("XLMRoberta", "roberta", _roberta_settings, heads=_ROBERTA),
    "camembert": Family("Camembert", "roberta", _roberta_settings, heads=_ROBERTA),
    "bert": Family(
        "Bert", "bert", _bert_settings, heads=_BERT, partial={"ForPreTraining": "ForMaskedLM"}
    ),
    "distilbert": Family(
        "DistilBert",
        "distilbert",
        _distilbert_settings,
        layer="transformer.layer.{}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        block={
            "project": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "feed_forward_norm": "output_layer_norm",
        },
        heads=_DISTILBERT,
    ),
    "electra": Family(
        "Electra",
        "electra",
        _electra_settings,
        heads=_ELECTRA,
        partial={"ForPreTraining": "Model"},
    ),
    "modernbert": Family(
        "ModernBert",
        "model",
        _modernbert_settings,
        _modernbert_attention,
        embeddings={"words": "tok_embeddings", "norm": "norm"},
        layer="layers.{}.",
        qkv=("attn.Wqkv",),
        block={
            "project": "attn.Wo",
            "attention_norm": "attn_norm",
            "up": "mlp.Wi",
            "down": "mlp.Wo",
            "feed_forward_norm": "mlp_norm",
        },
        heads=_MODERNBERT,
    ),
}


def modules(family: Family, layers: int, head: str, prefix: str) -> dict[str, tuple[str, ...]]:
    """Module of ours -> modules of theirs. `prefix` is the encoder's in their model, "" if bare."""
    theirs = f"{prefix}." if prefix else ""
    ours = "" if head == "Model" else "encoder."
    table: dict[str, tuple[str, ...]] = {
        f"{ours}embeddings.{name}": (f"{theirs}embeddings.{their_name}",)
        for name, their_name in (family.embeddings or _EMBEDDINGS).items()
    }
    table[f"{ours}norm"] = (f"{theirs}final_norm",)
    table[f"{ours}embeddings.project"] = (f"{theirs}embeddings_project",)
    table[f"{ours}pooler.dense"] = (f"{theirs}pooler.dense",)
    for index in range(layers):
        mine, their = f"{ours}layers.{index}.", theirs + family.layer.format(index)
        for name, their_name in (family.block or _BLOCK).items():
            table[mine + name] = (their + their_name,)
        table[mine + "attention.qkv"] = tuple(their + part for part in family.qkv)
        table[mine + "attention.qkv_global"] = tuple(
            their + part + family.global_suffix for part in family.qkv
        )
    for name, their_name in (family.heads or {})[head].items():
        table[name] = (their_name.format(prefix),)
    return table
