"""CoNLL-2012 files of coreference: documents in parts, a word a line, clusters in the last column.

    #begin document (bc/cctv/00/cctv_0000); part 000
    bc/cctv/00/cctv_0000  0  0  Mary  NNP  ...  Speaker#1  *  (12)
    ...
    #end document

A mention of several words opens with "(12" and closes with "12)"; a cell may hold several, joined
by "|", nested or overlapping. Columns are set apart by spaces or tabs; the word is the fourth, the
speaker the tenth where there are twelve or more. Where two mentions of one cluster cross, which
bracket closes which cannot be told: the one that was opened last is closed first.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_BEGIN = re.compile(r"#begin document\s+(?:\((.*)\)|(\S+?));?(?:\s*part\s+(\S+))?\s*$")
_CELL = re.compile(r"(\(?)(\d+)(\)?)")
_BETWEEN = re.compile("[ \t]+")  # a word may have other white space in it, as 10\u00a0000 has
_NOTHING = ("-", "_", "*")
_WORD, _SPEAKER, _MANY = 3, 9, 12
BEGIN, LINES = "#begin", "#lines"  # no names that a table's own columns may well have

Clusters = Sequence[Sequence[Sequence[int]]]  # first and last word of each mention


def read_conll(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Documents, or parts of them, each with the number of the line that it begins in.

    "clusters" are first and last word of each mention, counted through the document; BEGIN and
    LINES keep what stands before the last column, for `write_conll`.
    """
    made: _Document | None = None
    number = 0
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        if line.startswith("#begin document"):
            if made is not None:
                raise ValueError(f"line {number}: the document of line {made.begun} has no end")
            made = _Document(number, line)
        elif line.startswith("#end document"):
            if made is None:
                raise ValueError(f"line {number}: a document ends that has not begun")
            yield made.begun, made.values(number)
            made = None
        elif line.startswith("#"):
            continue
        elif not line.strip():
            if made is not None:
                made.end_sentence()
        elif made is None:
            raise ValueError(f"line {number}: a word before any #begin document")
        else:
            made.add(number, line)
    if made is not None:
        raise ValueError(f"line {number}: the document of line {made.begun} has no #end document")


class _Document:
    def __init__(self, begun: int, line: str) -> None:
        self.begun, self.line = begun, line
        found = _BEGIN.match(line)
        if found is None:
            raise ValueError(
                f"line {begun}: {line[:60]!r} should be #begin document (NAME); part NUMBER"
            )
        self.name, self.part = found[1] or found[2], found[3]
        self.sentences: list[list[str]] = []
        self.speakers: list[list[str]] = []
        self.lines: list[list[str]] = []
        self.clusters: dict[int, list[list[int]]] = {}
        self._open: dict[int, list[tuple[int, int]]] = {}  # word and line, the last opened last
        self._words = 0
        self._between = True

    def end_sentence(self) -> None:
        self._between = True

    def add(self, number: int, line: str) -> None:
        line = line.rstrip(" \t")
        cells = _BETWEEN.split(line.lstrip(" \t"))
        if len(cells) <= _WORD + 1:
            raise ValueError(
                f"line {number}: {len(cells)} columns; there should be five or more: document, "
                "part, number, word, ..., coreference"
            )
        if self._between:
            for own in (self.sentences, self.speakers, self.lines):
                own.append([])
            self._between = False
        speaker = cells[_SPEAKER] if len(cells) >= _MANY else "-"
        self.sentences[-1].append(cells[_WORD])
        self.speakers[-1].append("" if speaker in _NOTHING else speaker)
        self.lines[-1].append(line[: -len(cells[-1])])
        self._brackets(number, cells[-1])
        self._words += 1

    def _brackets(self, number: int, cell: str) -> None:
        if cell in _NOTHING:
            return
        for part in cell.split("|"):
            found = _CELL.fullmatch(part)
            if found is None or not (found[1] or found[3]):
                raise ValueError(
                    f"line {number}: {part!r} in the coreference column {cell!r} is none of "
                    "(NUMBER, NUMBER), (NUMBER) and -"
                )
            cluster = int(found[2])
            if found[1]:
                self._open.setdefault(cluster, []).append((self._words, number))
            if found[3]:
                if not self._open.get(cluster):
                    raise ValueError(
                        f"line {number}: unbalanced brackets: {cluster}) closes what was not opened"
                    )
                first, _ = self._open[cluster].pop()
                mentions = self.clusters.setdefault(cluster, [])
                if [first, self._words] not in mentions:
                    mentions.append([first, self._words])

    def values(self, ended: int) -> dict[str, Any]:
        for cluster, places in self._open.items():
            for _, number in places:
                raise ValueError(
                    f"line {number}: unbalanced brackets: ({cluster} is not closed before the "
                    f"document's end in line {ended}"
                )
        clusters = sorted(sorted(own) for own in self.clusters.values())
        return {
            "id": self.name if self.part is None else f"{self.name}#{self.part}",
            "genre": self.name.partition("/")[0] if "/" in self.name else "",
            "sentences": self.sentences,
            "speakers": self.speakers,
            "clusters": clusters,
            BEGIN: self.line,
            LINES: self.lines,
        }


def write_conll(document: Mapping[str, Any], clusters: Clusters) -> Iterator[str]:
    """The lines of a document with these clusters: what `read_conll` kept of it goes before them,
    and where it comes from elsewhere, its name, its words and its speakers do."""
    cells = _cells(clusters)
    name = re.sub(r"\s+", "_", str(document.get("id") or "document"))
    begin = document.get(BEGIN) or f"#begin document ({name}); part 000"
    prefixes = document.get(LINES) or _prefixes(document, name)
    yield f"{begin}\n"
    place = 0
    for sentence in prefixes:
        for prefix in sentence:
            yield f"{prefix}{cells.get(place, '-')}\n"
            place += 1
        yield "\n"
    yield "#end document\n"


def _prefixes(document: Mapping[str, Any], name: str) -> Iterator[list[str]]:
    speakers = document.get("speakers")
    for number, sentence in enumerate(document["sentences"]):
        made = []
        for place, word in enumerate(sentence):
            speaker = speakers[number][place] if speakers else ""
            shown = [re.sub(r"\s+", "_", str(one)) or "-" for one in (word, speaker)]
            before = [name, "0", str(place), shown[0], "-", "-", "-", "-", "-", shown[1], "*"]
            made.append("\t".join(before) + "\t")
        yield made


def _cells(clusters: Clusters) -> dict[int, str]:
    """The last column by word: first what closes, inner mentions first, then what opens, outer
    ones first, then mentions of one word."""
    closing: dict[int, list[tuple[int, str]]] = {}
    opening: dict[int, list[tuple[int, str]]] = {}
    alone: dict[int, list[str]] = {}
    for number, cluster in enumerate(clusters):
        for first, last in cluster:
            if first == last:
                alone.setdefault(first, []).append(f"({number})")
            else:
                opening.setdefault(first, []).append((-last, f"({number}"))
                closing.setdefault(last, []).append((-first, f"{number})"))
    return {
        place: "|".join(
            [text for _, text in sorted(closing.get(place, []))]
            + [text for _, text in sorted(opening.get(place, []))]
            + alone.get(place, [])
        )
        for place in {*closing, *opening, *alone}
    }
