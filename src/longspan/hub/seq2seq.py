"""Encoder-decoders in and out: BART and mBART made long, and transformers' LED both ways.

Like `families.modules`, the table says for each module of ours which of theirs hold its weights.
"""

import copy
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import LEDConfig, PreTrainedModel

from longspan.hub.exchange import finish, gather, inexpressible, scatter, share_global
from longspan.layers.position import tile_positions
from longspan.models import LongspanForConditionalGeneration, LongspanSeq2SeqConfig
from longspan.models.inputs import whole

HEAD = "ForConditionalGeneration"
# LED went from BART's 1,024 positions to 16,384, with windows of 1,024.
_TIMES = 16
_WINDOW = 1024
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Family:
    """One architecture of transformers; module names as it has them."""

    name: str  # of its classes
    prefix: str  # of the encoder and the decoder in the model
    reserved: int  # rows at the front of both tables of positions that nothing stands at
    norm_first: bool = False
    long: bool = False
    qkv: tuple[str, ...] = _PROJECTIONS  # of the encoder
    project: str = "self_attn.out_proj"
    global_suffix: str = ""  # of the global projections; short models copy the local ones


# By transformers' model_type.
FAMILIES = {
    "led": Family(
        "LED",
        "led",
        reserved=0,
        long=True,
        qkv=tuple(f"self_attn.longformer_self_attn.{one}" for one in ("query", "key", "value")),
        project="self_attn.output",
        global_suffix="_global",
    ),
    "bart": Family("Bart", "model", reserved=2),
    "mbart": Family("MBart", "model", reserved=2, norm_first=True),
}

# Ours and theirs in both halves; LED's and BART's encoders differ in more, see `Family`.
_LAYER = {
    "attention_norm": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
_DECODER_LAYER = _LAYER | {
    "project": "self_attn.out_proj",
    "cross_query": "encoder_attn.q_proj",
    "cross_project": "encoder_attn.out_proj",
    "cross_norm": "encoder_attn_layer_norm",
}


def modules(family: Family, config: LongspanSeq2SeqConfig) -> dict[str, tuple[str, ...]]:
    """Module of ours -> modules of theirs, in the order in which they are joined."""
    table: dict[str, tuple[str, ...]] = {"lm_head": ("lm_head",)}
    for half in ("encoder", "decoder"):
        theirs = f"{family.prefix}.{half}."
        table |= {
            f"{half}.embeddings.words": (f"{theirs}embed_tokens",),
            f"{half}.embeddings.positions": (f"{theirs}embed_positions",),
            f"{half}.embeddings.norm": (f"{theirs}layernorm_embedding",),
            f"{half}.norm": (f"{theirs}layer_norm",),
        }
    for index in range(config.num_hidden_layers):
        mine, their = f"encoder.layers.{index}.", f"{family.prefix}.encoder.layers.{index}."
        for name, their_name in (_LAYER | {"project": family.project}).items():
            table[mine + name] = (their + their_name,)
        table[mine + "attention.qkv"] = tuple(their + part for part in family.qkv)
        table[mine + "attention.qkv_global"] = tuple(
            their + part + family.global_suffix for part in family.qkv
        )
    for index in range(config.decoder_layers or 0):
        mine, their = f"decoder.layers.{index}.", f"{family.prefix}.decoder.layers.{index}."
        for name, their_name in _DECODER_LAYER.items():
            table[mine + name] = (their + their_name,)
        table[mine + "qkv"] = tuple(their + part for part in _PROJECTIONS)
        cross = ("encoder_attn.k_proj", "encoder_attn.v_proj")
        table[mine + "cross_key_value"] = tuple(their + part for part in cross)
    return table


def recognise(name: str, config: Any) -> str:
    """The class to load a checkpoint of the class `name` as, or a refusal by name. BART was
    released as a bare model; what it lacks is tied to what it has."""
    family = FAMILIES[config.model_type]
    if name in (f"{family.name}Model", family.name + HEAD):
        return family.name + HEAD
    raise ValueError(f"cannot convert {name}: of {family.name} only {family.name + HEAD} can be")


def positions(config: Any) -> tuple[int, int]:
    """How many the encoder and the decoder of theirs have."""
    if config.model_type == "led":
        return config.max_encoder_position_embeddings, config.max_decoder_position_embeddings
    return config.max_position_embeddings, config.max_position_embeddings


def convert(
    model: PreTrainedModel, *, max_length: int | None = None, window: int | None = None
) -> LongspanForConditionalGeneration:
    """A model of ours with the weights of a stock LED, BART or mBART; see `hub.convert`."""
    their: Any = model.config
    family = FAMILIES[their.model_type]
    if type(model).__name__ != family.name + HEAD:
        recognise(type(model).__name__, their)
        raise ValueError(
            f"cannot convert a bare {type(model).__name__}: load it as {family.name + HEAD}, whose "
            "scores are tied to its words"
        )
    trained, targets = positions(their)
    default = trained if family.long else _TIMES * trained
    length = default if max_length is None else whole("max_length", max_length)
    if length < trained:
        raise ValueError(
            f"max_length={length} is below the {trained} positions {type(model).__name__} has; "
            "positions are only ever added"
        )
    windows = _WINDOW if window is None else window
    if family.long:
        windows = their.attention_window
    if isinstance(windows, int):
        windows = [windows] * their.encoder_layers
    config = LongspanSeq2SeqConfig(
        **_settings(their),
        attention=[{"window": one} for one in windows],
        max_position_embeddings=length,
        decoder_positions=targets,
        norm_first=family.norm_first,
        first_norm=family.norm_first,
        wrap_target=their.model_type == "mbart",
        # LED makes no token global by itself.
        global_preset="none" if family.long else None,
    )
    ours = LongspanForConditionalGeneration(config)
    theirs = model.state_dict()
    bias = "final_logits_bias"
    names = [name for name in ours.state_dict() if name != bias]
    weights = gather(names, modules(family, config), theirs) | {bias: theirs[bias]}
    for half in ("encoder", "decoder"):
        name = f"{half}.embeddings.positions.weight"
        weights[name] = weights[name][family.reserved :]
    name = "encoder.embeddings.positions.weight"
    weights[name] = tile_positions(weights[name], 0, length)
    finish(ours, weights, model)
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours


def _settings(config: Any) -> dict[str, Any]:
    """What LED, BART and mBART call alike."""
    eos = config.eos_token_id if isinstance(config.eos_token_id, int) else None
    same = "vocab_size decoder_layers decoder_attention_heads decoder_start_token_id"
    tokens = "pad_token_id bos_token_id tie_word_embeddings activation_dropout"
    return {
        **{name: getattr(config, name) for name in (*same.split(), *tokens.split())},
        "hidden_size": config.d_model,
        "num_hidden_layers": config.encoder_layers,
        "num_attention_heads": config.encoder_attention_heads,
        "intermediate_size": config.encoder_ffn_dim,
        "decoder_intermediate_size": config.decoder_ffn_dim,
        "hidden_act": config.activation_function,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.init_std,
        "embedding_scale": bool(getattr(config, "scale_embedding", False)),
        "layer_norm_eps": 1e-5,
        "eos_token_id": eos,
        "sep_token_id": eos,
    }


def to_transformers(model: LongspanForConditionalGeneration) -> PreTrainedModel:
    """A stock LED with the weights of `model`; what LED cannot express is refused."""
    config, family = model.config, FAMILIES["led"]
    reasons = inexpressible(config)
    if config.layer_norm_eps != 1e-5:
        reasons.append(f"layer_norm_eps is {config.layer_norm_eps}, not 1e-05")
    if config.wrap_target or config.decoder_start_token_id is None:
        reasons.append("targets begin with no fixed token")
    if config.pad_token_id is None:
        reasons.append("it has no padding token")
    if reasons:
        raise ValueError("transformers' LED cannot express this: " + "; ".join(reasons))
    same = (
        "vocab_size decoder_layers decoder_attention_heads decoder_start_token_id pad_token_id "
        "bos_token_id eos_token_id tie_word_embeddings activation_dropout"
    )
    theirs = transformers.LEDForConditionalGeneration(
        LEDConfig(
            **{name: getattr(config, name) for name in same.split()},
            d_model=config.hidden_size,
            encoder_layers=config.num_hidden_layers,
            encoder_attention_heads=config.num_attention_heads,
            encoder_ffn_dim=config.intermediate_size,
            decoder_ffn_dim=config.decoder_intermediate_size or config.intermediate_size,
            activation_function=config.hidden_act,
            dropout=config.hidden_dropout_prob,
            attention_dropout=config.attention_probs_dropout_prob,
            init_std=config.initializer_range,
            max_encoder_position_embeddings=config.max_position_embeddings,
            max_decoder_position_embeddings=config.decoder_positions,
            attention_window=[setting["window"] for setting in config.attention],
        )
    )
    ours = dict(model.state_dict())
    share_global(ours, config, "encoder.")
    bias = ours.pop("final_logits_bias")
    weights = scatter(ours, modules(family, config)) | {"final_logits_bias": bias}
    weights["led.shared.weight"] = weights["led.encoder.embed_tokens.weight"]
    finish(theirs, weights, model)
    theirs.generation_config = copy.deepcopy(model.generation_config)
    return theirs
