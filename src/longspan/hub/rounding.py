"""What int8 weights cost: how far they move hidden states and embeddings of whole documents."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from longspan.models import LongspanPreTrainedModel

# Documents longer than this are compared on their beginning.
MOST_TOKENS = 4096


@dataclass(frozen=True)
class Rounding:
    """On one input: the largest and the mean difference of hidden states, the largest of these
    states, and the smallest cosine between embeddings of a document (means over its tokens)."""

    what: str
    tokens: int
    largest: float
    mean: float
    size: float
    cosine: float


@torch.no_grad()
def compare(
    exact: LongspanPreTrainedModel,
    rounded: LongspanPreTrainedModel,
    inputs: Iterable[tuple[str, Tensor]],
) -> list[Rounding]:
    """The encoders of both models on each input, ids [documents, tokens]."""
    reports = []
    for what, ids in inputs:
        given: Any = {"input_ids": ids, "global_attention_mask": torch.zeros_like(ids)}
        given["global_attention_mask"][:, 0] = 1
        first, second = (
            model.base_model.eval()(**given).last_hidden_state.float() for model in (exact, rounded)
        )
        apart = (first - second).abs()
        # In float32 a cosine can be above 1.
        means = (states.double().mean(dim=1) for states in (first, second))
        cosine = cosine_similarity(*means, dim=-1).min()
        numbers = (apart.max(), apart.mean(), first.abs().max(), cosine)
        reports.append(Rounding(what, ids.shape[1], *(number.item() for number in numbers)))
    return reports
