"""The targets for finetuning, judged from a results file alone."""

from collections.abc import Iterator

from longspan.bench.benchmark import Claim, ratio
from longspan.bench.finetuning.cases import CHARACTERS, STEP, FinetuningCase
from longspan.bench.store import Results


def claims(results: Results) -> Iterator[Claim]:
    """Speed beside that of the bare step, for a GPU; of tokenising, anywhere."""
    if results.header["settings"]["device"] == "cuda":
        case = FinetuningCase(tokens=4096, batch=8)
        share = ratio(*(results.value(case, name, STEP[0]) for name in ("step", "finetuning")))
        yield Claim("4,096 x 8: speed over that of the bare training step", 0.6, share)
    for case, name, kind in results.points:
        if name == "tokens":
            ms = results.value(case, name, kind)
            thousands = None if ms is None else CHARACTERS / ms
            yield Claim("characters tokenised/s", 200.0, thousands, unit="k")
