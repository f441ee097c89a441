"""Which tokens become global when nobody says so, and which did."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.utils import logging

from longspan.models.config import PRESETS
from longspan.models.inputs import readable
from longspan.ops.window import visibility

logger = logging.get_logger(__name__)


def choose_global(
    preset: str,
    like: Tensor,
    *,
    input_ids: Tensor | None = None,
    sep_token_id: int | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor | None, int | None]:
    """A mask [batch, tokens] for tokens shaped [batch, tokens, ...] like `like`, and how many
    global tokens a row has at most, where that is known without looking.

    - "first": the first token of each document, by the `attention_mask` if there is one.
    - "question": every token before the first separator, as question answering has it.
    - "candidates": every token behind the one or two separators that end the first text, where
      multiple choice has question and candidate.
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
        if attention_mask is not None:
            real = attention_mask != 0
            first = real & (real.cumsum(dim=1) == 1)
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
    separates = input_ids == sep_token_id
    before = pad(separates.cumsum(dim=1), (1, 0))
    from_start = before.gather(1, start)
    count = before.gather(1, stop) - from_start
    has_any = count > 0
    if readable(input_ids) and not bool(has_any.all()):
        logger.warning_once(
            f"A document has no separator (token {sep_token_id}), so where its question ends is "
            "unknown: only its first token is global. Give global_attention_mask to choose others."
        )
    passed = before[:, 1:] - from_start
    if preset == "question":
        return torch.where(has_any, passed == 0, first), None
    # Of three, as RoBERTa's tokenizer sets them and Longformer wants them, two end the first text:
    # neither place is global. Of BERT's two only one does, and the question begins behind it.
    one, two = ((passed > 0).roll(n, dims=1) & (place - start >= n) for n in (1, 2))
    doubled = separates & separates.roll(1, dims=1) & (passed == 2)
    ended = torch.where(count > 2, two, one & ~doubled)
    return torch.where(has_any, ended, first), None


_MEANT: ContextVar[bool] = ContextVar("none is meant to be global", default=False)


@contextmanager
def none_is_meant() -> Iterator[None]:
    """Within this, a task without global tokens is not warned about, nor counted as warned of."""
    before = _MEANT.set(True)
    try:
        yield
    finally:
        _MEANT.reset(before)


def warn_if_none(model: str, mask: Tensor | None) -> None:
    """Say once that a task is about to be done without any global token, where that is known."""
    if torch.compiler.is_compiling() or _MEANT.get():
        return
    if mask is None or (readable(mask) and not bool(mask.any())):
        logger.warning_once(
            f"{model}: no token is global, so each sees its windows alone, and the scores of a "
            "long document know nothing of its far end. Give global_attention_mask, or set "
            "config.global_preset."
        )


def explain_global(
    chosen: Any, input_ids: Tensor | None = None, tokenizer: Any = None, *, width: int = 60
) -> str:
    """Which tokens are global, a line for each row; with ids and a tokenizer, which words.

    >>> print(longspan.explain_global(model(**inputs), inputs["input_ids"], tokenizer))
    row 0: 5 of 812 tokens are global: 0-4 '<s>who wrote it?'

    Args:
        chosen: a model's output, or a mask [batch, tokens].
        input_ids: [batch, tokens], or [batch, choices, tokens] as they were given.
        width: characters of a run of tokens to be shown at most.
    """
    mask = chosen.get("global_attention_mask") if isinstance(chosen, Mapping) else chosen
    if mask is None:
        return "no token is global"
    rows = mask.flatten(0, -2).bool()
    ids = None if input_ids is None else input_ids.flatten(0, -2)
    if ids is not None and ids.shape != rows.shape:
        raise ValueError(
            f"input_ids {tuple(ids.shape)} are not those of the mask {tuple(rows.shape)}"
        )
    lines = []
    for index, row in enumerate(rows.cpu()):
        places = row.nonzero().flatten()
        runs = places.tensor_split((places.diff() > 1).nonzero().flatten() + 1)
        shown = []
        for run in runs if len(places) else ():
            first, last = int(run[0]), int(run[-1])
            name = str(first) if first == last else f"{first}-{last}"
            if ids is not None and tokenizer is not None:
                text = tokenizer.decode(ids[index, first : last + 1].tolist())
                name += f" {text if len(text) <= width else text[: width - 3] + '...'!r}"
            shown.append(name)
        what = f": {', '.join(shown)}" if shown else ""
        lines.append(f"row {index}: {len(places)} of {len(row)} tokens are global{what}")
    return "\n".join(lines)
