"""Questions with answers to choose from, in the forms that data sets have them."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from longspan.data.tables import Row
from longspan.tasks.questions import decode


class Offer(NamedTuple):
    """A question, the texts to be read for it, and the answers to choose from."""

    texts: tuple[str, ...]
    question: str
    choices: tuple[str, ...]
    right: tuple[int, ...]  # places among the choices; several only if they are the same

    def flaw(self, answered: bool) -> str | None:
        """Why it cannot be used, or None."""
        if not self.texts:
            return "the text is empty"
        if not self.question:
            return "the question is empty"
        if len(self.choices) < 2:
            return "there are fewer than two choices"
        if not all(self.choices):
            return "a choice is empty"
        return "the answer is none of the choices" if answered and not self.right else None


def unfold_offers(row: Row, columns: Mapping[str, str]) -> Iterator[Row]:
    """A row for each question: where that is a list, as in RACE, choices and answers are too."""
    name = columns.get("question", "question")
    asked = decode(row, name)
    if not isinstance(asked, list):
        yield row
        return
    parts: dict[str, list[Any]] = {name: asked}
    for column in (columns.get("choices", "choices"), columns.get("answers", "answers")):
        if column not in row.values:
            continue  # answers, where they are to be found; a lack of choices is noticed later
        own = decode(row, column)
        if not isinstance(own, list) or len(own) != len(asked):
            raise ValueError(
                f"{row.where}, column {column!r}: expected a list of {len(asked)}, one for each "
                f"question, found {own!r:.60}"
            )
        parts[column] = own
    key = columns.get("id", "id")
    outer = row.values.get(key, row.where)
    for place in range(len(asked)):
        values = {**row.values, key: f"{outer}#{place}"}
        values |= {column: own[place] for column, own in parts.items()}
        yield Row(f"{row.where}, question {place}", values)


def read_offer(row: Row, columns: Mapping[str, str], separator: str, answered: bool) -> Offer:
    """The question of a row.

    The text may be a list of texts, as in WikiHop. Choices that come as text are JSON, or stand
    between separators. The answer is the text of a choice, or else its number from 0, or its
    letter from A.
    """
    names = {name: columns.get(name, name) for name in ("text", "question", "choices", "answers")}
    texts = decode(row, names["text"])
    if not isinstance(texts, list):
        texts = [row.text(names["text"])]
    if not all(isinstance(one, str) for one in texts):
        raise ValueError(f"{row.where}, column {names['text']!r}: expected a list of texts")
    choices = decode(row, names["choices"])
    if isinstance(choices, str):
        choices = choices.split(separator)
    if not isinstance(choices, list):
        raise ValueError(
            f"{row.where}, column {names['choices']!r}: expected a list, found {choices!r:.60}"
        )
    made = tuple(str(one).strip() for one in choices)
    return Offer(
        tuple(one for one in texts if one.strip()),
        row.text(names["question"]).strip(),
        made,
        _places(row.get(names["answers"]), made) if answered else (),
    )


def _places(answer: Any, choices: tuple[str, ...]) -> tuple[int, ...]:
    text = str(answer).strip()
    same = tuple(place for place, one in enumerate(choices) if one == text)
    if same:
        return same
    if text.isdecimal():
        place = int(text)
    elif len(text) == 1 and "A" <= text <= "Z":
        place = ord(text) - ord("A")
    else:
        return ()
    return (place,) if place < len(choices) else ()
