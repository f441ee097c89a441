"""Questions about a text with their right answers, in the forms that data sets have them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from longspan.data.examples import Skips
from longspan.data.tables import Row
from longspan.tasks.embed import Span


class Question(NamedTuple):
    """A question, the characters start:stop of every right answer, and what counts as right.

    Nothing right means that there is no answer.
    """

    id: str
    text: str
    question: str
    spans: tuple[Span, ...]
    right: tuple[str, ...]


def read_questions(row: Row, columns: Mapping[str, str], skips: Skips) -> Iterator[Question]:
    """The questions of a row: several in a column "qas" (CUAD, SQuAD), or one by itself.

    Answers are objects with "text" and "start" or "answer_start"; SQuAD's object of lists; or bare
    texts, which are looked for in the document, as TriviaQA does it, and are right even where it
    lacks them. One that does not stand where it says is skipped and counted, and a question that
    has no other with it.
    """
    text = row.text(columns.get("text", "text"))
    if not text.strip():
        skips.add("the text is empty", row.where)
        return
    nested = columns.get("qas", "qas")
    if nested in row.values:
        asked = _nested(row, nested)
        rows = [Row(f"{row.where}, question {place}", one) for place, one in enumerate(asked)]
        names = {"question": "question", "answers": "answers", "id": "id"}
    else:
        rows = [row]
        names = {name: columns.get(name, name) for name in ("question", "answers", "id")}
    outer = str(_identity(row.values, columns.get("id", "id"), row.where))
    for place, one in enumerate(rows):
        question = one.text(names["question"]).strip()
        if not question:
            skips.add("the question is empty", one.where)
            continue
        given = decode(one, names["answers"])
        answers = _answers(given, one.where)
        spans: list[Span] = []
        right: list[str] = []
        for wanted, start in answers:
            own = locate(text, wanted, start)
            spans += own
            if own or (start is None and wanted.strip()):
                right.append(wanted)
            else:
                skips.add("an answer does not stand where it says", one.where)
        if answers and not right:
            continue
        own_id = _identity(one.values, names["id"], outer if one is row else f"{outer}#{place}")
        yield Question(
            str(own_id), text, question, tuple(dict.fromkeys(spans)), tuple(dict.fromkeys(right))
        )


def unfold_questions(row: Row, columns: Mapping[str, str]) -> Iterator[Row]:
    """A row for each question about a text; one without a list of them is left as it is."""
    nested, name = columns.get("qas", "qas"), columns.get("id", "id")
    if nested not in row.values:
        yield row
        return
    for place, one in enumerate(_nested(row, nested)):
        own = {**row.values, columns.get("question", "question"): one.get("question")}
        outer = _identity(row.values, name, row.where)
        own[name] = _identity(one, "id", f"{outer}#{place}")
        yield Row(f"{row.where}, question {place}", own)


def _identity(values: Mapping[str, Any], column: str, otherwise: str) -> Any:
    """An id; where a table has none of a row, whether as null or as an empty cell, another name."""
    found = values.get(column)
    return otherwise if found in (None, "") else found


def _nested(row: Row, column: str) -> list[dict[str, Any]]:
    asked = decode(row, column)
    if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
        raise ValueError(f"{row.where}, column {column!r}: expected a list of questions")
    return asked


def decode(row: Row, column: str) -> Any:
    """A value; in a table of text it may be JSON."""
    value = row.get(column)
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value  # an answer may begin with a bracket
    return value


def _answers(given: Any, where: str) -> list[tuple[str, int | None]]:
    """(text, start or None) of each."""
    if given is None or given == "":
        return []
    if isinstance(given, str):
        return [(given, None)]
    if isinstance(given, Mapping) and isinstance(given.get("text"), list):
        texts = given["text"]
        starts = given.get("answer_start") or [None] * len(texts)
        if len(starts) != len(texts):
            raise ValueError(f"{where}: {len(texts)} answers, but {len(starts)} starts of them")
        given = [{"text": text, "start": at} for text, at in zip(texts, starts, strict=True)]
    if isinstance(given, Mapping):
        given = [given]
    found: list[tuple[str, int | None]] = []
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, str):
            found.append((one, None))
            continue
        text = one.get("text") if isinstance(one, Mapping) else None
        if not isinstance(text, str):
            raise ValueError(f"{where}: an answer is text, or text and start, not {one!r:.60}")
        start = one.get("start", one.get("answer_start"))
        if isinstance(start, float) and start.is_integer():
            start = int(start)  # as tables have it where other rows lack one
        if start is not None and not isinstance(start, int):
            raise ValueError(f"{where}: an answer starts at a whole number, not {start!r:.60}")
        found.append((text, start))
    return found


def locate(text: str, wanted: str, start: int | None) -> list[Span]:
    """Where an answer stands; without a start, wherever it occurs, capitals or not."""
    if not wanted.strip():
        return []
    if start is not None:
        stands = start >= 0 and text.startswith(wanted, start)
        return [(start, start + len(wanted))] if stands else []
    folded, sought = text.lower(), wanted.lower()
    if len(folded) != len(text):  # lowering has moved characters, as with the Turkish dotted I
        folded, sought = text, wanted
    spans, place = [], folded.find(sought)
    while place >= 0:
        spans.append((place, place + len(sought)))  # which may be longer, as that of the dotted I
        place = folded.find(sought, place + 1)
    return spans
