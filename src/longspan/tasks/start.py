"""A checkpoint with a new head: what finetuning starts from."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
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


def add_tokens(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """Special tokens for a task; returns the ids of those that the tokenizer did not have."""
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([name for name in names if name not in known], special_tokens=True)
    return tokenizer.convert_tokens_to_ids([name for name in names if name not in known])


def build_model(
    start: Start,
    head: type[LongspanPreTrainedModel],
    tokenizer: Any,
    added: Sequence[int] = (),
    **settings: Any,
) -> Any:
    """A model of the class `head` with the encoder of a checkpoint, in float32.

    The head is new, and so are the embeddings of `added` tokens. The model may have more positions
    than `start.length` asks for.
    """
    assert start.source is not None
    if AutoConfig.from_pretrained(start.source).model_type == LongspanConfig.model_type:
        source = LongspanModel.from_pretrained(start.source, add_pooling_layer=False)
    else:
        source = convert(start.source, window=start.window)
    source = source.float()  # a checkpoint in half precision is still trained in float32
    if source.config.longest is not None and source.config.longest < start.length:
        source.extend_positions(start.length)
    if added:
        _embed(source, added)
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
