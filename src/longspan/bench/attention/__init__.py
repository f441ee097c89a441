"""Window attention, bare and in a layer, against its alternatives."""

from longspan.bench.attention.cases import AttentionCase, suite
from longspan.bench.attention.claims import claims
from longspan.bench.attention.contenders import CONTENDERS
from longspan.bench.attention.figure import draw
from longspan.bench.attention.tables import tables
from longspan.bench.benchmark import Benchmark

BENCHMARK = Benchmark(
    name="attention",
    case=AttentionCase,
    contenders=CONTENDERS,
    suite=suite,
    settings={},
    quick_settings={"rounds": 3, "seconds": 1.5, "rep_ms": 30},
    source=(
        "ops",
        "layers",
        "bench/attention/contenders.py",
        "bench/flex.py",
        "bench/measure.py",
        "bench/child.py",
    ),
    claims=claims,
    tables=tables,
    draw=draw,
)
