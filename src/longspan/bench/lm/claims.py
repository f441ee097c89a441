"""The targets for training language models, judged from a results file alone."""

from dataclasses import replace

from longspan.bench.benchmark import Claim, ratio
from longspan.bench.lm.cases import STEP, LMCase
from longspan.bench.store import Results


def claims(results: Results) -> list[Claim]:
    """Every target, in the order in which they were set; all are for a GPU."""
    if results.header["settings"]["device"] != "cuda":
        return []
    base = LMCase(tokens=8192, batch=16)
    long = replace(base, tokens=32_768, batch=4)
    ms, long_ms = (results.value(case, "longspan", STEP[0]) for case in (base, long))
    millions = None if ms is None else base.characters_per_second(ms) / 1e6
    return [
        Claim("8,192 x 16, training step: characters/s", 1.2, millions, unit="M"),
        # Both steps read as many characters.
        Claim("32,768 x 4: speed over that at 8,192 x 16", 0.9, ratio(ms, long_ms)),
        Claim(
            "8,192 x 16: speed-up over FlexAttention",
            1.0,
            results.speedup(base, "longspan", "flex", STEP[0]),
        ),
    ]
