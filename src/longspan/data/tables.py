"""Rows of a table, one at a time: CSV, TSV, JSON lines or arrays, text, Parquet, SQuAD's JSON,
CoNLL-2012 (a row for each document), a hub data set, or ListOps, which is made as it is needed.

Nothing is read ahead, so a file may be larger than memory. Every row knows where it came from, and
whoever finds fault with it can say so.
"""

import csv
import gzip
import json
import lzma
import textwrap
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from longspan.data import listops
from longspan.data.conll import read_conll

HUB, LISTOPS = "hub:", "listops:"
_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
_ENDINGS = (
    ".csv, .tsv, .jsonl, .txt, .conll, .json (an array, or SQuAD's; each also .xz or .gz), .parquet"
)
_DAMAGED = lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError
_WIDE = b"\xff\xfe", b"\xfe\xff"  # how files in UTF-16 begin
_AT_ONCE = 2**20  # characters of a JSON array


@dataclass(frozen=True)
class Row:
    """The values of a row by column, and where it stands: "reviews.csv, line 12"."""

    where: str
    values: Mapping[str, Any]

    def get(self, column: str) -> Any:
        """The value in a column, or an error that names the columns there are."""
        if column not in self.values:
            raise ValueError(
                f"{self.where}: there is no column {column!r}; there are "
                f"{', '.join(map(repr, self.values)) or 'none'}"
            )
        return self.values[column]

    def text(self, column: str) -> str:
        """The text in a column; none at all is an empty one."""
        value = self.get(column)
        if value is None:
            return ""
        if not isinstance(value, str):
            shown = textwrap.shorten(repr(value), 60, placeholder=" ...")
            raise ValueError(f"{self.where}, column {column!r}: expected text, found {shown}")
        return value


def read_rows(source: str | Path) -> Iterator[Row]:
    """The rows of a file, or of `hub:NAME`, `hub:NAME#SPLIT`, `hub:NAME:CONFIG#SPLIT` where
    `datasets` is installed, or of `listops:SPLIT`; `listops:SPLIT#COUNT` makes the first of them
    and writes no file."""
    if str(source).startswith(HUB):
        yield from _hub(str(source).removeprefix(HUB))
        return
    if str(source).startswith(LISTOPS):
        yield from _listops(str(source).removeprefix(LISTOPS))
        return
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{path} does not exist; a data set on the hub is given as {HUB}NAME")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file: {_ENDINGS}")
    kind = unpacked(path).suffix.lower()
    if kind.endswith("conll"):  # OntoNotes has .v4_gold_conll
        kind = ".conll"
    readers = {
        ".csv": lambda: _delimited(path, ","),
        ".tsv": lambda: _delimited(path, "\t"),
        ".jsonl": lambda: _json_lines(path),
        ".conll": lambda: _conll(path),
        ".txt": lambda: _whole(path),
        ".parquet": lambda: _parquet(path),
        ".json": lambda: _json(path),
    }
    if kind not in readers:
        raise ValueError(f"{path}: {path.suffix or 'no ending'} is none of {_ENDINGS}")
    yield from readers[kind]()


def unpacked(path: Path) -> Path:
    """The path without what says how the file is compressed."""
    return path.with_suffix("") if path.suffix in _OPENERS else path


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends, decoded one by one so that a wrong byte has a line to its name."""
    with _OPENERS.get(path.suffix, open)(path, "rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                # UTF-16 without a mark in front is valid UTF-8, with zeros between its letters.
                if number == 1 and b"\0" in line[:4] and line[:2] not in _WIDE:
                    raise ValueError(
                        f"{path}, line 1: not UTF-8 but UTF-16, as it seems; save the file as "
                        "UTF-8, e.g. with iconv -f utf16le -t utf8"
                    )
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    is_wide = number == 1 and line[:2] in _WIDE
                    raise ValueError(
                        f"{path}, line {number}: not UTF-8 (byte {error.start + 1} is "
                        f"0x{line[error.start]:02x}); save the file as UTF-8, e.g. with "
                        f"iconv -f {'utf16' if is_wide else 'latin1'} -t utf8"
                    ) from None
        except _DAMAGED as error:
            raise ValueError(f"{path} is damaged or cut off: {error}") from None


def _delimited(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # a document is larger than what Python allows a cell
    table = csv.reader(_lines(path), delimiter=delimiter, strict=True)
    begin = 1
    try:
        header = next(table, None)
        if not header:
            raise ValueError(f"{path} is empty: its first line should name the columns")
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise ValueError(f"{path}, line 1: two columns are called {twice[0]!r}")
        others = [one for one in ",;\t|" if one != delimiter and one in header[0]]
        if len(header) == 1 and others:
            raise ValueError(
                f"{path}, line 1: one column, {header[0]!r:.60}, whose cells seem to be separated "
                f"by {others[0]!r}; a .csv has ',' and a .tsv tabs between them"
            )
        begin = table.line_num + 1
        for cells in table:
            if cells:  # a blank line is no row
                if len(cells) != len(header):
                    raise ValueError(
                        f"{path}, line {begin}: {len(cells)} cells for {len(header)} columns; "
                        "text with line breaks, quotes or the delimiter has to be quoted"
                    )
                yield Row(f"{path}, line {begin}", dict(zip(header, cells, strict=True)))
            begin = table.line_num + 1
    except csv.Error as error:
        why = str(error)
        if why.startswith("new-line character"):  # to which Python says how to open a file
            why = (
                "a carriage return by itself ends no line: quote the cell that has it, or, if all "
                "lines end so, tr '\\r' '\\n'"
            )
        raise ValueError(f"{path}, line {begin}: {why}") from None


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object but {values!r:.60}")
        _check_characters(line, values, f"{path}, line {number}")
        yield Row(f"{path}, line {number}", values)


def _check_characters(source: str, values: Any, where: str) -> None:
    """JSON can name half a character, "\\ud83d", which no tokenizer and no file takes."""
    if "\\u" in source:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: {error.object[error.start]!r} is half of a character, whose other half "
                "is missing: take it out, or write it whole"
            ) from None


def _conll(path: Path) -> Iterator[Row]:
    try:
        for number, values in read_conll(_lines(path)):
            yield Row(f"{path}, line {number}", values)
    except ValueError as error:
        where = str(error)
        raise ValueError(where if where.startswith(str(path)) else f"{path}, {where}") from None


def _whole(path: Path) -> Iterator[Row]:
    """One row: a text file is one document."""
    yield Row(str(path), {"text": "".join(_lines(path))})


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{path}: Parquet is read by pyarrow, which is not installed: pip install pyarrow, "
            "or save the table as JSON lines"
        ) from None
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", values)
    except ArrowException as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None


def _json(path: Path) -> Iterator[Row]:
    """An array of objects, as WikiHop and HotpotQA are published, or SQuAD's form."""
    with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
        try:
            begin = ""
            while not begin and (more := file.read(_AT_ONCE)):
                begin = more.lstrip()
            yield from (_array if begin.startswith("[") else _squad)(path, begin, file)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from None
        except _DAMAGED as error:
            raise ValueError(f"{path} is damaged or cut off: {error}") from None


def _array(path: Path, text: str, file: TextIO) -> Iterator[Row]:
    """The objects of an array, each read when it is asked for."""
    decoder, number, place = json.JSONDecoder(), 0, 1
    while True:
        begin = place = _behind_space(text, place)
        if text[place : place + 1] == "]":
            return
        try:
            if number:
                if text[place : place + 1] not in ("", ","):
                    raise json.JSONDecodeError("expected a comma", text, place)
                begin = _behind_space(text, place + 1)
            values, stop = decoder.raw_decode(text, begin)
        except RecursionError as error:
            raise ValueError(f"{path}, object {number + 1}: not JSON: {error}") from None
        except json.JSONDecodeError as error:
            # As much again as there is: a long object is not tried too often.
            more = file.read(max(_AT_ONCE, len(text) - place))
            if not more:
                raise ValueError(f"{path}, object {number + 1}: not JSON: {error.msg}") from None
            text, place = text[place:] + more, 0
            continue
        number += 1
        if not isinstance(values, dict):
            raise ValueError(f"{path}, object {number}: not a JSON object but {values!r:.60}")
        _check_characters(text[begin:stop], values, f"{path}, object {number}")
        yield Row(f"{path}, object {number}", values)
        place = stop


def _behind_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _squad(path: Path, text: str, file: TextIO) -> Iterator[Row]:
    """A row for each paragraph: its "text", and its questions in "qas"."""
    try:
        content = json.loads(text + file.read())
        for article, one in enumerate(content["data"]):
            for place, paragraph in enumerate(one["paragraphs"]):
                values = {"text": paragraph["context"], "qas": paragraph["qas"]}
                yield Row(f"{path}, article {article}, paragraph {place}", values)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not in SQuAD's form, data > paragraphs > context and qas ({error!r}), nor an "
            "array of objects; one object per line goes into a .jsonl"
        ) from None


def _listops(name: str) -> Iterator[Row]:
    split, _, count = name.partition("#")
    if not count and split in listops.SPLITS:
        yield from _json_lines(listops.find(split))
        return
    if not count.isdigit():
        known = ", ".join(f"{LISTOPS}{one}" for one in listops.SPLITS)
        raise ValueError(f"{LISTOPS}{name}: choose from {known}; #COUNT behind it takes the first")
    for number, (text, value) in enumerate(listops.examples(split, int(count))):
        yield Row(f"{LISTOPS}{name}, example {number}", {"text": text, "label": str(value)})


def _hub(name: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{HUB}{name}: data sets on the hub are read by datasets, which is not installed: "
            "pip install datasets, or give a file"
        ) from None
    found, _, split = name.partition("#")
    found, _, config = found.partition(":")
    table = load_dataset(found, config or None, split=split or "train", streaming=True)
    # Classes come as numbers; their names say more.
    named = {
        column: feature.int2str
        for column, feature in (table.features or {}).items()
        if hasattr(feature, "int2str")
    }
    for number, values in enumerate(table, start=1):
        known = {
            column: named[column](value) if column in named and value is not None else value
            for column, value in values.items()
        }
        yield Row(f"{HUB}{name}, row {number}", known)
