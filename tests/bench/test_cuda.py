"""Measuring on a GPU: runs where there is one."""

import pytest
import torch

from longspan.bench import finetuning, led, models
from longspan.bench.attention.cases import AttentionCase
from longspan.bench.attention.contenders import CONTENDERS
from longspan.bench.benchmark import PASSES, Settings
from longspan.bench.finetuning.cases import STEP, FinetuningCase
from longspan.bench.led.cases import LEDCase
from longspan.bench.measure import measure
from longspan.bench.models.cases import ModelCase

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("globals_", [0, 2])
def test_points_are_measured_and_captured(kind, globals_):
    settings = Settings(device="cuda", threads=1, warmup_ms=1, rep_ms=5)
    case = AttentionCase(tokens=256, window=64, heads=2, globals=globals_)
    (point,) = measure(case, kind, [CONTENDERS["longspan"]], settings)
    assert point.error is None
    assert point.ms is not None
    assert point.eager_ms is not None
    assert point.ms > 0
    # Two clocks, two numbers: the pass was captured, not only called.
    assert point.ms != point.eager_ms
    assert point.busy_ms


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("name", [name for name in models.CONTENDERS if name != "longspan-int8"])
def test_models_are_measured(kind, name):
    settings = Settings(device="cuda", threads=1, rep_ms=5)
    case = ModelCase(tokens=256, batch=2, layers=2, hidden=64, heads=4, vocab=100, window=64)
    (point,) = measure(case, kind, [models.CONTENDERS[name]], settings)
    assert point.error is None
    assert point.ms is not None
    assert point.mib is not None
    assert point.ms > 0
    assert point.mib > 0
    assert point.eager_ms is not None


def test_what_waits_for_the_device_is_not_captured():
    """A capture that fails would keep memory and torch's generator for itself."""
    from longspan.bench.benchmark import Contender, Workload

    def build(case, device):
        x = torch.randn(64, 64, device=device, requires_grad=True)
        return Workload(lambda: x * float(x.sum()), [x], x)

    settings = Settings(device="cuda", threads=1, warmup_ms=1, rep_ms=5)
    contender = Contender("waiting", "waits", build)
    (point,) = measure(AttentionCase(tokens=64), "forward", [contender], settings)
    assert point.error is None
    assert point.ms == point.eager_ms
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.randn(4, device="cuda")


@pytest.mark.parametrize("name", led.CONTENDERS)
@pytest.mark.parametrize(("kind", "beams"), [("forward+backward", 0), ("forward", 2)])
def test_encoder_decoders_are_measured(kind, beams, name):
    settings = Settings(device="cuda", threads=1, rep_ms=5)
    case = LEDCase(
        tokens=256, target=40, layers=2, hidden=64, heads=4, vocab=100, window=64, beams=beams
    )
    (point,) = measure(case, kind, [led.CONTENDERS[name]], settings)
    assert point.error is None
    assert point.ms is not None
    assert point.mib is not None
    assert point.ms > 0
    assert point.mib > 0


@pytest.mark.parametrize("name", ["step", "finetuning", "finetuning-plain"])
def test_finetuning_is_measured(name):
    settings = Settings(device="cuda", threads=1, rep_ms=5)
    case = FinetuningCase(
        tokens=256, batch=3, layers=2, hidden=64, heads=2, vocab=300, window=64, steps=8
    )
    (point,) = measure(case, STEP[0], [finetuning.CONTENDERS[name]], settings)
    assert point.error is None
    assert point.ms is not None
    assert point.mib is not None
    assert point.ms > 0
    assert point.mib > 0
