"""Documents packed into rows of one length, and some of their tokens hidden.

What a step reads and what is hidden from it are functions of seed and step alone, so that a run
which goes on after an interruption reads what it would have read without one.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class PackedRow(NamedTuple):
    source: np.ndarray  # [length]: of each token in `Rows.ids`
    bounds: np.ndarray  # [documents + 1]: where documents begin in the row, and its end


class Rows:
    """Documents one behind the other, cut into rows of `length` tokens.

    A document that reaches beyond its row goes on in the next one; wherever it is cut, its parts
    get the special tokens that a whole document has. A row's documents, and the parts of one, are
    kept apart by bounds, so that each sees itself only. What little remains of a row is padding.

    Args:
        documents: the ids of each, without special tokens, of which none is empty.
        before, after: special tokens around each of them.
    """

    def __init__(
        self,
        documents: Iterable[np.ndarray],
        length: int,
        *,
        before: Sequence[int],
        after: Sequence[int],
        padding: int,
    ) -> None:
        self.length = length
        self.room = length - len(before) - len(after)  # of a row that lies inside a document
        if self.room < 1:
            raise ValueError(f"rows of {length} tokens leave no room for a document")
        whole = [np.concatenate([before, one, after]).astype(np.int32) for one in documents]
        sizes = np.array([len(one) for one in whole], dtype=np.int64)
        self.tokens = int(sizes.sum())
        self.count = -(-self.tokens // self.room)
        extra = [*before, *after, padding]
        # Special tokens that a row needs beyond those of its documents stand behind them all.
        self.ids = np.concatenate([*whole, np.array(extra, dtype=np.int32)])
        behind = np.arange(self.tokens, len(self.ids))
        self._before, self._after = np.split(behind[:-1], [len(before)])
        self._padding = behind[-1]
        ends = np.cumsum(sizes)
        self.documents = len(whole)
        # Of them, those in more than one row, if the first row begins with the first document.
        self.severed = int(((ends - sizes) // self.room != (ends - 1) // self.room).sum())
        self._begins = np.zeros(self.tokens, dtype=bool)
        self._begins[ends - sizes] = True
        self.ordinary = np.ones(len(self.ids), dtype=bool)  # all but special tokens
        for place in range(len(before)):
            self.ordinary[ends - sizes + place] = False
        for place in range(len(after)):
            self.ordinary[ends - 1 - place] = False
        self.ordinary[self.tokens :] = False

    def cut(self, index: int, shift: int = 0) -> PackedRow:
        """The row of a number below `count`, if the first begins `shift` tokens into the text.

        Rows go round: the last ones hold what stands before the first.
        """
        begin = index * self.room
        inner = np.arange(begin, min(begin + self.room, self.tokens)) + shift
        inner %= self.tokens
        starts = self._begins[inner]
        front = self._before[:0] if starts[0] else self._before
        # A document ends where another begins, and the last with the text.
        ends = self._begins[(inner[-1] + 1) % self.tokens]
        back = self._after[:0] if ends else self._after
        read = np.concatenate([front, inner, back])
        bounds = [0, *(np.flatnonzero(starts[1:]) + 1 + len(front)).tolist(), len(read)]
        if len(read) < self.length:
            bounds.append(self.length)
        source = np.full(self.length, self._padding)
        source[: len(read)] = read
        return PackedRow(source, np.array(bounds))


class ShuffledRows:
    """Rows in random order, in every pass over the documents another one, and cut elsewhere."""

    def __init__(self, rows: Rows, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed = rows, batch, seed
        self._known: tuple[int, int, np.ndarray] | None = None

    def take(self, step: int, rows: range) -> list[tuple[PackedRow, np.random.Generator]]:
        """Some rows of a step's batch, each with the random numbers for what is hidden in it."""
        return [self._row(step * self.batch + row) for row in rows]

    def _row(self, index: int) -> tuple[PackedRow, np.random.Generator]:
        epoch, place = divmod(index, self.rows.count)
        if self._known is None or self._known[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            shift = int(random.integers(self.rows.room))
            self._known = epoch, shift, random.permutation(self.rows.count)
        _, shift, order = self._known
        chosen = int(order[place])
        return self.rows.cut(chosen, shift), np.random.default_rng((self.seed, epoch, chosen))


class Hiding(NamedTuple):
    """How tokens are hidden, see `hide`."""

    share: float  # of all ordinary tokens
    masked: float  # of those: replaced by the mask
    random: float  # of those: replaced by any word
    mask: int  # its id
    words: np.ndarray  # ids of all words

    def most(self, tokens: int) -> int:
        """How many are hidden of so many: always the same number."""
        return min(tokens, max(1, round(self.share * tokens)))


def hide(
    ids: np.ndarray, ordinary: np.ndarray, hiding: Hiding, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A copy of `ids` with some of the `ordinary` ones hidden, and the places of those.

    Most become the mask, some any word, and the others stay: a model cannot tell these from what
    is not asked for.
    """
    candidates = np.flatnonzero(ordinary)
    made = ids.copy()
    if len(candidates) == 0:
        return made, candidates
    chosen = np.sort(random.choice(candidates, hiding.most(len(candidates)), replace=False))
    lots = random.random(len(chosen))
    made[chosen[lots < hiding.masked]] = hiding.mask
    swapped = chosen[(lots >= hiding.masked) & (lots < hiding.masked + hiding.random)]
    made[swapped] = random.choice(hiding.words, len(swapped))
    return made, chosen
