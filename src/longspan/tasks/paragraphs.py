"""Paragraphs as tokens, laid out one behind the other as HotpotQA's model reads them.

[CLS] [q] question [/q] <t> title </t> sentence [s] sentence [s] <t> title </t> ... [SEP]
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from longspan.tasks.documents import Piece, Template, make_template, pieces, tokenize
from longspan.tasks.hops import KINDS, Hop
from longspan.train.finetuning import Finetuning

TOKENS = ("[q]", "[/q]", "<t>", "</t>", "[s]")


class Part(NamedTuple):
    """A paragraph as tokens; the first of them stands for the whole of it."""

    ids: np.ndarray
    unit: np.ndarray  # 0 in the title, from 1 on in a sentence, -1 = a special token
    offsets: np.ndarray  # [tokens, 2]: characters of the unit
    ends: np.ndarray  # the token behind each sentence, which stands for it
    answers: np.ndarray  # [answers, 2]: first and last token of right ones
    evidence: np.ndarray  # [sentences] of bool
    relevant: bool


class Asked(NamedTuple):
    """A question as tokens, its paragraphs, and which of them are read."""

    question: np.ndarray
    parts: list[Part]
    chosen: tuple[int, ...]
    kind: int

    def choose(self, places: Sequence[int]) -> "Asked":
        return self._replace(chosen=tuple(sorted(places)))

    @property
    def read(self) -> list[Part]:
        return [self.parts[place] for place in self.chosen]

    @property
    def size(self) -> int:
        return len(self.question) + sum(len(part.ids) for part in self.read)


class Layout(NamedTuple):
    """What of a question is in a batch: less than there is, if the model reads its beginning only.

    Each place is one in the flattened row or rows of the batch.
    """

    tokens: np.ndarray  # places of tokens that may be answers
    within: np.ndarray  # [tokens, 2]: paragraph, and token in it
    unit: np.ndarray  # [tokens]: another number for each title and sentence
    titles: np.ndarray  # places
    paragraphs: np.ndarray  # the number of each
    ends: np.ndarray  # places
    sentences: np.ndarray  # [sentences, 2]: paragraph, and number in it


def encode(tokenizer: Any, hops: Sequence[Hop]) -> list[Asked]:
    ask, asked, title, titled, end = tokenizer.convert_tokens_to_ids(TOKENS)
    questions = tokenize(tokenizer, [f" {one.question}" for one in hops])
    words = _words(tokenizer, hops)
    found = []
    for hop, question in zip(hops, questions, strict=True):
        places, relevant, facts = hop.places(), hop.relevant(), set(hop.facts)
        parts = []
        for number, paragraph in enumerate(hop.paragraphs):
            ids, unit, offsets, ends, answers = [], [], [], [], []
            for place in range(len(paragraph.sentences) + 1):
                own, spans = next(words)
                begin = len(ids) + (place == 0)
                for start, stop in places.get((number, place), ()):
                    first = np.searchsorted(spans[:, 1], start, side="right")
                    last = np.searchsorted(spans[:, 0], stop, side="left") - 1
                    if first <= last:
                        answers.append((begin + first, begin + last))
                before, after = ([title], [titled]) if place == 0 else ([], [end])
                ids += [*before, *own, *after]
                unit += [-1] * len(before) + [place] * len(own) + [-1]
                offsets += [(0, 0)] * len(before) + spans.tolist() + [(0, 0)]
                if place:
                    ends.append(len(ids) - 1)
            is_fact = [(paragraph.title, n) in facts for n in range(len(ends))]
            parts.append(
                Part(
                    np.array(ids, dtype=np.int32),
                    np.array(unit, dtype=np.int32),
                    np.array(offsets, dtype=np.int32).reshape(-1, 2),
                    np.array(ends, dtype=np.int64),
                    np.array(answers, dtype=np.int64).reshape(-1, 2),
                    np.array(is_fact, dtype=bool),
                    relevant[number],
                )
            )
        whole = np.array([ask, *question.ids, asked], dtype=np.int32)
        found.append(Asked(whole, parts, tuple(range(len(parts))), KINDS.index(hop.kind)))
    return found


def _words(tokenizer: Any, hops: Sequence[Hop]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and offsets of all titles and sentences, with a space in front of each, so that words
    are the same tokens wherever they stand."""
    texts = [
        paragraph.unit(place)
        for hop in hops
        for paragraph in hop.paragraphs
        for place in range(len(paragraph.sentences) + 1)
    ]
    spaced = [text if text[:1].isspace() else f" {text}" for text in texts]
    for text, own, found in zip(texts, spaced, tokenize(tokenizer, spaced), strict=True):
        yield found.ids, np.maximum(found.offsets - (len(own) - len(text)), 0)


def make_layout_template(tokenizer: Any) -> Template:
    usual = make_template(tokenizer, pair=True)
    return Template(usual.before, [], usual.after, usual.has_types)


def cut(asked: Asked, recipe: Finetuning, template: Template) -> list[Piece]:
    """Pieces that the model can read, of whole paragraphs where these fit."""
    parts = [part.ids for part in asked.read]
    return pieces(
        np.concatenate(parts),
        recipe.model.length,
        template,
        recipe.too_long,
        recipe.overlap,
        asked.question,
        breaks=np.cumsum([len(part) for part in parts]).tolist(),
    )


def lay_out(asked: Asked, cuts: Sequence[Piece], begins: Sequence[int]) -> Layout:
    """Where everything stands, with pieces that begin at such places of the batch."""
    where = np.full(cuts[-1].owned[1], -1)
    for begin, piece in zip(begins, cuts, strict=True):
        where[slice(*piece.owned)] = np.arange(*piece.owned) + begin + piece.begin - piece.span[0]
    rows, titles, ends, first, units = [], [], [], 0, 0
    for number in asked.chosen:
        part = asked.parts[number]
        if first < len(where):
            titles.append((where[first], number))
        for sentence, end in enumerate(part.ends):
            if first + end < len(where):
                ends.append((where[first + end], number, sentence))
        own = np.flatnonzero(part.unit >= 0)
        own = own[own < len(where) - first]
        rows.append(
            np.stack(
                [where[first + own], np.full(len(own), number), own, part.unit[own] + units], axis=1
            )
        )
        first, units = first + len(part.ids), units + len(part.ends) + 1
    table = np.concatenate(rows)
    heads = np.array(titles).reshape(-1, 2)
    marks = np.array(ends, dtype=np.int64).reshape(-1, 3)
    return Layout(
        table[:, 0], table[:, 1:3], table[:, 3], heads[:, 0], heads[:, 1], marks[:, 0], marks[:, 1:]
    )


def right_answers(asked: Asked, at: Layout) -> np.ndarray:
    """[2, tokens] of bool: where right answers start and end.

    Where none is, all places are right: that loss is 0, and so are its gradients.
    """
    right = np.zeros((2, len(at.tokens)), dtype=bool)
    for place in asked.chosen:
        for row, tokens in zip(right, asked.parts[place].answers.T, strict=True):
            row |= (at.within[:, 0] == place) & np.isin(at.within[:, 1], tokens)
    if not right.any(axis=1).all():
        right[:] = True
    return right
