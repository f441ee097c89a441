"""Reading text: splits, documents, and what is wrong with a file."""

import gzip
import json
import lzma

import numpy as np
import pytest

from longspan.data.text import SEPARATOR, Source, read, read_documents, split_documents


def test_a_file_is_split_90_5_5(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 2)
    corpus = read(Source("file", str(path), size=200))
    assert [len(part) for part in corpus] == [180, 10, 10]
    assert np.concatenate(corpus).tobytes() == path.read_bytes()


def documents(path, count, opener=open):
    with opener(path, "wt", encoding="utf8") as file:
        for number in range(count):
            file.write(json.dumps({"id": number, "text": f"book {number} é"}) + "\n")
    return path


@pytest.mark.parametrize(("ending", "opener"), [("", open), (".xz", lzma.open), (".gz", gzip.open)])
def test_documents_may_be_compressed(tmp_path, ending, opener):
    path = documents(tmp_path / f"books.jsonl{ending}", 3, opener)
    assert [text.decode() for text in read_documents(path)] == [f"book {n} é" for n in range(3)]


def test_one_file_of_documents_is_split_by_document(tmp_path):
    corpus = read(Source("documents", str(documents(tmp_path / "books.jsonl", 40))))
    counts = [len(split_documents(part)) for part in corpus]
    assert counts == [36, 2, 2]
    first = split_documents(corpus.train)[0].tobytes()
    assert first == "book 0 é".encode() + bytes([SEPARATOR])


def test_a_folder_of_documents(tmp_path):
    for name, count in (("a", 2), ("b", 1), ("v", 1), ("t", 1)):
        documents(tmp_path / name, count)
    source = Source("documents", str(tmp_path), train=("a", "b"), valid=("v",), test=("t",))
    assert [len(split_documents(part)) for part in read(source)] == [3, 1, 1]
    limited = Source("documents", str(tmp_path), train=("a",), valid=("v",), test=("t",), limit=5)
    assert len(read(limited).train) == 5


def test_python_needs_no_path():
    corpus = read(Source("python"))
    assert len(corpus.train) > 1_000_000
    assert b"def " in corpus.test.tobytes()
    assert corpus.train.tobytes() != corpus.valid.tobytes()


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match="--data PATH"):
        read(Source("file"))
    with pytest.raises(ValueError, match="is not a file"):
        read(Source("file", str(tmp_path / "none")))
    with pytest.raises(ValueError, match="does not exist"):
        read(Source("documents", str(tmp_path / "none.jsonl")))
    with pytest.raises(ValueError, match=r"lacks gone\.jsonl"):
        read(Source("documents", str(tmp_path), train=("gone.jsonl",)))
    path = tmp_path / "text"
    path.write_bytes(b"x" * 300)
    with pytest.raises(ValueError, match="measures 300 bytes, the published file 100,000,000"):
        read(Source("file", str(path), size=100_000_000))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="too few"):
        read(Source("file", str(path)))
    with pytest.raises(ValueError, match="0 documents"):
        read(Source("documents", str(path)))
    for name, content in (("a.jsonl.xz", b"no"), ("a.jsonl.gz", b"no")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be unpacked"):
            read(Source("documents", str(tmp_path / name)))
    whole = bytearray(gzip.compress(b'{"text": "fine"}\n' * 99))
    whole[12:40] = bytes(28)  # damaged behind its head
    (tmp_path / "a.jsonl.gz").write_bytes(whole)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be unpacked"):
        read(Source("documents", str(tmp_path / "a.jsonl.gz")))
    cut = lzma.compress(b'{"text": "fine"}\n' * 9)[:-9]
    (tmp_path / "a.jsonl.xz").write_bytes(cut)
    with pytest.raises(ValueError, match=r"a\.jsonl\.xz cannot be unpacked.* is it whole"):
        read(Source("documents", str(tmp_path / "a.jsonl.xz")))
    path.write_text('{"text": "fine"}\n{"words": 3}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        read(Source("documents", str(path)))
