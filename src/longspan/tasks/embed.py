"""Embeddings of passages, each read in the context of its document ("late chunking").

The usual way cuts a document into pieces and embeds each by itself, so that a piece knows nothing
of what stands before it. Here the model reads as much of the document at a time as it has
positions for; a passage's vector is the mean of its tokens' states in that reading.
"""

import bisect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

Span = tuple[int, int]


class NoTokensError(ValueError):
    """A text in which a tokenizer finds nothing, of control characters say."""


@dataclass(frozen=True)
class Reading:
    """A document as a model has read it."""

    text: str
    states: Tensor  # [tokens, dim]
    offsets: list[Span]  # of each token: text[start:end]
    passes: list[Span]  # the tokens of each pass

    def pool(self, spans: Sequence[Span]) -> Tensor:
        """[spans, dim]: the mean state of the tokens that begin in each span, of unit length.

        Spans are characters of the text and may overlap. A token begins with its word, also where
        the tokenizer has the space before that belong to it. A span without tokens, of control
        characters say, has a vector of zeros, which is close to nothing.
        """
        begins = [_first_character(self.text, *own) for own in self.offsets]
        vectors = self.states.new_zeros(len(spans), self.states.shape[1])
        for index, (start, stop) in enumerate(spans):
            if not 0 <= start <= stop <= len(self.text):
                raise ValueError(
                    f"span {index} is {start}:{stop}, but the text has {len(self.text)} characters"
                )
            first, last = bisect.bisect_left(begins, start), bisect.bisect_left(begins, stop)
            if first < last:
                vectors[index] = self.states[first:last].mean(dim=0)
        return normalize(vectors, dim=1)


@dataclass(frozen=True)
class Passages:
    """Spans of a text with their vectors."""

    text: str
    spans: list[Span]
    vectors: Tensor  # [spans, dim], of unit length

    def ranked(self, query: Tensor) -> list[tuple[int, float]]:
        """(index of a span, cosine with `query` [dim]), the closest first.

        A passage that repeats a closer one word for word is left out.
        """
        scores = self.vectors @ query
        seen, ranked = set(), []
        for index in scores.argsort(descending=True, stable=True).tolist():
            start, stop = self.spans[index]
            words = " ".join(self.text[start:stop].split())
            if words not in seen:
                seen.add(words)
                ranked.append((index, float(scores[index])))
        return ranked


def embed(
    model: Any,
    tokenizer: Any,
    text: str,
    spans: Sequence[Span] | None = None,
    *,
    length: int | None = None,
    overlap: int | None = None,
) -> Passages:
    """Vectors of the passages of `text`, each read in its context.

    Args:
        model: a longspan encoder or any of transformers' that returns hidden states.
        tokenizer: its tokenizer, a fast one.
        spans: which characters to embed; by default the text's paragraphs, see `paragraphs`.
        length, overlap: of the passes, see `read`.
    """
    chosen = paragraphs(text) if spans is None else list(spans)
    reading = read(model, tokenizer, text, length=length, overlap=overlap)
    return Passages(text, chosen, reading.pool(chosen))


def embed_query(model: Any, tokenizer: Any, text: str) -> Tensor:
    """[dim], of unit length: a short text by itself, special tokens included, as sentence
    encoders are trained. One that does not fit into the model is refused, not cut."""
    if not text.strip():
        raise ValueError("the question is empty")
    given = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"].to(model.device)
    most = longest(model)
    if given.shape[1] > most:
        raise ValueError(f"the question has {given.shape[1]} tokens, the model room for {most}")
    with torch.no_grad():
        states = model(input_ids=given, attention_mask=torch.ones_like(given)).last_hidden_state
    return normalize(states[0].float().cpu().mean(dim=0), dim=0)  # as passages are


@torch.no_grad()
def read(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    length: int | None = None,
    overlap: int | None = None,
    batch_size: int = 1,
    progress: Callable[[int, int], object] | None = None,
) -> Reading:
    """The states of all tokens of `text`, in passes of `length` tokens.

    Passes overlap where there is more than one; a token's state is taken from the pass in which
    the nearer edge is farthest away. No token is left out.

    Args:
        length: of a pass, special tokens included; by default as many as the model has positions.
        overlap: of neighbouring passes, in tokens; by default an eighth of the length. The last
            pass ends with the text, so its overlap may be larger.
        batch_size: passes computed at a time.
        progress: called after each batch with the number of passes done and of all.
    """
    most = longest(model)
    length = most if length is None else length
    before, after = _special_tokens(tokenizer)
    room = length - len(before) - len(after)
    if not room > 0 or length > most:
        raise ValueError(
            f"length={length}: a pass holds at least {length - room + 1} tokens and, in this "
            f"model, at most {most}"
        )
    overlap = length // 8 if overlap is None else overlap
    if not 0 <= overlap < room:
        raise ValueError(f"overlap={overlap} must be at least 0 and below {room}, a pass's tokens")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = torch.tensor(encoded["input_ids"], dtype=torch.long)
    if len(tokens) == 0:
        raise NoTokensError("the document has no tokens")
    passes = cut(len(tokens), room, overlap)
    states = None
    for done in range(0, len(passes), batch_size):
        batch = passes[done : done + batch_size]
        rows = [torch.cat([before, tokens[start:stop], after]) for start, stop in batch]
        ids = torch.stack(rows).to(model.device)
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        output = output[:, len(before) : ids.shape[1] - len(after)].float().cpu()
        if states is None:
            states = output.new_empty(len(tokens), output.shape[2])
        for index, row in enumerate(output, start=done):
            start = passes[index][0]
            first, last = owned(passes, index)
            states[first:last] = row[first - start : last - start]
        if progress is not None:
            progress(min(done + batch_size, len(passes)), len(passes))
    assert states is not None
    return Reading(text, states, [tuple(pair) for pair in encoded["offset_mapping"]], passes)


def cut(tokens: int, room: int, overlap: int) -> list[Span]:
    """Passes of `room` tokens (fewer only if there are no more) that cover all tokens."""
    if tokens <= room:
        return [(0, tokens)]
    starts = [*range(0, tokens - room, room - overlap), tokens - room]
    return [(start, start + room) for start in starts]


def owned(passes: Sequence[Span], index: int) -> Span:
    """The tokens whose state is taken from a pass: up to the middle of each overlap."""
    start, stop = passes[index]
    first = 0 if index == 0 else (start + passes[index - 1][1]) // 2
    last = stop if index == len(passes) - 1 else (passes[index + 1][0] + stop) // 2
    return first, last


def paragraphs(text: str, least: int = 300, most: int = 1500) -> list[Span]:
    """The paragraphs of `text`, set apart by blank lines, as characters start:stop.

    One of fewer than `least` characters is joined with the next, so that headings and the items
    of a list stay with what they belong to; one of more than `most` is taken apart, where lines or
    sentences end if it can be. All but white space is in one of them.
    """
    sentence = rf"\S.{{0,{most - 2}}}?(?:[.!?](?=\s)|(?=\n)|\Z)|\S.{{0,{most - 1}}}"
    units: list[Span] = []
    # Line by line: what `re` repeats it remembers, and characters would be too many.
    for block in re.finditer(r"\S[^\n]*(?:\n(?!\s*\n)[^\n]*)*", text):
        start, stop = block.start(), block.start() + len(block[0].rstrip())
        if stop - start <= most:
            units.append((start, stop))
        else:
            found = re.compile(sentence, re.DOTALL).finditer(text, start, stop)
            units += [(one.start(), one.start() + len(one[0].rstrip())) for one in found]
    spans: list[Span] = []
    for start, stop in units:
        if spans and spans[-1][1] - spans[-1][0] < least and stop - spans[-1][0] <= most:
            start = spans.pop()[0]
        spans.append((start, stop))
    return spans


def longest(model: Any) -> int:
    """The most tokens a pass of `model` can have."""
    config = model.config
    if hasattr(config, "longest"):
        return config.longest or 2**31
    # RoBERTa and its kin count from behind the row of padding.
    reserved = [
        table.padding_idx + 1
        for name, table in model.named_modules()
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None
    ]
    return config.max_position_embeddings - max(reserved, default=0)


def _first_character(text: str, start: int, stop: int) -> int:
    """The first of text[start:stop] that is no white space, if any is none."""
    return next((place for place in range(start, stop) if not text[place].isspace()), start)


def _special_tokens(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """What the tokenizer puts before and behind a text."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for; "
            "use the fast tokenizer of the model"
        )
    given = tokenizer("a", return_special_tokens_mask=True)
    ids, special = given["input_ids"], given["special_tokens_mask"]
    if 0 not in special:
        raise ValueError(f"{type(tokenizer).__name__} makes no token of the letter a: is it empty?")
    last = len(special) - special[::-1].index(0)
    return torch.tensor(ids[: special.index(0)]).long(), torch.tensor(ids[last:]).long()
