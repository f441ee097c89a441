"""What the memory of a training step follows, fitted to what was measured.

LED's scores are said to take w n_s + g n_s + n_s n_t + n_t^2 numbers, for n_s tokens read through a
window of w with g global ones, and n_t written. States, weights and the words' scores come on top,
in proportion to the lengths or constant. How much of each there is comes out of the fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from longspan.bench.led.cases import STEP, LEDCase
from longspan.bench.store import Results

TERMS: dict[str, Callable[[LEDCase], float]] = {
    "constant": lambda case: 1.0,
    "n_s": lambda case: float(case.tokens),
    "n_t": lambda case: float(case.target),
    "w n_s": lambda case: float(case.window * case.tokens),
    "g n_s": lambda case: float(case.globals * case.tokens),
    "n_s n_t": lambda case: float(case.tokens * case.target),
    "n_t^2": lambda case: float(case.target**2),
}


@dataclass(frozen=True)
class Fit:
    """MiB for one of each term; none is negative."""

    factors: dict[str, float]
    error: float  # the largest, as a share of what was measured

    def __call__(self, case: LEDCase) -> float:
        return sum(self.parts(case).values())

    def parts(self, case: LEDCase) -> dict[str, float]:
        """MiB by term."""
        return {name: factor * TERMS[name](case) for name, factor in self.factors.items()}


def model_of(case: LEDCase) -> LEDCase:
    """The model of a case without what is read and written."""
    return replace(case, tokens=0, target=0, window=0, globals=0)


def measured(results: Results, contender: str, model: LEDCase) -> dict[LEDCase, float]:
    """MiB of each training step of a model."""
    found = {
        case: results.value(case, name, kind, "mib")
        for case, name, kind in results.points
        if name == contender and kind == STEP[0] and model_of(case) == model
    }
    return {case: mib for case, mib in found.items() if mib is not None}


def fit(points: Mapping[LEDCase, float]) -> Fit | None:
    """The terms that explain the points best; None if there are too few to tell them apart."""
    if len(points) <= len(TERMS):
        return None
    mib = np.array(list(points.values()))
    # In shares of what was measured, so that small models count as much as large ones.
    columns = {
        name: np.array([term(case) for case in points]) / mib for name, term in TERMS.items()
    }
    names = list(TERMS)
    while True:
        matrix = np.stack([columns[name] for name in names], axis=1)
        scale = np.abs(matrix).max(axis=0)
        found = np.linalg.lstsq(matrix / scale, np.ones(len(mib)), rcond=None)[0]
        if found.min() >= 0:
            break
        names.pop(int(found.argmin()))  # nothing takes less than no memory
    factors = dict(zip(names, (found / scale).tolist(), strict=True))
    made = Fit(factors, 0.0)
    return Fit(factors, max(abs(made(case) / own - 1) for case, own in points.items()))
