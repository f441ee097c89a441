"""What a step of training takes from a text: a function of the step alone, so that a run which
goes on after an interruption reads what it would have read without one."""

import numpy as np

from longspan.data.text import Bytes


class Shuffled:
    """Segments in random order, every pass over the text in another one and cut elsewhere."""

    def __init__(self, text: Bytes, length: int, batch: int, seed: int) -> None:
        self.text, self.length, self.batch, self.seed = text, length, batch, seed
        # Cutting begins anywhere in the first segment; the last token needs a successor.
        self.count = (len(text) - 1) // length - 1
        if self.count < 1:
            raise ValueError(
                f"{len(text):,} bytes of training text are too few for segments of {length:,}"
            )
        self._known: tuple[int, np.ndarray] | None = None

    def begins_anew(self, step: int) -> bool:
        """Whether the segments of a step go on from those of the step before: they never do."""
        return True

    def take(self, step: int, rows: range) -> np.ndarray:
        """[rows, length + 1] of a step's batch: segments, each with the byte behind it."""
        return np.stack([self._segment(step * self.batch + row) for row in rows])

    def _segment(self, index: int) -> Bytes:
        epoch, place = divmod(index, self.count)
        if self._known is None or self._known[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            shift = random.integers(self.length)
            self._known = epoch, shift + random.permutation(self.count) * self.length
        begin = self._known[1][place]
        return self.text[begin : begin + self.length + 1]


class Streams:
    """As many parts of the text as a batch has rows, each read from beginning to end."""

    def __init__(self, text: Bytes, length: int, batch: int) -> None:
        self.text, self.length, self.batch = text, length, batch
        self.span = (len(text) - 1) // batch
        self.count = self.span // length  # steps until the parts are read
        if self.count < 1:
            raise ValueError(
                f"{len(text):,} bytes of training text are too few for {batch} streams of "
                f"segments of {length:,}"
            )

    def begins_anew(self, step: int) -> bool:
        """Whether memories of the step before are to be forgotten."""
        return step % self.count == 0

    def take(self, step: int, rows: range) -> np.ndarray:
        """[rows, length + 1] of a step's batch: segments, each with the byte behind it."""
        begin = step % self.count * self.length
        starts = [row * self.span + begin for row in rows]
        return np.stack([self.text[start : start + self.length + 1] for start in starts])
