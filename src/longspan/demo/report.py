"""What the demo found, in the terminal and as one page that needs nothing but itself."""

import os
import re
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan import machine
from longspan.analyze import figures
from longspan.demo.costs import CONTENDERS
from longspan.demo.questions import SHOWN
from longspan.demo.run import Answer, Asked, Findings, Found

_AROUND = 240  # characters of context shown on either side of a passage
_COLOURS = dict(
    zip(CONTENDERS, (figures.BLUE, figures.ORANGE, figures.GREY, "#009E73"), strict=True)
)


def show(found: Findings, console: Console) -> None:
    """Print the answers and the tables."""
    for line in summary(found):
        console.print(line, highlight=False)
    console.print(_parity_table(found))
    for asked in shown(found):
        console.print()
        console.print(Text(asked.question.text, style="bold"))
        ways = (
            (f"passes of {found.length:,}", asked.long),
            (f"pieces of {found.piece:,}", asked.pieces),
        )
        for way, answer in ways:
            console.print(Text(f"  {way}: {judged(answer, asked)}", style="cyan"))
            for passage in answer.passages:
                console.print(_passage(found, passage, console.width))
    if counted(found):
        console.print()
        console.print(_count_table(found))
        console.print(verdict(found), highlight=False)
    console.print(_cost_table(found))
    for note in notes(found):
        console.print(note, highlight=False)


def write_page(found: Findings, path: Path) -> None:
    """Write the report as one HTML file."""
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for cost in found.costs:
        lines.setdefault(cost.name, []).append((cost.tokens, cost.seconds, max(cost.mib, 0.1)))
    template = files("longspan.demo").joinpath("template.html").read_text(encoding="utf8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(template).render(
        found=found,
        summary=summary(found),
        asked=[(one, _ways(found, one)) for one in shown(found)],
        counted=counted(found),
        counts=counts(found),
        verdict=verdict(found) if counted(found) else "",
        notes=notes(found),
        longest=[cost for cost in found.costs if cost.tokens == found.costs[-1].tokens],
        pattern=figures.svg(figures.attention_pattern(found.config, found.length, found.piece)),
        fields=figures.svg(figures.receptive_fields(found.config, found.piece)),
        scaling=figures.svg(figures.scaling(lines, _COLOURS)),
        machine=machine.describe(torch.device("cpu"), found.threads),
        versions={name: v for name, v in machine.versions().items() if v is not None},
        commit=machine.commit(),
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(page, encoding="utf8")
    os.replace(temporary, path)


def shown(found: Findings) -> list[Asked]:
    """The questions answered in full: all of the user's own, the first few built in."""
    return found.asked[:SHOWN] if counted(found) else found.asked


def counted(found: Findings) -> list[Asked]:
    """The questions whose answers are known and stand in this document."""
    return [a for a in found.asked if a.long.rank is not None and a.pieces.rank is not None]


def counts(found: Findings) -> list[tuple[str, list[int]]]:
    """(way of reading, answers ranked first, among three and among ten)."""
    long = [asked.long for asked in counted(found)]
    pieces = [asked.pieces for asked in counted(found)]
    return [
        (way, [sum(answer.has_it(most) for answer in answers) for most in (1, 3, 10)])
        for way, answers in (
            (f"passes of {found.length:,}", long),
            (f"pieces of {found.piece:,}", pieces),
        )
    ]


def verdict(found: Findings) -> str:
    """Who ranked the answer higher how often, in words; no more than that is claimed."""
    pairs = [(asked.long.rank or 0, asked.pieces.rank or 0) for asked in counted(found)]
    won = sum(a < b for a, b in pairs)
    lost = sum(a > b for a, b in pairs)
    return (
        f"Of {len(pairs)} questions the long reading ranks the answer higher in {won}, the pieces "
        f"in {lost}, equally high in {len(pairs) - won - lost}. The model was made long without "
        "any training on long text."
    )


def judged(answer: Answer, asked: Asked) -> str:
    if not asked.question.answers:
        return "the closest passages"
    if answer.rank is None:
        return "the passage with the answer is not in this document"
    return f"the passage with the answer comes {_ordinal(answer.rank)}"


def summary(found: Findings) -> list[str]:
    return [
        f"{found.model}: {found.parameters / 1e6:.1f} M parameters, {found.layers} layers, "
        f"{found.piece:,} -> {found.length:,} positions, window {found.window:,}",
        f"{found.title}: {len(found.document):,} characters, {found.tokens:,} tokens, "
        f"{_number(found.passages, 'passage')}",
        f"read in {_number(found.passes, 'pass', 'passes')} of up to {found.length:,} tokens in "
        f"{found.seconds_long:.0f} s ({found.tokens / found.seconds_long:,.0f} tokens/s); in "
        f"pieces of {found.piece:,} by the model as it was in {found.seconds_pieces:.0f} s "
        f"({found.tokens / found.seconds_pieces:,.0f} tokens/s)",
    ]


def notes(found: Findings) -> list[str]:
    made = [
        "Each is the best of up to four passes (long ones fewer), in a process of its own with "
        f"{found.threads} threads, in float32, on the document's first tokens"
        + (", which were repeated to make up the length." if found.repeated else "."),
        "The Longformer has the same weights and gives the same outputs; dense BERT has the "
        "positions repeated and gives others; pieces have no context beyond themselves.",
    ]
    ours, theirs = (
        next(c for c in reversed(found.costs) if c.name == name) for name in list(CONTENDERS)[:2]
    )
    made.append(
        f"At {ours.tokens:,} tokens longspan takes {theirs.seconds / ours.seconds:.1f} times "
        f"fewer seconds than transformers' Longformer, and {ours.mib / theirs.mib:.0%} of its "
        "memory."
    )
    return made


def _number(number: int, one: str, more: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 // 10 != 1 else 0, "th")
    return f"{number:,}{ending}"


def _passage(found: Findings, passage: Found, width: int) -> Text:
    start, stop, score = passage
    head = f"    {score:.2f}  [{start}:{stop}]  "
    words = " ".join(found.document[start:stop].split())
    room = max(20, 2 * width - len(head) - 8)
    if len(words) > room:
        words = words[: room - 3] + "..."
    text = Text(head, style="dim")
    text.append(words, style="not dim")
    return text


def _ways(found: Findings, asked: Asked) -> list[dict[str, Any]]:
    """What the page shows of an answer: each passage between what stands around it."""
    text = found.document
    ways = (
        (f"Passes of {found.length:,} tokens", asked.long),
        (f"Pieces of {found.piece:,} tokens", asked.pieces),
    )
    return [
        {
            "name": name,
            "judged": judged(answer, asked),
            "passages": [
                {
                    "start": start,
                    "stop": stop,
                    "score": score,
                    "before": _whole_words(text[:start][::-1])[::-1],
                    "passage": text[start:stop],
                    "after": _whole_words(text[stop:]),
                }
                for start, stop, score in answer.passages
            ],
        }
        for name, answer in ways
    ]


def _whole_words(text: str) -> str:
    """The beginning of a text, which ends with a word, if there is one."""
    begin = text[:_AROUND]
    if len(text) <= _AROUND or text[_AROUND].isspace():
        return begin
    return re.sub(r"(?<=\s)\S+$", "", begin)


def _parity_table(found: Findings) -> Table:
    table = Table(title="Outputs compared with transformers', float32", title_justify="left")
    table.add_column("with")
    for name in ("tokens", "largest difference", "largest output"):
        table.add_column(name, justify="right")
    for row in found.parity:
        table.add_row(row.what, f"{row.tokens:,}", f"{row.largest:.1e}", f"{row.size:.3g}")
    return table


def _count_table(found: Findings) -> Table:
    table = Table(
        title=f"All {len(counted(found))} questions: where the answer was ranked",
        title_justify="left",
    )
    table.add_column("reading in")
    for name in ("first", "among three", "among ten"):
        table.add_column(name, justify="right")
    for way, numbers in counts(found):
        table.add_row(way, *map(str, numbers))
    return table


def _cost_table(found: Findings) -> Table:
    table = Table(title="One pass over the document's tokens", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("with")
    for name in ("seconds", "tokens/s", "MiB"):
        table.add_column(name, justify="right")
    for cost in found.costs:
        table.add_row(
            f"{cost.tokens:,}",
            cost.name,
            f"{cost.seconds:.2f}",
            f"{cost.speed:,.0f}",
            f"{cost.mib:,.0f}",
            end_section=cost.name == list(CONTENDERS)[-1],
        )
    return table
