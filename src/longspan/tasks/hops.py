"""Questions whose answer follows from several paragraphs, in HotpotQA's form."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from longspan.data.tables import Row
from longspan.tasks.embed import Span
from longspan.tasks.measures import Fact, normalize
from longspan.tasks.questions import decode, locate

KINDS = ("span", "yes", "no")  # of answers


class Paragraph(NamedTuple):
    title: str
    sentences: tuple[str, ...]

    def unit(self, number: int) -> str:
        """0 is the title, from 1 on come the sentences."""
        return self.sentences[number - 1] if number else self.title


class Hop(NamedTuple):
    """A question over paragraphs; the facts are sentences that its answer follows from."""

    question: str
    paragraphs: tuple[Paragraph, ...]
    answer: str
    facts: tuple[Fact, ...]

    @property
    def kind(self) -> str:
        found = normalize(self.answer)
        return found if found in KINDS[1:] else KINDS[0]

    def flaw(self, answered: bool) -> str | None:
        """Why it cannot be used, or None."""
        if not self.question:
            return "the question is empty"
        if not any(sentence.strip() for one in self.paragraphs for sentence in one.sentences):
            return "there is no paragraph with text"
        return "the answer is empty" if answered and not self.answer.strip() else None

    def relevant(self) -> list[bool]:
        """Of each paragraph, whether a fact is in it."""
        titles = {title for title, _ in self.facts}
        return [one.title in titles for one in self.paragraphs]

    def places(self) -> dict[tuple[int, int], list[Span]]:
        """Where the answer stands, by paragraph and unit, as characters of the unit.

        In the facts and the titles of their paragraphs; else elsewhere in these. What stands in
        others is chance.
        """
        if self.kind != KINDS[0]:
            return {}
        facts = set(self.facts)
        near: dict[tuple[int, int], list[Span]] = {}
        far: dict[tuple[int, int], list[Span]] = {}
        relevant = self.relevant()
        for place, one in enumerate(self.paragraphs):
            for number in range(len(one.sentences) + 1) if relevant[place] else ():
                found = _whole_words(one.unit(number), self.answer)
                if found:
                    is_near = number == 0 or (one.title, number - 1) in facts
                    (near if is_near else far)[place, number] = found
        return near or far


def read_hop(row: Row, columns: Mapping[str, str], answered: bool) -> Hop:
    """The question of a row.

    The text is a list of paragraphs, each a title and its sentences; evidence a list of titles and
    numbers of sentences from 0. Hub data sets have both as objects of lists.
    """
    names = {name: columns.get(name, name) for name in ("text", "question", "answers", "evidence")}
    paragraphs = []
    for one in _pairs(row, names["text"], ("title", "sentences")):
        title, sentences = one
        listed = isinstance(sentences, list | tuple)
        if not listed or not all(isinstance(sentence, str) for sentence in sentences):
            raise _fault(row, names["text"], "a paragraph is a title and a list of sentences", one)
        paragraphs.append(Paragraph(str(title), tuple(sentences)))
    answer, facts = "", []
    if answered:
        answer = row.text(names["answers"])
        for one in _pairs(row, names["evidence"], ("title", "sent_id")):
            title, number = one
            if not isinstance(number, int):
                raise _fault(row, names["evidence"], "a fact is a title and a number", one)
            facts.append((str(title), number))
    question = row.text(names["question"]).strip()
    return Hop(question, tuple(paragraphs), answer, tuple(dict.fromkeys(facts)))


def _pairs(row: Row, column: str, keys: tuple[str, str]) -> list[tuple[Any, Any]]:
    value = decode(row, column)
    if isinstance(value, Mapping) and all(isinstance(value.get(key), list) for key in keys):
        return list(zip(*(value[key] for key in keys), strict=True))
    found = []
    for one in value if isinstance(value, list | tuple) else [value]:
        pair = tuple(one.get(key) for key in keys) if isinstance(one, Mapping) else one
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _fault(row, column, f"expected a list of pairs, {' and '.join(keys)}", one)
        found.append((pair[0], pair[1]))
    return found


def _fault(row: Row, column: str, wanted: str, found: Any) -> ValueError:
    return ValueError(f"{row.where}, column {column!r}: {wanted}, not {found!r:.60}")


def _whole_words(text: str, answer: str) -> list[Span]:
    """Where an answer stands, as words of its own if it does anywhere."""
    found = locate(text, answer.strip(), None)
    whole = [
        (start, stop)
        for start, stop in found
        if not text[max(0, start - 1) : start].isalnum() and not text[stop : stop + 1].isalnum()
    ]
    return whole or found
