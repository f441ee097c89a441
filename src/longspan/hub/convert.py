"""Checkpoints in and out: short encoders made long, and transformers' Longformer both ways.

Encoder-decoders go the same ways, see `seq2seq`.
"""

import warnings
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    LongformerConfig,
    PreTrainedModel,
)

from longspan.hub import seq2seq
from longspan.hub.exchange import finish, gather, inexpressible, scatter, share_global
from longspan.hub.families import FAMILIES, HEADS, Family, modules
from longspan.layers.position import tile_positions
from longspan.models import (
    LongspanConfig,
    LongspanDecoderConfig,
    LongspanForConditionalGeneration,
    LongspanPreTrainedModel,
    LongspanSeq2SeqConfig,
)
from longspan.models.inputs import whole
from longspan.models.loading import (
    load_weights,
    read_config,
    refuse_file,
    refuse_missing,
    refuse_surplus,
)

# The paper went from 512 positions to 4,096.
_TIMES = 8
_WINDOW = 512


def convert(
    source: PreTrainedModel | str | Path,
    *,
    max_length: int | None = None,
    window: int | None = None,
) -> LongspanPreTrainedModel:
    """A longspan model with the weights, the head and the labels of `source`.

    A Longformer or LED comes over as it is, windows included. BERT, RoBERTa, XLM-R, CamemBERT,
    DistilBERT and ELECTRA become long: each token sees `window` tokens around it, the learned
    positions are repeated, the projections of global tokens start as copies. ModernBERT keeps the
    windows of its local layers, and those that saw everything get `window`; its positions are
    rotary, so there is nothing to repeat, and global tokens share the projections of all others
    (`WindowAttention` says why). Of BART and mBART the encoder becomes long, as LED's did, and the
    decoder stays what it was. On documents of up to window // 2 + 1 tokens the result computes
    what the source does; longer ones are best preceded by some finetuning. A window of twice the
    trained length keeps full attention as it was, at its quadratic cost.

    Args:
        source: a transformers model, a folder or the name of a model on the hub. Weights are read
            from safetensors only: a pickle can run code.
        max_length: positions of the result; by default 8 times the trained ones, for BART and
            mBART 16 times, as the paper has it, and for a Longformer or LED as many as it has.
        window: in tokens, half on each side; by default 512, for BART and mBART 1,024.
    """
    model = load(source) if isinstance(source, (str, Path)) else source
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "convert takes a transformers model, a folder or the name of a model on the hub, got "
            f"{type(model).__name__}"
        )
    if model.config.model_type in seq2seq.FAMILIES:
        return seq2seq.convert(model, max_length=max_length, window=window)
    window = _WINDOW if window is None else window
    family, head = _recognise(type(model).__name__, model.config)
    config = model.config
    bare = not hasattr(model, family.prefix)
    settings = family.settings(config)
    trained = settings["max_position_embeddings"] - settings["position_offset"]
    default = trained if family.long else _TIMES * trained
    length = default if max_length is None else whole("max_length", max_length)
    if length < trained:
        raise ValueError(
            f"max_length={length} is below the {trained} positions {type(model).__name__} has; "
            "positions are only ever added"
        )
    ours = HEADS[head](
        LongspanConfig(
            **settings
            | _head_settings(family, head, config)
            | _labels(config)
            | {
                "attention": family.attention(config, window),
                "max_position_embeddings": settings["position_offset"] + length,
                "pooler": getattr(model, "pooler", None) is not None,
                "tie_word_embeddings": config.tie_word_embeddings,
            }
        )
    )
    if ours.config.sep_token_id is None and isinstance(source, (str, Path)):
        ours.config.sep_token_id = _separator(source)
    layers = settings["num_hidden_layers"]
    table = modules(family, layers, head, "" if bare else family.prefix)
    weights = gather(ours.state_dict().keys(), table, model.state_dict())
    for name in weights:
        if name.endswith("embeddings.positions.weight"):
            weights[name] = tile_positions(weights[name], settings["position_offset"], length)
    finish(ours, weights, model)
    return ours


def to_transformers(model: LongspanPreTrainedModel) -> PreTrainedModel:
    """A stock transformers Longformer, or LED, with the weights of `model` and equal outputs.

    LED has to be given a mask of global tokens: it chooses none by itself; Longformer chooses as
    our heads do, but knows of no `config.global_preset`, and its question answering wants three
    separators in a row, as RoBERTa's tokenizer sets them. To Longformer, padding has to stand
    behind the text: Longformer never counts it, a model made from BERT does.
    What a Longformer cannot express is refused: dilation, one-sided windows, rotary or sinusoidal
    positions, embeddings of another size than the hidden states, blocks or heads built otherwise.
    """
    if isinstance(model, LongspanForConditionalGeneration):
        return seq2seq.to_transformers(model)
    config, family = model.config, FAMILIES["longformer"]
    head = next((name for name, cls in HEADS.items() if type(model) is cls), None)
    if head is None:
        raise TypeError(f"{type(model).__name__} is none of {_names(HEADS.values())}")
    _refuse_inexpressible(config, head)
    assert config.pad_token_id is not None
    reserved = config.pad_token_id + 1
    special = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
    same = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act "
        "hidden_dropout_prob attention_probs_dropout_prob layer_norm_eps initializer_range "
        "tie_word_embeddings id2label label2id problem_type"
    )
    cls = getattr(transformers, f"Longformer{head}")
    bare = head == "Model"
    theirs = cls(
        LongformerConfig(
            **{name: getattr(config, name) for name in (*same.split(), *special)},
            attention_window=[setting["window"] for setting in config.attention],
            max_position_embeddings=reserved + (config.longest or 0),
            type_vocab_size=max(config.type_vocab_size, 1),
        ),
        **({"add_pooling_layer": config.pooler} if bare else {}),
    )
    ours = dict(model.state_dict())
    start = "" if bare else "encoder."
    table = ours[f"{start}embeddings.positions.weight"]
    kept = table[: config.position_offset]
    if config.position_offset != reserved:
        kept = table.new_zeros(reserved, table.shape[1])
    ours[f"{start}embeddings.positions.weight"] = torch.cat([kept, table[config.position_offset :]])
    if config.type_vocab_size == 0:
        ours[f"{start}embeddings.types.weight"] = table.new_zeros(1, table.shape[1])
    share_global(ours, config, start)
    names = modules(family, config.num_hidden_layers, head, "" if bare else family.prefix)
    weights = scatter(ours, names)
    if head == "ForMaskedLM":
        weights["lm_head.bias"] = weights["lm_head.decoder.bias"]
    finish(theirs, weights, model)
    return theirs


def _recognise(name: str, config: Any) -> tuple[Family, str]:
    """The family and the head of a model class, or a refusal by name."""
    family = FAMILIES.get(config.model_type)
    if family is not None and name.startswith(family.name):
        head = name.removeprefix(family.name)
        if head in (family.partial or {}):
            kept = (family.partial or {})[head]
            warnings.warn(
                f"{name} has no equivalent here: it becomes {HEADS[kept].__name__}, and what else "
                "its head has is left behind",
                stacklevel=3,
            )
            head = kept
        unusual = [
            setting
            for setting in ("is_decoder", "add_cross_attention")
            if getattr(config, setting, False)
        ]
        if getattr(config, "position_embedding_type", "absolute") != "absolute":
            unusual.append("position_embedding_type")
        if head in HEADS and not unusual:
            return family, head
        if unusual:
            raise ValueError(f"cannot convert {name} with {' and '.join(unusual)} set")
    if config.model_type in (LongspanConfig.model_type, LongspanSeq2SeqConfig.model_type):
        raise ValueError(
            f"{name} is one of longspan's already; model.extend_positions(length) makes it longer"
        )
    if config.model_type == LongspanDecoderConfig.model_type:
        raise ValueError(
            f"{name} is a language model of longspan's already: there is nothing to convert"
        )
    raise ValueError(_unsupported(name, config.model_type))


def _unsupported(name: str, kind: str) -> str:
    return (
        f"cannot convert {name} (model_type {kind!r}); supported are "
        f"{', '.join(family.name for family in FAMILIES.values())}, each with {', '.join(HEADS)}, "
        f"and {', '.join(family.name for family in seq2seq.FAMILIES.values())} with "
        f"{seq2seq.HEAD}"
    )


def head_of(config: Any) -> type[LongspanPreTrainedModel] | None:
    """The class of ours that a checkpoint of this config becomes; None if it cannot."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    head = (config.architectures or [f"{family.name}Model"])[0].removeprefix(family.name)
    return HEADS.get((family.partial or {}).get(head, head))


def positions_of(config: Any) -> tuple[str, int | None]:
    """The kind of positions that a checkpoint of this config has, and how many."""
    if config.model_type == LongspanConfig.model_type:
        return config.position, config.longest
    family = FAMILIES.get(config.model_type)
    if family is None:
        return "unknown", None
    known = family.settings(config)
    count = known["max_position_embeddings"] - known["position_offset"]
    return known.get("position", "learned"), count


def load_config(source: str | Path) -> Any:
    """The config in a folder or on the hub; an error says what stands there instead."""
    refuse_file(source)
    if Path(source).is_dir() and not (Path(source) / "config.json").exists():
        raise ValueError(_no_model(Path(source)))
    path = Path(source)
    named = str(source).startswith(".") or path.is_absolute() or len(path.parts) > 2
    if named and not path.exists():
        raise ValueError(f"{source} does not exist, and is no name on the hub either")
    try:
        told = read_config(source, strict=True)
        kind = told.get("model_type")
        if kind is not None and kind not in CONFIG_MAPPING:
            # transformers would speak of its own version, or ask to run code that came along.
            raise ValueError(_unsupported((told.get("architectures") or [kind])[0], kind))
        return AutoConfig.from_pretrained(source)
    except OSError as error:
        if Path(source).is_dir():
            raise
        raise ValueError(
            f"{source} is neither a folder here nor a model that the hub would give: {error}"
        ) from error


def load(source: str | Path) -> PreTrainedModel:
    """The transformers model in a folder or on the hub, if it can be converted.

    Refused are architectures nobody knows here, pickled weights, and checkpoints that are damaged
    or lack weights. Only a pooler may be missing, as many checkpoints have none; it is left out.
    """
    config = load_config(source)
    known = FAMILIES.get(config.model_type) or seq2seq.FAMILIES.get(config.model_type)
    bare = f"{known.name}Model" if known else config.model_type
    name = (config.architectures or [bare])[0]
    if config.model_type in seq2seq.FAMILIES:
        name, head = seq2seq.recognise(name, config), seq2seq.HEAD
    else:
        _, head = _recognise(name, config)
    model, info = load_weights(getattr(transformers, name).from_pretrained, source)
    missing = set(info["missing_keys"])
    pooler = {key for key in model.state_dict() if key.startswith("pooler.")}
    if head == "Model" and pooler and pooler <= missing:
        model.pooler = None
        missing -= pooler
    refuse_missing(source, name, missing)
    refuse_surplus(source, name, info["unexpected_keys"])
    if info["unexpected_keys"]:
        left = sorted(info["unexpected_keys"])
        warnings.warn(f"{source}: {len(left)} weights are not used: {left[:8]}", stacklevel=3)
    return model


def _no_model(folder: Path) -> str:
    """That a folder holds none, and which below it do: a run keeps its own two levels down."""
    below = chain.from_iterable(folder.glob(f"{'*/' * depth}config.json") for depth in (1, 2, 3))
    found = [str(path.parent) for path in islice(below, 4)]
    hint = f"; there is one in {', '.join(found)}" if found else ""
    return f"{folder} holds no model: there is no config.json{hint}"


def _separator(source: str | Path) -> int | None:
    """The separator's id as the tokenizer beside the weights has it: BERT's config does not say,
    and without it nobody knows where a question ends."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        return None  # there is no tokenizer, or none that transformers knows
    # Without a vocabulary file transformers makes one up, of special tokens alone.
    invented = len(tokenizer) <= len(tokenizer.all_special_ids)
    return None if invented else tokenizer.sep_token_id


def _head_settings(family: Family, head: str, config: Any) -> dict[str, Any]:
    """What a family does differently in one of its heads."""
    if family.name != "Electra" or head != "ForMultipleChoice":
        return {}
    if config.summary_type != "first" or not config.summary_use_proj:
        raise ValueError(
            f"cannot convert ElectraForMultipleChoice with summary_type="
            f"{config.summary_type!r}, summary_use_proj={config.summary_use_proj}; "
            "only a projection of the first token has an equivalent"
        )
    return {"classifier_act": config.summary_activation or "linear"}


def _labels(config: Any) -> dict[str, Any]:
    """Labels and special tokens, where the source has them."""
    given = {
        name: getattr(config, name, None)
        for name in ("id2label", "label2id", "problem_type", "pad_token_id", "bos_token_id")
    }
    eos = getattr(config, "eos_token_id", None)
    eos = eos if isinstance(eos, int) else None
    sep = getattr(config, "sep_token_id", None)
    return given | {"eos_token_id": eos, "sep_token_id": eos if sep is None else sep}


def _refuse_inexpressible(config: LongspanConfig, head: str) -> None:
    reasons = inexpressible(config)
    if config.pad_token_id is None:
        reasons.append("it has no padding token, from whose id Longformer counts positions")
    if config.embedding_size != config.hidden_size:
        reasons.append(f"embeddings have size {config.embedding_size}, not {config.hidden_size}")
    if head == "ForMaskedLM" and config.lm_act != "gelu":
        reasons.append(f"lm_act is {config.lm_act!r}, not 'gelu'")
    by_document = head in ("ForSequenceClassification", "ForMultipleChoice")
    if by_document and config.classifier_act != "tanh":
        reasons.append(f"classifier_act is {config.classifier_act!r}, not 'tanh'")
    if by_document and config.classifier_pooling != "first":
        reasons.append(f"classifier_pooling is {config.classifier_pooling!r}, not 'first'")
    if config.classifier_norm and head not in ("Model", "ForMaskedLM"):
        reasons.append("its head begins with a layer and a norm")
    if reasons:
        raise ValueError("transformers' Longformer cannot express this: " + "; ".join(reasons))


def _names(classes: Any) -> str:
    return ", ".join(cls.__name__ for cls in classes)
