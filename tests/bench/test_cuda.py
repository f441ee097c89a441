"""Measuring on a GPU: runs where there is one."""

import pytest
import torch
from longspan.bench.cases import PASSES, Case

from longspan.bench.measure import Settings, measure

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("globals_", [0, 2])
def test_points_are_measured_and_captured(kind, globals_):
    settings = Settings(device="cuda", threads=1, warmup_ms=1, rep_ms=5)
    case = Case(tokens=256, window=64, heads=2, globals=globals_)
    (point,) = measure(case, kind, ["longspan"], settings)
    assert point.error is None
    assert point.ms is not None
    assert point.eager_ms is not None
    assert point.ms > 0
    # Two clocks, two numbers: the pass was captured, not only called.
    assert point.ms != point.eager_ms
