"""Who is measured: the bare training step of `bench models`, finetuning, and a tokenizer.

Everything is made on the spot from Python's own sources: words, documents of nearly the case's
length, no two alike, and a checkpoint with random weights. They are finetuned by the recipe
`classify` through the training loop, and the loop's own figures are taken: tokens per second of
whole steps, several at a time, by the clock on the wall.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from rich.console import Console

from longspan.bench.benchmark import Clocked, Contenders, Workload
from longspan.bench.child import growth
from longspan.bench.finetuning.cases import CHARACTERS, FinetuningCase
from longspan.bench.models.contenders import CONTENDERS as MODELS
from longspan.data.examples import Examples
from longspan.data.text import python_sources
from longspan.models import LongspanConfig, LongspanModel
from longspan.recipes.finetuning import classify
from longspan.tasks.documents import token_ids, tokenize
from longspan.tasks.finetune import make_task, read_metrics
from longspan.tasks.scratch import learn_words
from longspan.train.finetuning import Checks, Start
from longspan.train.loop import train

CONTENDERS = Contenders()
contender = CONTENDERS.register

_BATCHES = 25  # of different documents; longer runs see them again
_PER_WORD = 200  # characters of the text that the tokenizer's words are learned from


class Ground(NamedTuple):
    """What a run starts from; the folder goes when this does."""

    folder: TemporaryDirectory[str]
    tokenizer: Any
    checkpoint: Path
    examples: Path


def _sources(characters: int) -> Iterator[str]:
    """Python's own library, one module at a time, until there is so much of it."""
    for source in python_sources():
        if characters <= 0:
            return
        text = source.decode("utf8", "replace")[:characters]
        characters -= len(text)
        yield text


@lru_cache(maxsize=2)  # a case and its small one
def prepare(case: FinetuningCase) -> Ground:
    folder = TemporaryDirectory(prefix="longspan-")
    ground = Ground(
        folder,
        learn_words(_sources(_PER_WORD * case.vocab), case.vocab),
        Path(folder.name) / "checkpoint",
        Path(folder.name) / "examples.jsonl",
    )
    torch.manual_seed(0)
    config = LongspanConfig(
        vocab_size=len(ground.tokenizer),
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=4 * case.hidden,
        max_position_embeddings=LongspanConfig.position_offset + case.tokens,
        attention={"window": case.window},
        pad_token_id=ground.tokenizer.pad_token_id,
    )
    LongspanModel(config, add_pooling_layer=False).save_pretrained(ground.checkpoint)
    ground.tokenizer.save_pretrained(ground.checkpoint)
    texts = _documents(case, ground.tokenizer)
    counts = [text.count("self") for text in texts]
    usual = statistics.median(counts)
    with ground.examples.open("w", encoding="utf8") as file:
        for text, count in zip(texts, counts, strict=True):
            label = "objects" if count > usual else "functions"
            file.write(json.dumps({"text": text, "label": label}) + "\n")
    return ground


def _documents(case: FinetuningCase, tokenizer: Any) -> list[str]:
    """Sources one behind the other, cut where a piece has 7/8 of the tokens to all of them."""
    random = np.random.default_rng(0)
    most = case.tokens - 2  # beside the special ones
    found: list[str] = []
    rest = ""
    for source in _sources(100 * CHARACTERS):
        rest += source
        offsets = tokenize(tokenizer, [rest])[0].offsets
        first = 0
        while len(offsets) - first > most:
            last = first + int(random.integers(most * 7 // 8, most + 1))
            found.append(rest[offsets[first][0] : offsets[last][0]])
            if len(found) == _BATCHES * case.batch:
                return found
            first = last
        rest = rest[offsets[first][0] :] if len(offsets) else ""
    return found


@contender("step", "bare training step")
def _step(case: FinetuningCase, device: torch.device) -> Workload:
    return MODELS["longspan"].build(case.bare, device)


@contender("finetuning", "finetuning")
def _finetuning(case: FinetuningCase, device: torch.device) -> Clocked:
    """As a run of many steps is carried out: on a GPU the layers are compiled."""
    return _run(case, device, "layers" if device.type == "cuda" else "no")


@contender("finetuning-plain", "finetuning, not compiled", devices=("cuda",))
def _finetuning_plain(case: FinetuningCase, device: torch.device) -> Clocked:
    return _run(case, device, "no")


def _run(case: FinetuningCase, device: torch.device, compile: Literal["no", "layers"]) -> Clocked:
    if case.dtype == "float16":
        raise ValueError("runs are in float32 or bfloat16")
    if device.type == "cpu" and torch.cuda.is_available():
        raise ValueError("a run takes the GPU that there is: hide it by CUDA_VISIBLE_DEVICES=''")
    ground = prepare(case)
    recipe = replace(
        classify(),
        model=Start(str(ground.checkpoint), case.tokens, case.window),
        data=Examples(str(ground.examples)),
        batch=case.batch,
        updates=case.steps,
        too_long="head",  # cut apart, a piece may have a token more
        evaluation=Checks(every=0, batch=case.batch, limit=case.batch),
        precision="bf16" if case.dtype == "bfloat16" else "no",
        compile=compile,
        log_every=case.every,
    )
    task = make_task(recipe)

    def measure() -> tuple[float, float]:
        torch.compiler.reset()  # graphs of earlier cases would count towards dynamo's limit
        with TemporaryDirectory(prefix="longspan-") as folder:
            run = Path(folder) / "run"
            train(task.recipe, task, run, console=Console(quiet=True))
            entries = [entry for entry in read_metrics(run) if "split" not in entry]
        return case.ms(_steady(case, entries)), entries[-1]["peak_mib"]

    return Clocked(measure)


def _steady(case: FinetuningCase, entries: Sequence[dict[str, Any]]) -> float:
    """Tokens per second once everything is compiled and warm: in the last three quarters."""
    return statistics.median(
        entry["tokens_per_second"] for entry in entries if entry["step"] > case.steps / 4
    )


@contender("tokens", "tokenizer")
def _tokens(case: FinetuningCase, device: torch.device) -> Clocked:
    """By itself, on the CPU, as tasks do it before training."""
    tokenizer, texts = prepare(case).tokenizer, [*_sources(CHARACTERS)]

    def measure() -> tuple[float, float]:
        mib = growth(lambda: token_ids(tokenizer, texts))
        times = []
        for _ in range(3):
            start = time.perf_counter()
            token_ids(tokenizer, texts)
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times), mib

    return Clocked(measure)
