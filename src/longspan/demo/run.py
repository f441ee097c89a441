"""The demo from beginning to end; what it finds is printed and drawn by `report`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer, BertModel

from longspan.demo.costs import CONTENDERS, Cost, measure, trained
from longspan.demo.questions import Question
from longspan.hub.checkpoint import Parity, parity
from longspan.hub.convert import convert, load, to_transformers
from longspan.models import LongspanModel
from longspan.tasks.embed import Passages, embed_query, longest, paragraphs, read

SHOWN_PASSAGES = 3
_PIECES_AT_A_TIME = 8
_BEYOND = 2048  # tokens on which outputs are compared beyond the window


class Found(NamedTuple):
    """A passage, text[start:stop], and its cosine with the question."""

    start: int
    stop: int
    score: float


@dataclass(frozen=True)
class Answer:
    """What one way of reading answers."""

    passages: list[Found]  # the best ones
    rank: int | None  # of the first passage that has the answer; None: unknown

    def has_it(self, at_most: int) -> bool:
        return self.rank is not None and self.rank <= at_most


@dataclass(frozen=True)
class Asked:
    question: Question
    long: Answer
    pieces: Answer


@dataclass(frozen=True)
class Findings:
    """Everything the demo found out."""

    model: str
    title: str
    document: str
    tokens: int
    passages: int
    passes: int
    length: int
    piece: int
    window: int
    layers: int
    parameters: int
    config: Any
    threads: int
    parity: list[Parity]
    seconds_long: float
    seconds_pieces: float
    asked: list[Asked]
    costs: list[Cost]
    repeated: bool  # the document is shorter than a pass, so costs were measured on repetitions


def run(
    source: str | Path,
    document: str,
    questions: Sequence[Question],
    *,
    title: str,
    model_name: str,
    length: int,
    window: int,
    lengths: Sequence[int],
    threads: int,
    console: Console,
) -> Findings:
    """Make `source` long, read `document` with it and in pieces, ask, and measure."""
    for question in questions:
        if not question.text.strip():
            raise ValueError("a question is empty")
    short = load(source).eval()
    if not isinstance(short, BertModel):
        raise ValueError(
            f"{source} is a {type(short).__name__}; the demo compares with a BertModel, such as "
            "most sentence encoders are"
        )
    tokenizer = AutoTokenizer.from_pretrained(source)
    piece = trained(short)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with console.status("making it long, comparing outputs ..."):
            long = convert(short, max_length=length, window=window)
            assert isinstance(long, LongspanModel)
            equal = _parity(short, long, tokenizer, document, questions[0].text)
        begin = time.perf_counter()
        with _bar(console, f"reading in passes of {length:,} tokens") as progress:
            whole = read(long, tokenizer, document, progress=progress)
        between = time.perf_counter()
        with _bar(console, f"reading in pieces of {piece:,} tokens") as progress:
            cut = read(
                short,
                tokenizer,
                document,
                overlap=0,
                batch_size=_PIECES_AT_A_TIME,
                progress=progress,
            )
        end = time.perf_counter()
        spans = paragraphs(document)
        readings = [Passages(document, spans, each.pool(spans)) for each in (whole, cut)]
        asked = []
        for question in questions:
            # Both models give the same vector: a question fits the window.
            vector = embed_query(short, tokenizer, question.text)
            answers = [_answer(passages, vector, question) for passages in readings]
            asked.append(Asked(question, *answers))
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        jobs = [(name, tokens) for tokens in lengths for name in CONTENDERS]
        costs = []
        with _bar(console, f"measuring, up to {max(lengths):,} tokens") as progress:
            for name, tokens in jobs:
                repeated = list(islice(cycle(ids), tokens))
                costs.append(measure(name, source, repeated, window, threads))
                progress(len(costs), len(jobs))
    finally:
        torch.set_num_threads(before)
    return Findings(
        model=model_name,
        title=title,
        document=document,
        tokens=len(whole.offsets),
        passages=len(spans),
        passes=len(whole.passes),
        length=length,
        piece=piece,
        window=window,
        layers=long.config.num_hidden_layers,
        parameters=sum(p.numel() for p in long.parameters()),
        config=long.config,
        threads=threads,
        parity=equal,
        seconds_long=between - begin,
        seconds_pieces=end - between,
        asked=asked,
        costs=costs,
        repeated=len(ids) < max(lengths),
    )


@torch.no_grad()
def _parity(
    short: BertModel, long: LongspanModel, tokenizer: Any, document: str, question: str
) -> list[Parity]:
    """Against BERT on what fits the window, against transformers' Longformer beyond it."""
    rows = [
        replace(row, what=f"BertModel, {row.what}")
        for row in parity(short, long, tokenizer=tokenizer, texts=[question, document])
    ]
    beyond = min(_BEYOND, longest(long))
    ids = torch.tensor([tokenizer(document, verbose=False)["input_ids"][:beyond]])
    pair = [model(ids).last_hidden_state for model in (to_transformers(long), long)]
    difference = (pair[0] - pair[1]).abs().max().item()
    what = "Longformer, the document's beginning"
    return [*rows, Parity(what, ids.shape[1], difference, pair[0].abs().max().item())]


def _answer(passages: Passages, query: torch.Tensor, question: Question) -> Answer:
    ranked = passages.ranked(query)
    rank = None
    for place, (index, _) in enumerate(ranked, start=1):
        start, stop = passages.spans[index]
        words = " ".join(passages.text[start:stop].split())
        if any(answer in words for answer in question.answers):
            rank = place
            break
    best = [Found(*passages.spans[index], score) for index, score in ranked[:SHOWN_PASSAGES]]
    return Answer(best, rank)


@contextmanager
def _bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, moved by calling it with what is done and what there is to do."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=1)
        yield lambda done, total: progress.update(task, completed=done, total=total)
