"""Encoder-decoders against transformers' LED: a training step, beams, and what memory follows."""

from longspan.bench.benchmark import Benchmark
from longspan.bench.led.cases import LEDCase, suite
from longspan.bench.led.claims import claims
from longspan.bench.led.contenders import CONTENDERS
from longspan.bench.led.figure import draw
from longspan.bench.led.tables import tables

BENCHMARK = Benchmark(
    name="led",
    case=LEDCase,
    contenders=CONTENDERS,
    suite=suite,
    # A step takes 20 ms to 1 s on a GPU, a text a second or two; a CPU takes 10 to 60 s.
    settings={"rounds": 5, "seconds": 60.0, "rep_ms": 500},
    quick_settings={"rounds": 3, "seconds": 3.0, "rep_ms": 50},
    source=(
        "ops",
        "layers",
        "models",
        "hub/patch.py",
        "hub/seq2seq.py",
        "bench/led/contenders.py",
        "bench/measure.py",
        "bench/child.py",
    ),
    claims=claims,
    tables=tables,
    draw=draw,
)
