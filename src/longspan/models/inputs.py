"""What a model is given, checked: every refusal says what was wrong and what to do.

Shapes are always checked. Values are only where they can be looked at for free: on a CPU, outside
a graph. Elsewhere a lookup beyond a table fails by itself, and rows of padding alone give zeros.
"""

from operator import index
from typing import Any, cast

import torch
from torch import Tensor

from longspan.models.config import LongspanConfig


def readable(tensor: Tensor) -> bool:
    """Whether its values can be looked at: not in a graph, and not at the cost of a GPU's wait."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_tokens(
    config: LongspanConfig, input_ids: Tensor | None, inputs_embeds: Tensor | None
) -> Tensor:
    """Whichever of the two was given, or an error."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds")
    _check_tensor("input_ids", input_ids)
    _check_tensor("inputs_embeds", inputs_embeds)
    if input_ids is None:
        given = cast(Tensor, inputs_embeds)
        wanted = config.embedding_size
        if given.dim() != 3 or given.shape[2] != wanted:
            raise ValueError(
                f"inputs_embeds must be [batch, tokens, {wanted}], got {tuple(given.shape)}"
            )
    else:
        given = input_ids
        if given.dim() != 2:
            raise ValueError(f"input_ids must be [batch, tokens], got {tuple(given.shape)}")
        if given.dtype not in (torch.int64, torch.int32):  # no others are looked up in a table
            raise TypeError(f"input_ids must be int64 or int32, got {given.dtype}")
    if given.shape[0] == 0 or given.shape[1] == 0:
        raise ValueError(f"an empty batch: [batch, tokens] = {tuple(given.shape[:2])}")
    if input_ids is not None and readable(input_ids):
        low, high = _range(input_ids)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"token ids from {low} to {high}, but the vocabulary has ids from 0 to "
                f"{config.vocab_size - 1}: is the tokenizer another model's?"
            )
    return given


def as_bool(name: str, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A 0/1 mask [batch, tokens] of any dtype as bool."""
    check_shape(name, mask, like)
    if mask is not None and mask.dtype != torch.bool and readable(mask):
        low, high = (one.item() for one in mask.aminmax())
        if not (low >= 0 and high <= 1):  # NaN is neither
            # Longformer also takes an attention_mask with 2 for what is global.
            raise ValueError(
                f"{name} is 1 = yes, 0 = no, but this one has numbers from {low} to {high}: one of "
                "0 and -inf is something else, and which tokens are global is said by "
                "global_attention_mask"
            )
    return None if mask is None else mask != 0


def check_shape(name: str, tensor: Tensor | None, like: Tensor) -> None:
    """Raise unless a tensor is [batch, tokens], as that of shape [batch, tokens, ...] says."""
    if tensor is None:
        return
    _check_tensor(name, tensor)
    if tensor.shape != like.shape[:2]:
        raise ValueError(
            f"{name} must be [batch, tokens] = {tuple(like.shape[:2])}, got {tuple(tensor.shape)}"
        )
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, the tokens are on {like.device}")


def check_documents(tokens_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise if there is a document without a token: whatever a head said of it would be noise."""
    if tokens_mask is not None and readable(tokens_mask):
        empty = (~tokens_mask.any(dim=1)).nonzero().flatten().tolist()
        if empty and cu_seqlens is None:
            raise ValueError(f"attention_mask: rows {empty[:8]} are padding alone; leave them out")
    if cu_seqlens is not None and readable(cu_seqlens):
        empty = (cu_seqlens.diff() == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"cu_seqlens: documents {empty[:8]} have no token; leave them out")


def check_length(config: LongspanConfig, tokens: int, cu_seqlens: Tensor | None) -> None:
    """Raise if a document is longer than the model has positions."""
    most = config.longest
    if most is None:
        return
    if cu_seqlens is not None:
        if not readable(cu_seqlens):
            return  # the lookup in the table refuses what is beyond it
        tokens = int(cu_seqlens.diff().max())
    if tokens > most:
        tuning = ", best followed by some finetuning," if config.position == "learned" else ""
        raise ValueError(
            f"a document of {tokens} tokens, but the model has positions for {most}. Nothing "
            f"is cut silently: call model.extend_positions({tokens}){tuning} or shorten the "
            "input yourself"
        )


def whole(name: str, length: Any) -> int:
    """A number of tokens, also one of numpy's, as an int; or an error."""
    try:
        return index(length)
    except TypeError:
        raise TypeError(f"{name} must be a whole number of tokens, got {length!r}") from None


def check_positions(config: LongspanConfig, position_ids: Tensor) -> None:
    learned = config.position == "learned"
    if learned and position_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"position_ids must be int64 or int32, as rows of a table, got {position_ids.dtype}"
        )
    if config.longest is None or not readable(position_ids):
        return
    low, high = _range(position_ids)
    rows = config.max_position_embeddings
    if low < 0 or high >= rows:
        what = "the table has rows" if learned else "the model has positions"
        raise ValueError(
            f"position_ids from {low} to {high}, but {what} 0 to {rows - 1}; "
            "model.extend_positions(length) adds more"
        )


def check_types(config: LongspanConfig, token_type_ids: Tensor | None) -> None:
    if token_type_ids is None:
        return
    types = config.type_vocab_size
    if types == 0:
        raise ValueError("this model has no token types: leave token_type_ids out")
    if token_type_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token_type_ids must be int64 or int32, got {token_type_ids.dtype}")
    if readable(token_type_ids):
        low, high = _range(token_type_ids)
        if low < 0 or high >= types:
            raise ValueError(
                f"token_type_ids from {low} to {high}, but the model has types 0 to {types - 1}"
            )


def _check_tensor(name: str, given: object) -> None:
    if given is not None and not isinstance(given, Tensor):
        raise TypeError(
            f"{name} must be a tensor, got {type(given).__name__}: torch.tensor(...) makes one, "
            'and so does a tokenizer with return_tensors="pt"'
        )


def _range(ids: Tensor) -> tuple[int, int]:
    return int(ids.min()), int(ids.max())
