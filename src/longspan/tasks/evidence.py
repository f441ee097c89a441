"""What was found for a question over several paragraphs: the answer, and what it follows from."""

from typing import Any, NamedTuple

import numpy as np

from longspan.tasks.answers import with_marks
from longspan.tasks.hops import KINDS, Hop
from longspan.tasks.measures import Fact
from longspan.tasks.paragraphs import Asked


class Found(NamedTuple):
    """What was found for one question."""

    kind: str
    spans: list[tuple[int, int, int, float]]  # paragraph, first and last token, score; best first
    total: float  # of all spans, to make probabilities of scores
    evidence: list[tuple[int, int]]  # paragraph, and number of the sentence in it
    paragraphs: dict[int, float]  # the score of each that was read
    sentences: dict[tuple[int, int], float]


def choose_evidence(
    paragraphs: dict[int, float], sentences: dict[tuple[int, int], float]
) -> list[tuple[int, int]]:
    """Sentences of the two best paragraphs: all that are likelier evidence than not, and the best
    of each in any case. A paragraph without a sentence cannot be one of the two."""
    able = {place for place, _ in sentences}
    chosen = sorted(able, key=lambda place: -paragraphs[place])[:2]
    found = []
    for place in sorted(chosen):
        own = {pair: score for pair, score in sentences.items() if pair[0] == place}
        best = max(own, key=lambda pair: own[pair])
        found += [pair for pair, score in own.items() if score > 0 or pair == best]
    return found


def describe(hop: Hop, asked: Asked, found: Found) -> dict[str, Any]:
    """A prediction in words. Offsets are characters of a paragraph's sentences, joined as they
    are, or of its title. Each candidate comes once, and none that is white space alone: tokens may
    be that, or share a character."""
    made: dict[tuple[int, int, int, int], dict[str, Any]] = {}
    for place, first, last, score in found.spans:
        part, paragraph = asked.parts[place], hop.paragraphs[place]
        unit = int(part.unit[first])
        start = int(part.offsets[first, 0])
        stop = with_marks(paragraph.unit(unit), int(part.offsets[last, 1]))
        words = paragraph.unit(unit)[start:stop]
        start += (
            len(words)
            - len(words.lstrip())
            + sum(map(len, paragraph.sentences[: max(0, unit - 1)]))
        )
        candidate = {
            "text": words.strip(),
            "paragraph": int(place),
            "title": paragraph.title,
            "in": "text" if unit else "title",
            "start": start,
            "end": start + len(words.strip()),
            "probability": float(np.exp(min(0.0, score - found.total))),
        }
        if candidate["text"]:
            made.setdefault((int(place), unit, start, candidate["end"]), candidate)
    candidates = list(made.values())
    best = candidates[0] if candidates and found.kind == KINDS[0] else None
    answer = {"answer": "" if found.kind == KINDS[0] else found.kind}
    if best is not None:
        where = {key: best[key] for key in ("paragraph", "title", "in", "start", "end")}
        answer = {"answer": best["text"], **where}
    return {
        **answer,
        "kind": found.kind,
        "evidence": [
            {
                "paragraph": place,
                "title": hop.paragraphs[place].title,
                "sentence": number,
                "text": hop.paragraphs[place].sentences[number].strip(),
                "probability": _chance(found.sentences[place, number]),
            }
            for place, number in found.evidence
        ],
        "paragraphs": [
            {"title": hop.paragraphs[place].title, "probability": _chance(score)}
            for place, score in found.paragraphs.items()
        ],
        "candidates": candidates,
    }


def facts(hop: Hop, found: Found) -> list[Fact]:
    return [(hop.paragraphs[place].title, number) for place, number in found.evidence]


def _chance(score: float) -> float:
    return float(1.0 / (1.0 + np.exp(-score)))
