"""What a decoder is given, checked, and made from what it shall predict."""

import torch
from torch import Tensor

from longspan.models.inputs import readable
from longspan.models.seq2seq_config import LongspanSeq2SeqConfig

IGNORED = -100  # a label that is not to be predicted


def check_labels(config: LongspanSeq2SeqConfig, labels: Tensor) -> None:
    if labels.dim() != 2 or labels.is_floating_point():
        raise ValueError(
            f"labels must be integers [batch, target], got {labels.dtype} {tuple(labels.shape)}"
        )
    if labels.shape[1] == 0:
        raise ValueError("labels: targets are empty; a target ends with at least its eos token")
    if not readable(labels):
        return
    asked = labels != IGNORED
    empty = (~asked.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"labels: the targets of rows {empty[:8]} are empty, all {IGNORED}; leave them out"
        )
    _check_range(config, labels[asked], "labels")


def check_decoder_input(
    config: LongspanSeq2SeqConfig, decoder_input_ids: Tensor | None, labels: Tensor | None
) -> Tensor:
    if decoder_input_ids is None:
        raise ValueError("give labels, or decoder_input_ids, or call generate")
    if decoder_input_ids.dim() != 2 or decoder_input_ids.shape[1] == 0:
        raise ValueError(
            "decoder_input_ids must be [batch, target] with at least one token, got "
            f"{tuple(decoder_input_ids.shape)}"
        )
    if labels is not None and labels.shape != decoder_input_ids.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} are not those of decoder_input_ids "
            f"{tuple(decoder_input_ids.shape)}"
        )
    if readable(decoder_input_ids):
        _check_range(config, decoder_input_ids, "decoder_input_ids")
    return decoder_input_ids


def check_target_length(config: LongspanSeq2SeqConfig, tokens: int) -> None:
    if tokens > config.decoder_positions:
        raise ValueError(
            f"a target of {tokens} tokens, but the decoder has positions for "
            f"{config.decoder_positions}. Nothing is cut silently: shorten the targets, or "
            "generate with a smaller max_length or max_new_tokens"
        )


def shift_right(config: LongspanSeq2SeqConfig, labels: Tensor) -> Tensor:
    """[batch, target]: each token's predecessor, and in front what begins a target."""
    padding = config.pad_token_id
    if padding is None:
        raise ValueError("config.pad_token_id is not set; without it targets cannot be padded")
    tokens = torch.where(labels == IGNORED, padding, labels)
    if config.wrap_target:
        last = (tokens != padding).sum(dim=1, keepdim=True) - 1
        start = tokens.gather(1, last.clamp(min=0))
    elif config.decoder_start_token_id is None:
        raise ValueError(
            "config.decoder_start_token_id is not set, so how a target begins is unknown"
        )
    else:
        start = torch.full_like(tokens[:, :1], config.decoder_start_token_id)
    return torch.cat((start, tokens[:, :-1]), dim=1)


def _check_range(config: LongspanSeq2SeqConfig, ids: Tensor, name: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"{name} from {low} to {high}, but the vocabulary has ids from 0 to "
            f"{config.vocab_size - 1}: is the tokenizer another model's?"
        )
