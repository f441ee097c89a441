"""Training steps of a language model: characters per second, and memory, as rows get longer."""

from longspan.bench.benchmark import Benchmark
from longspan.bench.lm.cases import LMCase, suite
from longspan.bench.lm.claims import claims
from longspan.bench.lm.contenders import CONTENDERS
from longspan.bench.lm.figure import draw
from longspan.bench.lm.tables import tables

BENCHMARK = Benchmark(
    name="lm",
    case=LMCase,
    contenders=CONTENDERS,
    suite=suite,
    # A step takes 0.1 to 2 s on a GPU.
    settings={"rounds": 5, "seconds": 60.0, "warmup_ms": 500, "rep_ms": 2000},
    quick_settings={"rounds": 3, "seconds": 3.0, "rep_ms": 200},
    source=(
        "ops",
        "layers",
        "models/decoder.py",
        "recipes/books.py",
        "train/optim.py",
        "bench/lm/contenders.py",
        "bench/flex.py",
        "bench/measure.py",
        "bench/child.py",
    ),
    claims=claims,
    tables=tables,
    draw=draw,
)
