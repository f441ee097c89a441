"""A checkpoint that embeds the texts of a table: documents, and passages in their context."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, autocast, bfloat16

from longspan.data.tables import Row
from longspan.tasks.embed import NoTokensError, Span, paragraphs, read
from longspan.tasks.questions import decode
from longspan.tasks.start import load_long, load_tokenizer

PARAGRAPHS, DOCUMENT = "paragraphs", "document"


class Embedder:
    """An encoder of sentences, on the GPU if there is one.

    Args:
        source: its folder, a run's, or a name on the hub. A short one is made long.
        length: tokens that are read at once; longer texts are read in overlapping passes.
        text: the column of the text.
        spans: what to embed besides the whole text: its "paragraphs", nothing ("document"), or the
            column that has a list of spans, each [start, end] in characters.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        length: int = 4096,
        window: int = 512,
        text: str = "text",
        spans: str = PARAGRAPHS,
    ) -> None:
        self.tokenizer = load_tokenizer(source)
        model, _ = load_long(source, length, window)
        self.model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        self.length, self.text, self.spans = length, text, spans

    def rows(self, rows: list[Row]) -> list[dict[str, Any]]:
        """The vector of each row's text, and those of its passages, all of unit length."""
        with self._half():
            return [self._row(row) for row in rows]

    def _row(self, row: Row) -> dict[str, Any]:
        text = row.text(self.text)
        spans = self._spans(row, text)
        if not text.strip():
            return {"skipped": "the text is empty"}
        try:
            reading = read(self.model, self.tokenizer, text, length=self.length)
        except NoTokensError:
            return {"skipped": "the text has no tokens"}
        whole, *vectors = _numbers(reading.pool([(0, len(text)), *spans]))
        passages = [
            {"start": start, "end": end, "vector": vector}
            for (start, end), vector in zip(spans, vectors, strict=True)
        ]
        found = {"vector": whole} | ({} if self.spans == DOCUMENT else {"passages": passages})
        return found | ({"pieces": len(reading.passes)} if len(reading.passes) > 1 else {})

    def _spans(self, row: Row, text: str) -> list[Span]:
        if self.spans in (PARAGRAPHS, DOCUMENT):
            return paragraphs(text) if self.spans == PARAGRAPHS else []
        given = decode(row, self.spans)
        found = given if isinstance(given, list) else [] if given in (None, "") else [given]
        for one in found:
            if not (
                isinstance(one, list | tuple)
                and len(one) == 2
                and all(isinstance(place, int) and not isinstance(place, bool) for place in one)
                and 0 <= one[0] <= one[1] <= len(text)
            ):
                raise ValueError(
                    f"{row.where}, column {self.spans!r}: expected a list of [start, end] within "
                    f"the {len(text):,} characters of the text, found {one!r:.60}"
                )
        return [(start, end) for start, end in found]

    def _half(self) -> AbstractContextManager[Any]:
        kind = self.model.device.type
        return autocast(kind, bfloat16, enabled=kind == "cuda")


def _numbers(vectors: Tensor) -> list[list[float]]:
    """Six digits are as many as float32 has."""
    return [[round(value, 6) for value in vector] for vector in vectors.tolist()]
