"""Documents as words with the clusters of their mentions, in the forms that data sets have them."""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longspan.data.examples import Skips
from longspan.data.tables import Row
from longspan.tasks.embed import Span
from longspan.tasks.questions import decode

Clusters = list[list[Span]]  # first and last word of each mention

EMPTY = "the document is empty"
# Titles and initials keep their full stop, and what follows a possessor is a word of its own.
_WORDS = re.compile(
    r"\b(?:Mr|Mrs|Ms|Messrs|Dr|St|Prof|Jr|Sr|Capt|Col|Rev|[A-HJ-Z])\."
    r"|['’]s\b|\w+(?:['’](?!s\b)\w+)*|[^\w\s]"  # noqa: RUF001
)
_ENDING, _CLOSING = set(".!?…"), set("\"'”’)]»")  # noqa: RUF001


class Words(NamedTuple):
    """A document: its text, and of each word the characters start:stop, the sentence, the speaker
    (0 = unknown) and its form (the same number for the same letters)."""

    id: str
    text: str
    offsets: np.ndarray  # [words, 2]
    sentence: np.ndarray
    speaker: np.ndarray
    form: np.ndarray
    genre: str
    clusters: Clusters

    def sentences(self) -> list[list[str]]:
        made: list[list[str]] = []
        for place, (start, stop) in enumerate(self.offsets.tolist()):
            if place == 0 or self.sentence[place] != self.sentence[place - 1]:
                made.append([])
            made[-1].append(self.text[start:stop])
        return made


def read_words(row: Row, columns: Mapping[str, str], skips: Skips | None = None) -> Words | None:
    """The document of a row, or None if it has no words.

    Column "sentences" holds lists of words, and "clusters", "speakers" (a name for each word) and
    "genre" may stand beside it, as in CoNLL's files; a table of text has them as JSON. The text is
    the words with a space between them. Without it, column "text" is cut into words and sentences.
    """
    name = columns.get("sentences", "sentences")
    identity = row.values.get(columns.get("id", "id"))
    genre = row.values.get(columns.get("genre", "genre")) or ""
    if name not in row.values and columns.get("text", "text") in row.values:
        text = row.text(columns.get("text", "text"))
        offsets, sentence = _cut(text)
        speakers: list[str] = []
    else:
        sentences = _nested(row, name, str)
        words = [word for one in sentences for word in one]
        text = " ".join(words)
        sizes = np.array([len(word) for word in words], dtype=np.int64)
        starts = np.cumsum(sizes + 1) - sizes - 1
        offsets = np.stack([starts, starts + sizes], axis=1)
        sentence = np.repeat(np.arange(len(sentences)), [len(one) for one in sentences])
        speakers = _speakers(row, columns, sentences)
    if not len(offsets):
        return None
    forms: dict[str, int] = {}
    form = [forms.setdefault(text[a:b].lower(), len(forms)) for a, b in offsets.tolist()]
    names: dict[str, int] = {"": 0}
    known = [names.setdefault(one, len(names)) for one in speakers] or [0] * len(offsets)
    clusters = _clusters(row, columns.get("clusters", "clusters"), len(offsets), skips)
    return Words(
        row.where if identity in (None, "") else str(identity),
        text,
        offsets,
        sentence.astype(np.int64),
        np.array(known),
        np.array(form),
        str(genre),
        clusters,
    )


def _nested(row: Row, column: str, kind: type) -> list[list[Any]]:
    value = decode(row, column)
    if isinstance(value, list) and all(
        isinstance(one, list) and all(isinstance(part, kind) for part in one) for one in value
    ):
        return [one for one in value if one]
    raise ValueError(
        f"{row.where}, column {column!r}: expected sentences, each a list of words, found "
        f"{value!r:.60}"
    )


def read_speakers(row: Row, columns: Mapping[str, str]) -> list[list[str]]:
    """A name for each word of each sentence; nothing where nobody is named, or where words are
    still to be cut from a text."""
    column = columns.get("speakers", "speakers")
    is_cut = columns.get("sentences", "sentences") in row.values
    return _nested(row, column, str) if is_cut and row.values.get(column) not in (None, "") else []


def _speakers(row: Row, columns: Mapping[str, str], sentences: list[list[str]]) -> list[str]:
    names = read_speakers(row, columns)
    if not names:
        return []
    if [len(one) for one in names] != [len(one) for one in sentences]:
        raise ValueError(
            f"{row.where}, column {columns.get('speakers', 'speakers')!r}: there should be a "
            "speaker for each word, an empty one if nobody knows"
        )
    return [name for one in names for name in one]


def _clusters(row: Row, column: str, words: int, skips: Skips | None) -> Clusters:
    if row.values.get(column) in (None, ""):
        return []
    value = decode(row, column)
    seen: set[Span] = set()
    made = []
    try:
        given = [[(int(first), int(last)) for first, last in cluster] for cluster in value]
        told = [[(float(first), float(last)) for first, last in cluster] for cluster in value]
        if given != told:
            raise ValueError("half a word")
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{row.where}, column {column!r}: expected clusters of mentions, each the numbers of "
            f"its first and last word, found {value!r:.60}"
        ) from None
    for cluster in given:
        for first, last in cluster:
            if not 0 <= first <= last < words:
                raise ValueError(
                    f"{row.where}, column {column!r}: the mention [{first}, {last}] is not within "
                    f"the document's words 0 to {words - 1}"
                )
        own = sorted(set(cluster) - seen)
        for mention in sorted(set(cluster) & seen):
            if skips is not None:
                skips.add(
                    "a mention is in two clusters, and stays in the first",
                    f"{row.where}, {mention}",
                )
        seen |= set(own)
        made += [own] if own else []
    return made


def _cut(text: str) -> tuple[np.ndarray, np.ndarray]:
    """[words, 2] characters of each word, and the number of each word's sentence."""
    # Accents and vowel signs that are characters of their own belong to their word, but `re` does
    # not take them for letters: each is read as one.
    found = list(_WORDS.finditer(re.sub(r"[^\w\s]", _letter, text)))
    offsets = np.array([word.span() for word in found], dtype=np.int64).reshape(-1, 2)
    sentence = np.zeros(len(found), dtype=np.int64)
    number, ended = 0, False
    for place, word in enumerate(found):
        before = text[found[place - 1].end() : word.start()] if place else ""
        if "\n\n" in before or (ended and before):
            number, ended = number + 1, False
        sentence[place] = number
        ended = word[0] in _ENDING or (ended and word[0] in _CLOSING)
    return offsets, sentence


def _letter(character: re.Match[str]) -> str:
    is_mark = unicodedata.category(character[0]).startswith("M")
    return "x" if is_mark else character[0]


def cuts(borders: Sequence[np.ndarray], total: int, room: int) -> list[Span]:
    """Spans of at most `room` tokens that cover `total`, cut at the last of the first kind of
    border that lies within reach, else at one of the next kind, else anywhere."""
    spans, start = [], 0
    while start < total:
        stop = total
        if total - start > room:
            stop = next(_within(borders, start, start + room), start + room)
        spans.append((start, stop))
        start = stop
    return spans


def _within(borders: Sequence[np.ndarray], start: int, stop: int) -> Iterator[int]:
    for places in borders:
        index = int(np.searchsorted(places, stop, side="right")) - 1
        if index >= 0 and places[index] > start:
            yield int(places[index])
