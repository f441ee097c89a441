"""The benchmark of finetuning: what is measured, and what is made of it."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from bench.made_up import make_results, pick
from rich.console import Console

from longspan.bench.benchmark import Clocked, Pass, Point, Settings
from longspan.bench.finetuning import BENCHMARK, contenders
from longspan.bench.finetuning.cases import CHARACTERS, STEP, FinetuningCase
from longspan.bench.finetuning.claims import claims
from longspan.bench.finetuning.contenders import CONTENDERS
from longspan.bench.measure import measure
from longspan.bench.report import show
from longspan.bench.store import Results
from longspan.tasks.documents import token_ids

# A run takes the GPU that there is.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = FinetuningCase(
    tokens=64, batch=2, layers=1, hidden=16, heads=2, vocab=300, window=16, steps=8, dtype="float32"
)
SETTINGS = Settings(DEVICE.type, threads=1, rounds=1, seconds=0.05)


def test_documents_nearly_fill_the_model() -> None:
    ground = contenders.prepare(CASE)
    rows = [json.loads(line) for line in ground.examples.read_text().splitlines()]
    lengths = [len(ids) for ids in token_ids(ground.tokenizer, [row["text"] for row in rows])]
    assert len(rows) == 25 * CASE.batch
    assert len(set(lengths)) > 3
    # Cut apart, a piece may have a token more or less.
    assert 62 * 7 // 8 - 3 <= min(lengths) <= max(lengths) <= 62 + 3
    assert {row["label"] for row in rows} == {"objects", "functions"}
    folder = Path(ground.folder.name)
    contenders.prepare.cache_clear()
    del ground
    assert not folder.exists()


def test_the_loop_is_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = []
    monkeypatch.setattr(contenders, "_steady", lambda case, found: entries.extend(found) or 1000.0)
    workload = CONTENDERS["finetuning"].build(CASE, DEVICE)
    assert isinstance(workload, Clocked)
    ms, mib = workload.measure()
    assert ms == pytest.approx(1e3 * CASE.tokens * CASE.batch / 1000.0)
    assert mib > 0
    assert [entry["step"] for entry in entries] == [*range(1, CASE.steps + 1)]
    # The tokens are those of the documents, special ones included.
    assert 0.8 * 128 < entries[-1]["tokens"] / CASE.steps <= 128
    assert all(entry["gradient_norm"] > 0 for entry in entries)


def test_the_beginning_does_not_count() -> None:
    speeds = [1.0, 2.0, 50.0, 60.0, 70.0]
    entries = [
        {"step": 2 * place, "tokens_per_second": speed} for place, speed in enumerate(speeds)
    ]
    assert contenders._steady(CASE, entries) == 60.0


def test_points_are_measured_side_by_side() -> None:
    kinds: tuple[Pass, ...] = ("forward+backward", "forward")
    for names, kind in zip((("step", "finetuning"), ("tokens",)), kinds, strict=True):
        points = [*measure(CASE, kind, [CONTENDERS[name] for name in names], SETTINGS)]
        assert {point.contender for point in points} == set(names)
        for point in points:
            assert point.error is None
            assert point.ms is not None
            assert point.ms > 0


def test_half_precision_that_runs_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        CONTENDERS["finetuning"].build(replace(CASE, dtype="float16"), DEVICE)


def made_up(device: str, share: float = 0.75, speed: float = 4e5) -> Results:
    def point(case: FinetuningCase, name: str, kind: Pass) -> Point:
        ms = {"step": 40.0, "finetuning": 40.0 / share, "tokens": 1e3 * CHARACTERS / speed}
        return Point(case, name, kind, ms=ms.get(name, 100.0), mib=2048.0)

    return make_results("finetuning", device, point)


def test_claims() -> None:
    made = [*claims(made_up("cuda"))]
    assert pick(made, "bare training step").measured == pytest.approx(0.75)
    assert pick(made, "tokenised").measured == pytest.approx(400.0)
    assert [claim.met for claim in made] == [True, True]
    assert [claim.met for claim in claims(made_up("cuda", 0.59, 1e5))] == [False, False]
    assert [claim.met for claim in claims(Results(made_up("cuda").header))] == [None]
    assert [claim.met for claim in claims(made_up("cpu", 0.1))] == [True]


def test_the_table() -> None:
    console = Console(width=120, file=StringIO())
    show(made_up("cuda"), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "819,000" in text  # the bare step
    assert "75%" in text
    assert "40%" in text  # not compiled
    assert "400,000" in text
    assert text.index("bare") < text.index("finetuning, not compiled")


def test_the_bare_step_is_that_of_the_models() -> None:
    from longspan.bench import models

    (case,) = {job.case for job in BENCHMARK.jobs(device="cuda", dtype="bfloat16")}
    assert isinstance(case, FinetuningCase)
    jobs = models.BENCHMARK.jobs(device="cuda", dtype="bfloat16", only=["longspan"])
    assert any(job.case == case.bare and STEP[0] in job.passes for job in jobs)
