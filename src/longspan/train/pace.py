"""Where a run stands: by steps, or by the clock."""

import time
from collections.abc import Mapping
from typing import Any

from longspan.train.recipe import Plan


class Pace:
    """Counts what was done, and says how far along its recipe a run is.

    A place is measured in the recipe's steps. Without `minutes` it is the number of steps done.
    With `minutes` it is the share of that time that has passed: phases, learning rates and what
    is due "every so many steps" then follow the clock, however fast the machine is. The clock
    counts training alone: not evaluations, saving, the first step of a phase, nor others in which
    something was compiled.
    """

    def __init__(self, recipe: Plan, known: Mapping[str, Any]) -> None:
        self.recipe = recipe
        self.step: int = known.get("step", 0)  # updates of the weights so far
        self.phase: int = known.get("phase", 0)
        self.inside: int = known.get("inside", 0)  # of them, in this phase
        self.tokens: int = known.get("tokens", 0)
        self._seconds: float = known.get("training_seconds", 0.0)
        self._since: float | None = None

    @property
    def place(self) -> float:
        if self.recipe.minutes > 0:
            return self.recipe.steps * self.seconds / (60.0 * self.recipe.minutes)
        return self.step

    @property
    def seconds(self) -> float:
        """Of training so far."""
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    @property
    def held(self) -> bool:
        return self._since is None

    def hold(self) -> None:
        """Stop the clock."""
        self._seconds, self._since = self.seconds, None

    def go(self, seconds: float | None = None) -> None:
        """Let the clock run on, or again from so many seconds."""
        if seconds is not None:
            self._seconds = seconds
        self._since = time.monotonic()

    def enter(self, phase: int) -> None:
        """A phase begins, or is gone on with; either way with the clock stopped."""
        if phase != self.phase:
            self.phase, self.inside = phase, 0
        self.hold()

    def advance(self, tokens: int) -> None:
        """One more step is done, which read so many tokens."""
        self.step, self.inside = self.step + 1, self.inside + 1
        self.tokens += tokens

    def known(self) -> dict[str, Any]:
        """What to go on from."""
        return {
            "step": self.step,
            "phase": self.phase,
            "inside": self.inside,
            "tokens": self.tokens,
            "training_seconds": self.seconds,
        }


def due(every: int, before: float, after: float) -> bool:
    """Whether a step from one place to the next passes a multiple of `every`; 0 = never."""
    return every > 0 and after // every > before // every
