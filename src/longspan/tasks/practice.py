"""What a model that has read nothing yet can learn from documents alone before it summarises them:
to find a passage by its first words, and to write down how it goes on."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from longspan.tasks.documents import token_ids
from longspan.tasks.summaries import Request
from longspan.tasks.summarize import Document, Example, Summarize
from longspan.train.finetuning import Checks, Finetuning

LENGTH = 512  # of the parts of documents that are read
_ASKED = 8  # tokens that a passage is asked for by
_WRITTEN = 64  # of it to be written
_PASSAGES = 4  # of each part


def practice(recipe: Finetuning, updates: int) -> Finetuning:
    """The recipe of it: many short parts of the documents, as many tokens a step as documents
    have."""
    return replace(
        recipe,
        name="practice",
        measure="loss",
        model=replace(recipe.model, length=min(LENGTH, recipe.model.length)),
        batch=8 * recipe.batch,
        updates=updates,
        learning_rate=2 * recipe.learning_rate,
        minutes=0.0,
        save_every=max(1, updates // 5),
        evaluation=Checks(every=0, batch=8 * recipe.batch, limit=64 * recipe.batch),
    )


class Practice(Summarize):
    """Passages of documents in place of their summaries, drawn by the recipe's seed."""

    def _encode(self, requests: list[Request]) -> list[Example]:
        texts = list(dict.fromkeys(one.text for one in requests))
        drawn = np.random.default_rng(self.recipe.seed)
        documents = token_ids(self.tokenizer, texts)
        found = list(chain.from_iterable(self._passages(ids, drawn) for ids in documents))
        if not found:
            raise ValueError(
                f"practice copies passages of up to {_ASKED + _WRITTEN} tokens, and no document of "
                "a split is that long: do without, or give longer ones"
            )
        return found

    def _passages(self, ids: np.ndarray, drawn: np.random.Generator) -> Iterator[Example]:
        template = self.template
        room = self.recipe.model.length - _ASKED - template.size
        ends = len(template.before) + len(template.after)
        passage = _ASKED + min(_WRITTEN, self.recipe.writing.longest - ends)
        for begin in range(0, len(ids), max(1, room)):
            part = ids[begin : begin + room]
            if len(part) < passage:
                continue
            for at in drawn.integers(0, len(part) - passage + 1, _PASSAGES):
                question, rest = np.split(part[at : at + passage], [_ASKED])
                target = np.concatenate([template.before, rest, template.after])
                yield Example(Document(part, question), target.astype(np.int64), "")
