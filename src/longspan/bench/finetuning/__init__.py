"""Whole steps of finetuning against the bare training step, and how fast text becomes tokens."""

from longspan.bench.benchmark import Benchmark
from longspan.bench.finetuning.cases import FinetuningCase, suite
from longspan.bench.finetuning.claims import claims
from longspan.bench.finetuning.contenders import CONTENDERS
from longspan.bench.finetuning.tables import tables

BENCHMARK = Benchmark(
    name="finetuning",
    case=FinetuningCase,
    contenders=CONTENDERS,
    suite=suite,
    settings={"rounds": 3, "seconds": 20.0, "rep_ms": 500},
    quick_settings={"rounds": 3, "seconds": 3.0, "rep_ms": 100},
    source=(
        "ops",
        "layers",
        "models",
        "data",
        "tasks",
        "train",
        "recipes/finetuning.py",
        "bench/finetuning/contenders.py",
        "bench/models/contenders.py",
        "bench/measure.py",
        "bench/child.py",
    ),
    claims=claims,
    tables=tables,
    draw=lambda results, stem: [],  # a few numbers: the table has them all
)
