"""Texts with what is to be written about them, in the forms data sets have them, and ROUGE.

ROUGE is that of the rouge-score package, with stemming, as F1 from 0 to 1. It comes in two
variants of ROUGE-L: `rougeL` looks for one common subsequence in the whole of two texts,
`rougeLsum` for one per sentence. Sentences end where ., ! or ? is followed by white space.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longspan.data.examples import Skips
from longspan.data.tables import Row
from longspan.tasks.questions import decode

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Request(NamedTuple):
    """A document, what is asked of it ("" = nothing in particular), and what was written."""

    id: str
    text: str
    question: str
    summary: str


def read_requests(row: Row, columns: Mapping[str, str], skips: Skips) -> Iterator[Request]:
    """The requests of a row: one by itself, or several in a column "queries" (QMSum)."""
    summary = columns.get("answers", "summary")
    for one in unfold_requests(row, columns):
        text, question = read_text(one, columns), read_question(one, columns)
        written = one.text(summary).strip()
        if not text.strip():
            skips.add("the text is empty", one.where)
        elif not written:
            skips.add("the summary is empty", one.where)
        else:
            name = columns.get("id", "id")
            yield Request(str(one.values.get(name, one.where)), text, question, written)


def unfold_requests(row: Row, columns: Mapping[str, str]) -> Iterator[Row]:
    """A row for each query about a text; one without a list of them is left as it is."""
    if "queries" not in row.values:
        yield row
        return
    queries = decode(row, "queries")
    if not isinstance(queries, list) or not all(isinstance(one, dict) for one in queries):
        raise ValueError(f"{row.where}, column 'queries': expected a list of queries")
    name = columns.get("id", "id")
    for place, one in enumerate(queries):
        where = f"{row.where}, query {place}"
        own = {key: value for key, value in row.values.items() if key != "queries"}
        own[name] = one.get("id", f"{row.values.get(name, row.where)}#{place}")
        own[columns.get("question", "question")] = one.get("query", one.get("question"))
        if "answer" in one or "summary" in one:
            own[columns.get("answers", "summary")] = one.get("answer", one.get("summary"))
        yield Row(where, own)


def read_text(row: Row, columns: Mapping[str, str]) -> str:
    """A text; or sections with titles, or turns with speakers, a paragraph for each."""
    column = columns.get("text", "text")
    given = decode(row, column)
    if not isinstance(given, list):
        return row.text(column)
    parts = []
    for one in given:
        if isinstance(one, str):
            parts.append(one)
        elif isinstance(one, Mapping) and isinstance(one.get("text"), str):
            parts.append("\n".join(filter(None, (one.get("title"), one["text"]))))
        elif isinstance(one, Mapping) and isinstance(one.get("content"), str):
            parts.append(": ".join(filter(None, (one.get("speaker"), one["content"]))))
        else:
            raise ValueError(
                f"{row.where}, column {column!r}: expected texts, sections with title and text, or "
                f"turns with speaker and content, not {one!r:.60}"
            )
    return "\n".join(parts)


def read_question(row: Row, columns: Mapping[str, str]) -> str:
    """What is asked of the text; a column that was not named need not be there."""
    column = columns.get("question", "question")
    if column not in row.values and "question" not in columns:
        return ""
    value = row.get(column)
    return "" if value is None else row.text(column).strip()


class Rouge:
    """Scores by the rouge-score package; an error says how to get it."""

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError:
            raise ValueError(
                "ROUGE needs the rouge-score package: pip install 'longspan[summarize]', or take "
                "--set measure=loss, which needs none"
            ) from None
        self._scorer = RougeScorer(list(ROUGE), use_stemmer=True)

    def __call__(self, right: Sequence[str], written: Sequence[str]) -> np.ndarray:
        """[examples, measures], in the order of `ROUGE`."""
        rows = []
        for wanted, found in zip(right, written, strict=True):
            scores: Any = self._scorer.score(_lines(wanted), _lines(found))
            rows.append([scores[name].fmeasure for name in ROUGE])
        return np.array(rows)


def _lines(text: str) -> str:
    """A sentence on each line, as the scorer wants them."""
    return re.sub(r"(?<=[.!?])\s+", "\n", text.strip())
