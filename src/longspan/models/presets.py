"""Which tokens become global when nobody says so."""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.utils import logging

from longspan.models.inputs import readable
from longspan.ops.window import visibility

logger = logging.get_logger(__name__)

PRESETS = ("none", "first", "question", "candidates")


def choose_global(
    preset: str,
    like: Tensor,
    *,
    input_ids: Tensor | None = None,
    sep_token_id: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor | None, int | None]:
    """A mask [batch, tokens] for tokens shaped [batch, tokens, ...] like `like`, and how many
    global tokens a row has at most, where that is known without looking.

    - "first": the first token of each document.
    - "question": every token before the first separator, as question answering has it.
    - "candidates": every token behind the two separators that end the question.
    - "none": no token.
    """
    if preset == "none":
        return None, None
    batch, tokens = like.shape[:2]
    place = torch.arange(tokens, device=like.device).expand(batch, tokens)
    seen = visibility(like, cu_seqlens=cu_seqlens)
    start = torch.zeros_like(place) if seen.start is None else seen.start.long()
    stop = torch.full_like(place, tokens) if seen.stop is None else seen.stop.long()
    first = (place == start) & (stop > 0)
    documents = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if preset == "first":
        return first, documents
    if preset not in PRESETS:
        raise ValueError(f"global_preset={preset!r} is unknown; choose from {', '.join(PRESETS)}")
    if input_ids is None or sep_token_id is None:
        if not torch.compiler.is_compiling():
            missing = "input_ids" if input_ids is None else "config.sep_token_id"
            logger.warning_once(
                f"Without {missing} the question cannot be found: only the first token is global. "
                "Give global_attention_mask to choose others."
            )
        return first, documents
    # Separators before each place, then counted within the document the place is in.
    before = pad((input_ids == sep_token_id).cumsum(dim=1), (1, 0))
    from_start = before.gather(1, start)
    has_any = before.gather(1, stop) > from_start
    if readable(input_ids) and not bool(has_any.all()):
        logger.warning_once(
            f"A document has no separator (token {sep_token_id}), so where its question ends is "
            "unknown: only its first token is global. Give global_attention_mask to choose others."
        )
    passed = before[:, 1:] - from_start
    if preset == "question":
        return torch.where(has_any, passed == 0, first), None
    # The separator that ends the question has a second one, or a candidate, behind it: as in
    # transformers, neither of the two places is global.
    ended = (passed > 0).roll(2, dims=1) & (place - start >= 2)
    return torch.where(has_any, ended, first), None
