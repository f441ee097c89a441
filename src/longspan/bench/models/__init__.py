"""Whole encoders against transformers': tokens per second and memory, forward and training."""

from longspan.bench.benchmark import Benchmark
from longspan.bench.models.cases import ModelCase, suite
from longspan.bench.models.claims import claims
from longspan.bench.models.contenders import CONTENDERS
from longspan.bench.models.figure import draw
from longspan.bench.models.tables import tables

BENCHMARK = Benchmark(
    name="models",
    case=ModelCase,
    contenders=CONTENDERS,
    suite=suite,
    # A pass takes 10 ms to 3 s on a GPU and 10 to 60 s on a CPU.
    settings={"rounds": 5, "seconds": 60.0, "rep_ms": 500},
    quick_settings={"rounds": 3, "seconds": 3.0, "rep_ms": 50},
    source=(
        "ops",
        "layers",
        "models",
        "hub/patch.py",
        "bench/models/contenders.py",
        "bench/measure.py",
        "bench/child.py",
    ),
    claims=claims,
    tables=tables,
    draw=draw,
)
