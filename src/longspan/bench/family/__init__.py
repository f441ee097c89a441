"""Every mechanism of the family in one layer: time and memory as documents get longer, beside
public implementations; and how far those that approximate softmax attention are from it."""

from longspan.bench.benchmark import Benchmark
from longspan.bench.family.cases import FamilyCase, suite
from longspan.bench.family.claims import claims
from longspan.bench.family.contenders import CONTENDERS
from longspan.bench.family.errors import measure_errors
from longspan.bench.family.figure import draw
from longspan.bench.family.tables import tables

BENCHMARK = Benchmark(
    name="family",
    case=FamilyCase,
    contenders=CONTENDERS,
    suite=suite,
    settings={"rounds": 3, "seconds": 20.0, "rep_ms": 60},
    quick_settings={"rounds": 2, "seconds": 2.0, "rep_ms": 20},
    source=(
        "ops",
        "layers",
        "bench/family/contenders.py",
        "bench/family/rivals.py",
        "bench/measure.py",
        "bench/child.py",
    ),
    claims=claims,
    tables=tables,
    draw=draw,
    findings=lambda quick: measure_errors(quick=quick),
)
