"""A checkpoint with a new head, or the one it has: what training starts from."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from longspan.hub import seq2seq
from longspan.hub.convert import convert, head_of, load_config, positions_of
from longspan.models import (
    LongspanConfig,
    LongspanForConditionalGeneration,
    LongspanModel,
    LongspanPreTrainedModel,
    LongspanSeq2SeqConfig,
)
from longspan.train import checkpoint
from longspan.train.finetuning import Start


def find_source(source: str | Path) -> str:
    """The checkpoint that is meant: that of a folder or hub name, or a run's best one."""
    if (Path(source) / "recipe.json").exists():
        folder = checkpoint.find(Path(source), "best")
        if folder is None:
            raise ValueError(f"{source} has no checkpoint yet")
        return str(folder)
    return str(source)


def load_tokenizer(source: str | Path) -> Any:
    """The fast tokenizer beside a checkpoint: character offsets come from no other."""
    source = find_source(source)
    load_config(source)  # where there is no model at all, transformers speaks of other things
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{source} has no tokenizer that transformers can load: {error}") from None
    if not tokenizer.is_fast or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(
            f"{source} has no fast tokenizer with a vocabulary: put tokenizer.json beside the "
            "weights"
        )
    return tokenizer


def add_tokens(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """Special tokens for a task; returns the ids of those that the tokenizer did not have."""
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([name for name in names if name not in known], special_tokens=True)
    return tokenizer.convert_tokens_to_ids([name for name in names if name not in known])


def has_head(source: str | Path, head: type[LongspanPreTrainedModel]) -> bool:
    """Whether a checkpoint has a head of this class, or one that becomes it."""
    config = load_config(find_source(source))
    if config.model_type == LongspanConfig.model_type:
        return head.__name__ in (config.architectures or [])
    return head_of(config) is head


def check_freeze(start: Start) -> None:
    """Raise if nothing would be left to train."""
    if start.freeze != "all-but-positions":
        return
    assert start.source is not None
    kind, known = positions_of(load_config(find_source(start.source)))
    if kind != "learned" or known is None or known >= start.length:
        raise ValueError(
            f"model.freeze=all-but-positions: {start.source} needs no new positions for "
            f"{start.length:,} tokens, so that nothing would be trained"
        )


def load_long(
    source: str | Path,
    length: int,
    window: int,
    head: type[LongspanPreTrainedModel] | None = None,
) -> tuple[Any, int | None]:
    """A checkpoint with positions for at least `length` tokens, in float32 (one in half precision,
    too), and how many it was trained with; None: any number."""
    model = _load(find_source(source), window, head).float()
    trained = model.config.longest
    if trained is not None and trained < length:
        model.extend_positions(length)
    return model, trained


def build_model(
    start: Start,
    head: type[LongspanPreTrainedModel],
    tokenizer: Any,
    added: Sequence[int] = (),
    *,
    keep_head: bool = False,
    **settings: Any,
) -> Any:
    """A model of the class `head` with the encoder of a checkpoint, in float32.

    The head is new, unless the checkpoint has it and `keep_head` is set, or `start.head` asks for
    it, and so are the embeddings of `added` tokens. The model may have more positions than
    `start.length` asks for.
    """
    assert start.source is not None
    folder = find_source(start.source)
    kept = (keep_head or start.head == "kept") and has_head(folder, head)
    if start.head == "kept" and not kept:
        raise ValueError(f"model.head=kept: {folder} has no head for this task, {head.__name__}")
    source, trained = load_long(folder, start.length, start.window, head if kept else None)
    if added:
        _embed(source, added)
    config = copy.deepcopy(source.config)
    if start.head == "kept":
        _check_head(folder, config, settings)
    for name, value in settings.items():
        setattr(config, name, value)
    config.global_preset = start.global_tokens  # None leaves it to the head
    if start.pooling is not None:
        config.classifier_pooling = start.pooling
    config.sep_token_id = tokenizer.sep_token_id
    model: Any = head(config)
    old: Any = source if kept else source.base_model
    new = model if kept else model.base_model
    weights = old.state_dict()
    new.load_state_dict({name: weights[name] for name in new.state_dict()})
    known = 0 if trained is None else config.position_offset + trained  # rows of the table
    if start.positions == "random" and config.position == "learned":
        new_rows = model.base_model.embeddings.positions.weight.data[known:]
        nn.init.normal_(new_rows, std=config.initializer_range)
    if (config.global_preset or getattr(head, "preset", None)) == "none":
        _freeze_global(model)
    _freeze(model, start.freeze, known)
    return model


def build_new(
    start: Start,
    attention: Any,
    head: type[LongspanPreTrainedModel],
    tokenizer: Any,
    **settings: Any,
) -> Any:
    """A model of the class `head` that knows nothing yet, as `start.new` has it."""
    return head(configure_new(start, attention, tokenizer, **settings))


def configure_new(start: Start, attention: Any, tokenizer: Any, **settings: Any) -> LongspanConfig:
    """What such a model is; an error names what cannot be."""
    assert start.new is not None
    offset = start.new.config.get("position_offset", LongspanConfig.position_offset)
    return LongspanConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=start.length + offset,
        attention=start.new.setting(attention),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=None,
        sep_token_id=None,
        global_preset=start.global_tokens,
        **{**({"classifier_pooling": start.pooling} if start.pooling else {}), **start.new.config},
        **settings,
    )


def build_writer(
    start: Start, tokenizer: Any, ends: Sequence[int], longest: int, **settings: Any
) -> Any:
    """An encoder-decoder from a checkpoint, in float32, for texts of up to `longest` tokens.

    It stops writing at the token it knows for that, or at the last of `ends`, those that stand
    behind a text, if that is none of them. The model may have more positions than `start.length`
    asks for.
    """
    assert start.source is not None
    if start.positions != "copied" or start.freeze != "nothing" or start.pooling is not None:
        raise ValueError(
            "model.positions, model.freeze and model.pooling are not for models that write"
        )
    folder = find_source(start.source)
    kind = AutoConfig.from_pretrained(folder).model_type
    if kind == LongspanSeq2SeqConfig.model_type:
        model = LongspanForConditionalGeneration.from_pretrained(folder)
    elif kind in seq2seq.FAMILIES:
        model = convert(folder, window=start.window)
    else:
        known = ", ".join(family.name for family in seq2seq.FAMILIES.values())
        raise ValueError(f"{folder} ({kind}) has no decoder: give one of {known}, or of longspan's")
    model = model.float()
    config = model.config
    if config.longest is not None and config.longest < start.length:
        model.extend_positions(start.length)
    if longest > config.decoder_positions:
        raise ValueError(
            f"writing.longest={longest}, but the decoder of {folder} has positions for "
            f"{config.decoder_positions}"
        )
    for name, value in settings.items():
        setattr(config, name, value)
    # LED makes no token global by itself; whoever trains on documents wants one.
    config.global_preset = start.global_tokens or "first"
    config.sep_token_id = tokenizer.sep_token_id
    if config.eos_token_id not in ends:
        config.eos_token_id = model.generation_config.eos_token_id = ends[-1]
    if config.wrap_target:
        # All targets of a tokenizer end alike; so `generate`, and those cut short, begin alike too.
        config.wrap_target = False
        config.decoder_start_token_id = model.generation_config.decoder_start_token_id = ends[-1]
    if config.global_preset == "none":
        _freeze_global(model)
    return model


def _freeze_global(model: Any) -> None:
    """Projections of global tokens where there are none: they would wait for a gradient in vain,
    and so would other processes, and a resumed run for what the optimiser knows of them."""
    for name, parameter in model.named_parameters():
        if "_global." in name:
            parameter.requires_grad_(False)


def _embed(model: Any, ids: Sequence[int]) -> None:
    """Random embeddings for new tokens, spread as those that are there."""
    words = model.base_model.get_input_embeddings()
    known = words.weight.detach()
    size = max(len(known), max(ids) + 1)
    table = torch.empty(size, known.shape[1]).normal_(known.mean().item(), known.std().item())
    new = table[list(ids)]  # a copy
    table[: len(known)] = known
    table[list(ids)] = new
    words.weight, words.num_embeddings = nn.Parameter(table), size
    model.config.vocab_size = size


def _check_head(folder: str, config: Any, settings: Mapping[str, Any]) -> None:
    """Raise if a head that is to be kept was made for something else."""
    for name, value in settings.items():
        known = getattr(config, name)
        if name != "label2id" and known != value:
            raise ValueError(
                f"model.head=kept: {folder} has {name}={known}, these examples {name}={value}"
            )


def _freeze(model: Any, what: str, known: int) -> None:
    if what == "all-but-head":
        model.base_model.requires_grad_(False)
    elif what == "all-but-positions":
        table = model.base_model.embeddings.positions.weight
        model.requires_grad_(False)
        table.requires_grad_(True)
        table.register_hook(lambda gradient: _without(gradient, known))


def _load(folder: str, window: int, head: type[LongspanPreTrainedModel] | None) -> Any:
    """A checkpoint with as many positions as it has; with a head if one is asked for."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type in (LongspanSeq2SeqConfig.model_type, *seq2seq.FAMILIES):
        raise ValueError(
            f"{folder} ({config.model_type}) is an encoder-decoder, with which longspan train "
            "summarize goes on; this task needs an encoder"
        )
    if config.model_type != LongspanConfig.model_type:
        return convert(folder, max_length=positions_of(config)[1], window=window)
    if head is not None:
        return head.from_pretrained(folder)
    return LongspanModel.from_pretrained(folder, add_pooling_layer=False)


def _without(gradient: Tensor, rows: int) -> Tensor:
    """A gradient without its first rows."""
    kept = gradient.clone()
    kept[:rows] = 0
    return kept
