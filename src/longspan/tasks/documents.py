"""Documents as tokens, cut into what a model can read, and batches of the pieces.

What is longer than the model is never cut silently: a policy says what happens to it, and a
`Reach` says to how many documents it did.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from longspan.data.examples import unwatched
from longspan.tasks.embed import Span, cut, owned
from longspan.train.finetuning import Finetuning, TooLong

_AT_ONCE = 64  # documents that are tokenised together


class Tokens(NamedTuple):
    """A text's tokens without special ones; offsets [tokens, 2] are characters of the text."""

    ids: np.ndarray
    offsets: np.ndarray


class Template(NamedTuple):
    """What a tokenizer puts before, between and behind a question and a document."""

    before: list[int]
    between: list[int]
    after: list[int]
    has_types: bool  # whether the two differ in their token types

    @property
    def size(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


class Piece(NamedTuple):
    """Tokens that are read together: a document, or the part of one that fits."""

    ids: np.ndarray  # special tokens and question included
    begin: int  # of the document's tokens among them
    span: Span  # the document's tokens in it
    owned: Span  # those that stand no farther from the edge in a neighbouring piece


class Reach(NamedTuple):
    """How many of some documents the model cannot read at once."""

    documents: int
    too_long: int
    longest: int
    room: int

    def share(self, policy: TooLong) -> str:
        what = {"refuse": "refused", "split": "read in pieces", "head": "read in part only"}
        return (
            f"{self.too_long:,} of {self.documents:,} documents "
            f"({self.too_long / max(1, self.documents):.1%}) have more than {self.room:,} tokens "
            f"(the longest {self.longest:,}) and are {what[policy]}"
        )

    def check(self, policy: TooLong) -> None:
        if self.too_long and policy == "refuse":
            raise ValueError(
                f"{self.share(policy)}: a larger model.length reads more at once, --too-long split "
                "reads them in pieces, --too-long head reads their beginning only"
            )


def make_template(tokenizer: Any, pair: bool) -> Template:
    given = tokenizer(
        "a", *(["a"] if pair else []), return_special_tokens_mask=True, return_token_type_ids=True
    )
    ids, special = given["input_ids"], given["special_tokens_mask"]
    if special.count(0) < 1 + pair:
        raise ValueError(f"{type(tokenizer).__name__} makes no token of the letter a: is it empty?")
    first = special.index(0)
    last = len(ids) - special[::-1].index(0)
    between = [id for id, own in zip(ids[first:last], special[first:last], strict=True) if own]
    return Template(ids[:first], between, ids[last:], has_types=any(given["token_type_ids"]))


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[Tokens]:
    found = []
    for encoded in _encode(tokenizer, texts, offsets=True):
        for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            pairs = np.array(offsets, dtype=np.int32).reshape(-1, 2)
            found.append(Tokens(np.array(ids, dtype=np.int32), pairs))
    return found


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids alone, which for much text is a good deal faster."""
    return [
        np.array(ids, dtype=np.int32)
        for encoded in _encode(tokenizer, texts, offsets=False)
        for ids in encoded["input_ids"]
    ]


def _encode(tokenizer: Any, texts: Sequence[str], *, offsets: bool) -> Iterator[Any]:
    rounds = range(0, len(texts), _AT_ONCE)
    quiet = len(rounds) <= 16 or unwatched()
    for first in track(rounds, "tokenising", transient=True, disable=quiet):
        yield tokenizer(
            list(texts[first : first + _AT_ONCE]),
            add_special_tokens=False,
            return_offsets_mapping=offsets,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )


def reach(lengths: Sequence[int], room: int) -> Reach:
    return Reach(len(lengths), sum(n > room for n in lengths), max(lengths, default=0), room)


def pieces(
    document: np.ndarray,
    length: int,
    template: Template,
    policy: TooLong,
    overlap: int = 0,
    question: np.ndarray | None = None,
    breaks: Sequence[int] = (),
) -> list[Piece]:
    """Pieces of at most `length` tokens that cover a document; with "head" the first one alone.

    `breaks` are tokens at which a piece better begins, in their order; pieces do not overlap there.
    """
    front = [*template.before]
    if question is not None:
        front += [*question, *template.between]
    room = length - len(front) - len(template.after)
    if room <= overlap:
        raise ValueError(
            f"a question of {0 if question is None else len(question)} tokens leaves room for "
            f"{max(room, 0)} of the document in {length}: shorten it, or set a larger "
            f"model.length or a smaller overlap ({overlap} has to be below that room)"
        )
    if len(breaks) and policy == "split":
        spans = _cut_at(breaks, len(document), room, overlap)
    else:
        spans = cut(len(document), room, overlap)
    spans = spans[:1] if policy == "head" else spans
    made = []
    for index, (start, stop) in enumerate(spans):
        ids = np.concatenate([front, document[start:stop], template.after]).astype(np.int64)
        made.append(Piece(ids, len(front), (start, stop), owned(spans, index)))
    return made


def beyond(tokens: int, found: Sequence[Piece]) -> dict[str, int]:
    """What a prediction says of a document that was not read at once: of how many tokens nothing
    was read, or in how many pieces it was."""
    unread = tokens - found[-1].span[1]
    if unread > 0:
        return {"unread": unread}
    return {"pieces": len(found)} if len(found) > 1 else {}


def cut_off(
    document: np.ndarray,
    recipe: Finetuning,
    template: Template,
    question: np.ndarray | None = None,
) -> dict[str, int]:
    """The same of a document that is read as the recipe says."""
    settings = recipe.model.length, template, recipe.too_long, recipe.overlap
    return beyond(len(document), pieces(document, *settings, question))


def check_room(
    front: np.ndarray,
    recipe: Finetuning,
    template: Template,
    tokenizer: Any,
    of: str,
    what: str = "a question",
) -> None:
    """Raise if what stands before a text leaves too little room for that."""
    length, overlap = recipe.model.length, recipe.overlap
    room = length - len(front) - template.size
    if room <= overlap:
        raise ValueError(
            f"{tokenizer.decode(front[:12], skip_special_tokens=True).strip()!r} ...: {what} of "
            f"{len(front):,} tokens leaves room for {max(room, 0):,} of the {of} in "
            f"model.length={length:,}: shorten it, or set a larger model.length "
            f"or a smaller overlap ({overlap} has to be below that room)"
        )


def _cut_at(breaks: Sequence[int], tokens: int, room: int, overlap: int) -> list[Span]:
    """As few pieces as hold the parts between breaks whole; a part beyond the room is cut."""
    found: list[Span] = []
    for start, stop in pairwise([0, *(place for place in breaks if 0 < place < tokens), tokens]):
        if stop - start > room:
            found += [(start + a, start + b) for a, b in cut(stop - start, room, overlap)]
        elif found and stop - found[-1][0] <= room:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def read_whole(
    documents: Sequence[np.ndarray],
    recipe: Finetuning,
    template: Template,
    pad_id: int,
    questions: Sequence[np.ndarray] | None = None,
) -> tuple[list[list[Piece]], dict[str, Tensor], list[int]]:
    """The pieces of each document as a recipe wants them, behind its question if there are any;
    then what `collate` makes of all of them."""
    settings = recipe.model.length, template, recipe.too_long, recipe.overlap
    own = [
        pieces(document, *settings, None if questions is None else questions[place])
        for place, document in enumerate(documents)
    ]
    all_pieces = [piece for group in own for piece in group]
    types = questions is not None and template.has_types
    return own, *collate(all_pieces, packed=recipe.packed, pad_id=pad_id, types=types)


def collate(
    found: Sequence[Piece], *, packed: bool, pad_id: int, types: bool = False
) -> tuple[dict[str, Tensor], list[int]]:
    """What a model takes, and where each piece begins in the flattened row or rows.

    Packed, everything stands in one row with its boundaries; else each piece has a row.
    """
    sizes = [len(piece.ids) for piece in found]
    kinds = [np.arange(len(piece.ids)) >= piece.begin for piece in found]
    if packed:
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        batch = {
            "input_ids": torch.from_numpy(np.concatenate([piece.ids for piece in found]))[None],
            "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
        }
        if types:
            batch["token_type_ids"] = torch.from_numpy(np.concatenate(kinds).astype(np.int64))[None]
        return batch, bounds[:-1].tolist()
    shape = len(found), max(sizes)
    ids, mask, second = np.full(shape, pad_id), np.zeros(shape), np.zeros(shape)
    for row, piece in enumerate(found):
        ids[row, : sizes[row]], mask[row, : sizes[row]] = piece.ids, 1
        second[row, : sizes[row]] = kinds[row]
    batch = {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
    }
    if types:
        batch["token_type_ids"] = torch.from_numpy(second.astype(np.int64))
    return batch, [row * shape[1] for row in range(shape[0])]
