"""Every format gives the same rows, and every mistake has a place to its name."""

import gzip
import json
import lzma
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from longspan.data import tables
from longspan.data.tables import read_rows

ROWS = [{"text": 'He said "no",\nand left.', "label": "a"}, {"text": "Zürich", "label": "b"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
GZIPPED = gzip.compress(LINES.encode(), mtime=0)
CSV = 'text,label\n"He said ""no"",\nand left.",a\nZürich,b\n'


def values(path):
    return [dict(row.values) for row in read_rows(path)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", CSV.encode()),
        ("a.csv", CSV.encode("utf-8-sig")),
        ("a.CSV", CSV.replace("\n", "\r\n").encode()),
        ("a.tsv", CSV.replace("text,label", "text\tlabel").replace('",a', '"\ta').encode()),
        ("a.jsonl", LINES.encode()),
        ("a.jsonl", LINES.replace("\n", "\n\n").encode()),
        ("a.jsonl.xz", lzma.compress(LINES.encode())),
        ("a.csv.gz", gzip.compress(CSV.encode(), mtime=0)),
    ],
)
def test_formats(name, content, tmp_path):
    path = tmp_path / name
    if name.endswith("tsv"):
        content = content.replace("Zürich,b".encode(), "Zürich\tb".encode())
    path.write_bytes(content)
    found = values(path)
    assert [{k: v.replace("\r\n", "\n") for k, v in row.items()} for row in found] == ROWS


def test_a_row_knows_its_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    assert [row.where for row in read_rows(path)] == [f"{path}, line 2", f"{path}, line 4"]


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    assert values(path) == ROWS
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        values(path)


def test_long_cells_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "word " * 100_000 + "\n")
    assert len(values(path)[0]["text"]) == 500_000


@pytest.mark.parametrize("at_once", [1, 7, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_array(indent, at_once, tmp_path, monkeypatch):
    """However the objects of an array lie across what is read at once."""
    monkeypatch.setattr(tables, "_AT_ONCE", at_once)
    path = tmp_path / "dev.json"
    text = json.dumps(ROWS, indent=indent, ensure_ascii=False)
    path.write_text(f"\n {text} \n", encoding="utf-8-sig")
    assert values(path) == ROWS
    assert [row.where for row in read_rows(path)][-1] == f"{path}, object {len(ROWS)}"
    path.write_text("[ ]")
    assert values(path) == []
    for wrong, message in (
        ("[1]", "object 1: not a JSON object but 1"),
        ('[{"a": 1} {"a": 2}]', "object 2: not JSON: expected a comma"),
        ('[{"a": 1}, {"a"', "object 2: not JSON"),
        ('[{"a": 1}', "object 2: not JSON"),
        ("[", "object 1: not JSON"),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            values(path)
    path.write_bytes(text.encode("latin1")[:-1] + b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        values(path)


def test_arrays_are_read_as_they_are_needed(tmp_path):
    path = tmp_path / "long.json"
    path.write_text("[" + '{"a": "%s"},' % ("x" * 2**19) * 4 + "not JSON")
    rows = read_rows(path)
    assert [len(next(rows).values["a"]) for _ in range(4)] == [2**19] * 4
    with pytest.raises(ValueError, match="object 5: not JSON"):
        next(rows)


def test_squad(tmp_path):
    path = tmp_path / "dev.json"
    qas = [{"id": "1", "question": "Who?", "answers": []}]
    content = {"data": [{"paragraphs": [{"context": "He.", "qas": qas}]}]}
    path.write_text(json.dumps(content))
    assert values(path) == [{"text": "He.", "qas": qas}]
    path.write_text('{"data": 1}')
    with pytest.raises(ValueError, match="not in SQuAD's form"):
        values(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"a,a\n1,2\n", "line 1: two columns are called 'a'"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "line 3: 3 cells for 2 columns"),
        ("a.csv", b'a;b\n"1";"2"\n', "line 1: one column, 'a;b', .* separated by ';'"),
        ("a.tsv", b"a,b\n1,2\n", "line 1: one column, 'a,b', .* separated by ','"),
        ("a.csv", b'a,b\n1,2\n"1,2\n', "line 3: unexpected end of data"),
        ("a.csv", b"a,b\n1,2\nZ\xfcrich,2\n", "line 3: not UTF-8 .byte 2 is 0xfc"),
        ("a.csv", "a,b\n1,2\n".encode("utf16"), "line 1: not UTF-8 .* iconv -f utf16 -t utf8"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16-le"), "line 1: not UTF-8 but UTF-16, .*utf16le"),
        ("a.csv", b"a,b\r1,2\r", "line 1: a carriage return by itself ends no line"),
        ("a.jsonl", b'{"a": ' + b"[" * 10**6, "line 1: not JSON: maximum recursion depth"),
        ("a.json", b"[{" + b'"a": {' * 10**6, "object 1: not JSON: maximum recursion depth"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "line 2: not JSON"),
        ("a.jsonl", b"[1]\n", "line 1: not a JSON object"),
        ("a.jsonl.xz", lzma.compress(LINES.encode())[:-20], "damaged or cut off"),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "damaged or cut off"),
        ("a.jsonl.gz", GZIPPED[:10] + b"\xff" * 20, "damaged or cut off"),
        ("a.jsonl", b'{"a": "ok"}\n{"a": ["\\ud83d"]}\n', r"line 2: '.ud83d' is half of a char"),
        ("a.json", b'[{"a": "\\ud83d\\ude00"}, {"\\ud83d": 1}]', "object 2: '.ud83d' is half"),
        ("a.xlsx", b"", "is none of .csv"),
    ],
)
def test_mistakes_are_named(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        values(path)


def test_missing_things_are_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist; a data set on the hub is given as hub:"):
        values(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="is a folder"):
        values(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 5, "question": null}\n')
    row = next(read_rows(path))
    assert row.text("question") == ""
    with pytest.raises(ValueError, match="line 1: there is no column 'label'; there are 'text', "):
        row.get("label")
    with pytest.raises(ValueError, match="line 1, column 'text': expected text, found 5"):
        row.text("text")


@pytest.mark.parametrize(
    ("module", "source"), [("datasets", "hub:a/b"), ("pyarrow", "table.parquet")]
)
def test_optional_packages_are_asked_for(module, source, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    (tmp_path / "table.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"pip install {module}"):
        list(read_rows(source))


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hub:imdb", ("imdb", None, "train")),
        ("hub:org/race:high#test", ("org/race", "high", "test")),
    ],
)
def test_the_hub_is_asked_for_a_configuration(source, asked, monkeypatch):
    """Many data sets have several, and none that is meant unless it is named."""
    given = []

    class Table(list):
        features: ClassVar = {"label": SimpleNamespace(int2str=["no", "yes"].__getitem__)}

    def load(name, config, split, streaming):
        given.append((name, config, split))
        return Table([{"text": "a", "label": 1}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    row = next(read_rows(source))
    assert given == [asked]
    assert (row.where, row.values) == (f"{source}, row 1", {"text": "a", "label": "yes"})


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Once upon\n\na time.\n")
    (row,) = read_rows(path)
    assert (row.where, row.text("text")) == (str(path), "Once upon\n\na time.\n")


def test_a_file_is_read_as_it_is_needed(tmp_path):
    """The mistake in the last line is found only when somebody gets there."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' * 10 + "broken\n")
    rows = read_rows(path)
    assert [next(rows).get("a") for _ in range(10)] == [1] * 10
    with pytest.raises(ValueError, match="line 11"):
        next(rows)
