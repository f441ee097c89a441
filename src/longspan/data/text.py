"""Text as bytes: one file, whole documents, or the Python library's own sources."""

import gzip
import json
import lzma
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

SEPARATOR = 0  # stands behind every document; no text holds this byte
Bytes = np.ndarray  # one-dimensional, uint8


class Corpus(NamedTuple):
    train: Bytes
    valid: Bytes
    test: Bytes


@dataclass(frozen=True)
class Source:
    """Where text comes from.

    Args:
        kind: "file": one file, its first 90% for training, then 5% and 5%. "documents": JSON
            lines with a "text" each (.jsonl, .jsonl.xz, .jsonl.gz), either one such file, whose
            documents are split 90/5/5, or a folder with the files named below. "python": the
            standard library's sources, split by file; needs no path.
        path: of the file or folder.
        size: what a file must measure, in bytes, to be the published one; None = anything.
        train, valid, test: names of the files in a folder of documents.
        limit: bytes of training text to keep; None = all.
    """

    kind: Literal["file", "documents", "python"] = "file"
    path: str | None = None
    size: int | None = None
    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    limit: int | None = None


def read(source: Source) -> Corpus:
    """The text of a source; an error says what is missing or wrong with it."""
    if source.kind == "python":
        if source.path is not None:
            raise ValueError(
                f"this recipe reads Python's own library, not {source.path}: leave --data out, or "
                "add --set data.kind=file to read a file of yours"
            )
        corpus = _split_documents([*python_sources()])
    elif source.path is None:
        raise ValueError("this recipe needs text: give --data PATH")
    elif source.kind == "file":
        corpus = _split_file(Path(source.path), source.size)
    elif Path(source.path).is_dir():
        names = (source.train, source.valid, source.test)
        corpus = Corpus(*(_read_files(Path(source.path), own) for own in names))
    else:
        corpus = _split_documents([*read_documents(Path(source.path))])
    for name, part in corpus._asdict().items():
        if len(part) < 2:
            raise ValueError(f"{source.path or 'the corpus'} leaves no text for {name}")
    if source.limit is not None and source.limit < 1:
        raise ValueError(f"data.limit={source.limit} must be at least 1; null = all of the text")
    return corpus._replace(train=corpus.train[: source.limit])


def read_documents(path: Path) -> Iterator[bytes]:
    """The "text" of each line of a JSON lines file, compressed or not."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a .jsonl file, plain or .xz or .gz")
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    number = 0
    try:
        with opener(path, "rb") as lines:
            for line in lines:
                number += 1
                yield json.loads(line)["text"].encode().replace(bytes([SEPARATOR]), b"")
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}; is it whole?") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f'{path}, line {number}: not a JSON object with a "text"; is it JSON lines?'
        ) from None


def split_documents(text: Bytes) -> list[Bytes]:
    """The documents of a text, each with the separator behind it, if it has any."""
    ends = np.flatnonzero(text == SEPARATOR) + 1
    return [part for part in np.split(text, ends) if len(part)]


def _join(documents: list[bytes]) -> Bytes:
    separator = bytes([SEPARATOR])
    return np.frombuffer(b"".join(text + separator for text in documents), dtype=np.uint8)


def _split_documents(documents: list[bytes]) -> Corpus:
    if len(documents) < 3:
        raise ValueError(
            f"{len(documents)} documents cannot be split into train, valid and test: "
            "give at least 3"
        )
    part = max(1, len(documents) // 20)
    return Corpus(
        _join(documents[: -2 * part]), _join(documents[-2 * part : -part]), _join(documents[-part:])
    )


def _split_file(path: Path, size: int | None) -> Corpus:
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give the text itself by --data PATH")
    found = path.stat().st_size
    if size is not None and found != size:
        raise ValueError(
            f"{path} measures {found:,} bytes, the published file {size:,}: is it unpacked, and "
            "the right one?"
        )
    text = np.fromfile(path, dtype=np.uint8)
    part = len(text) // 20
    if part < 2:
        raise ValueError(f"{path} measures {found} bytes: too few to train on")
    return Corpus(*np.split(text, [len(text) - 2 * part, len(text) - part]))


def _read_files(folder: Path, names: tuple[str, ...]) -> Bytes:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}")
    return _join([text for name in names for text in read_documents(folder / name)])


def python_sources() -> Iterator[bytes]:
    """Every module of the standard library in an order that mixes old and new, long and short."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [
        path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts[:-1])
    ]
    for path in sorted(files, key=lambda path: (path.stem[::-1], path.as_posix())):
        yield path.read_bytes().replace(bytes([SEPARATOR]), b"")
