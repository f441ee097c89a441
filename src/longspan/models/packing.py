"""From a padded batch to its documents in one row, and back: pay for real tokens only."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_end


class Packing(NamedTuple):
    """Where the tokens of a padded batch [batch, tokens] went."""

    cu_seqlens: Tensor  # [batch + 1] int32: where each document begins in the row, and its end
    place: Tensor  # [total]: of each packed token in the flattened padded batch
    batch: int
    tokens: int


def unpad(
    attention_mask: Tensor, *tensors: Tensor, total: int | None = None
) -> tuple[Packing, tuple[Tensor, ...]]:
    """Pack tensors [batch, tokens, ...] into one row [1, total, ...] without their padding.

    >>> packing, (ids,) = unpad(attention_mask, input_ids)
    >>> hidden = model(ids, cu_seqlens=packing.cu_seqlens).last_hidden_state
    >>> padded = pad(packing, hidden)

    Positions count from the beginning of each document. How many real tokens there are is read
    from the mask, for which Python waits until a GPU has caught up; whoever made the batch knows,
    and says so by `total`.
    """
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be [batch, tokens], got {tuple(attention_mask.shape)}"
        )
    batch, tokens = attention_mask.shape
    for tensor in tensors:
        if tensor.shape[:2] != (batch, tokens):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} does not fit the attention_mask "
                f"[batch, tokens] = {(batch, tokens)}"
            )
    real = attention_mask != 0
    bounds = pad_end(real.sum(dim=1).cumsum(dim=0), (1, 0)).to(torch.int32)
    place = _places(real.flatten(), total)
    packed = tuple(tensor.flatten(0, 1)[place][None] for tensor in tensors)
    return Packing(bounds, place, batch, tokens), packed


def _places(real: Tensor, total: int | None) -> Tensor:
    """Where `real` [places] is true: so often as `total` says, where that is given."""
    if total is None:
        return real.nonzero().squeeze(1)
    # On a GPU it is the GPU that finds out, when it gets there.
    wrong = f"total={total} is not the number of real tokens in the attention_mask"
    if real.device.type == "cpu" and not torch.compiler.is_compiling():
        if int(real.sum()) != total:
            raise ValueError(f"{wrong}, which is {int(real.sum())}")
    else:
        torch._assert_async(real.sum() == total, wrong)
    return torch.nonzero_static(real, size=total).squeeze(1)


def pad(packing: Packing, packed: Tensor, value: float = 0.0) -> Tensor:
    """Undo `unpad`: [1, total, ...] -> [batch, tokens, ...], with `value` where padding was."""
    if packed.shape[:2] != (1, packing.place.shape[0]):
        raise ValueError(
            f"expected one row of {packing.place.shape[0]} tokens, got {tuple(packed.shape)}"
        )
    flat = packed.new_full((packing.batch * packing.tokens, *packed.shape[2:]), value)
    # Out of place, so that gradients flow back to the packed tokens.
    flat = flat.index_copy(0, packing.place, packed[0])
    return flat.unflatten(0, (packing.batch, packing.tokens))
