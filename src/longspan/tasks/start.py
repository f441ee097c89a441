"""A checkpoint with a new head: what finetuning starts from."""

import copy
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from longspan.hub.convert import convert
from longspan.models import LongspanConfig, LongspanModel, LongspanPreTrainedModel
from longspan.train.finetuning import Start


def load_tokenizer(source: str | Path) -> Any:
    """The fast tokenizer beside a checkpoint: character offsets come from no other."""
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


def build_model(
    start: Start, head: type[LongspanPreTrainedModel], tokenizer: Any, **settings: Any
) -> Any:
    """A model of the class `head` with the encoder of a checkpoint, in float32.

    The head is new. The model may have more positions than `start.length` asks for.
    """
    assert start.source is not None
    if AutoConfig.from_pretrained(start.source).model_type == LongspanConfig.model_type:
        source = LongspanModel.from_pretrained(start.source, add_pooling_layer=False)
    else:
        source = convert(start.source, window=start.window)
    source = source.float()  # a checkpoint in half precision is still trained in float32
    if source.config.longest is not None and source.config.longest < start.length:
        source.extend_positions(start.length)
    config = copy.deepcopy(source.config)
    for name, value in settings.items():
        setattr(config, name, value)
    config.global_preset = start.global_tokens  # None leaves it to the head
    if start.pooling is not None:
        config.classifier_pooling = start.pooling
    config.sep_token_id = tokenizer.sep_token_id
    model = head(config)
    old: Any = source.base_model
    new: Any = model.base_model
    weights = old.state_dict()
    new.load_state_dict({name: weights[name] for name in new.state_dict()})
    if (config.global_preset or getattr(head, "preset", None)) == "none":
        _freeze_global(model)
    return model


def _freeze_global(model: Any) -> None:
    """Projections of global tokens where there are none: they would wait for a gradient in vain,
    and so would other processes, and a resumed run for what the optimiser knows of them."""
    for name, parameter in model.named_parameters():
        if "_global." in name:
            parameter.requires_grad_(False)
