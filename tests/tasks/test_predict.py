"""Predicting files: in order, streamed, and resumed where a kill left them."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from tasks.finetuned import QUIET, asked, labelled, recipe

from longspan.tasks.finetune import finetune, make_task
from longspan.tasks.lines import name_of, remarks
from longspan.tasks.predict import Pipeline, check_file, predict_file, rename


@pytest.fixture(scope="module")
def use(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classify")
    finetune(make_task(recipe("classify", folder, epochs=1.0)), folder / "run", console=QUIET)
    return Pipeline(folder / "run")


def test_a_killed_prediction_goes_on(use, tmp_path):
    source, whole, broken = labelled(tmp_path / "in.csv", 20), tmp_path / "a", tmp_path / "b"
    assert predict_file(use, source, whole, batch=3) == 20
    lines = whole.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["row"] for line in lines] == list(range(20))
    broken.write_bytes(b"".join(lines[:7]) + lines[7][:15])
    predicted = []
    original = use.rows
    use.rows = lambda rows, say=None: predicted.extend(rows) or original(rows)
    assert predict_file(use, source, broken, resume=True, batch=3) == 20
    use.rows = original
    assert len(predicted) == 13
    made = [json.loads(line) for line in broken.read_text().splitlines()]
    for one, other in zip(made, map(json.loads, lines), strict=True):
        assert (one["row"], one["label"]) == (other["row"], other["label"])
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)


def test_rows_before_a_mistake_are_kept(use, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = json.dumps({"id": 7, "body": "the cat"}) + "\n"
    source.write_text(good * 4 + "{}\n")
    with pytest.raises(ValueError, match="line 5: there is no column 'body'"):
        predict_file(use, source, output, batch=2)
    assert len(output.read_text().splitlines()) == 4
    source.write_text(good * 4 + json.dumps({"body": ""}) + "\n")
    assert predict_file(use, source, output, batch=2, resume=True) == 5
    made = [json.loads(line) for line in output.read_text().splitlines()]
    assert made[0]["id"] == 7
    assert made[4] == {"row": 4, "skipped": "the text is empty"}


def test_white_space_and_nothing_are_empty_texts(use, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"body": " \\n"}\n{"body": null}\n{"body": "the cat"}\n')
    predict_file(use, source, output)
    made = [json.loads(line) for line in output.read_text().splitlines()]
    assert [one.get("skipped") for one in made] == ["the text is empty"] * 2 + [None]


def test_any_id_can_be_written(use, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source, output = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    days = [datetime(2020, 1, day) for day in (1, 2)]
    parquet.write_table(pyarrow.table({"id": days, "body": ["the cat", "a dog"]}), source)
    predict_file(use, source, output)
    lines = output.read_text().splitlines(keepends=True)
    assert json.loads(lines[0])["id"] == "2020-01-01 00:00:00"
    output.write_text(lines[0])
    assert predict_file(use, source, output, resume=True) == 2
    assert len(output.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["classify", "spans", "choice", "multihop", "coref", "mlm"])
def test_what_is_not_read_at_once_is_counted(name, tmp_path):
    made = recipe(name, tmp_path, epochs=0.5, too_long="split", model__length=64)
    finetune(make_task(made), tmp_path / "run", console=QUIET)
    long = "the cat is in the house . " * 20 + ("[MASK]" if name == "mlm" else "")
    text = [("the cat", [long]), ("a dog", [long])] if name == "multihop" else long
    given = {"choice": ["when?", ["cat", "dog"]], "spans": ["when?"], "multihop": ["when?"]}
    row = {made.data.columns.get("text", "text"): text}
    row |= zip(("question", "choices"), given.get(name, []), strict=False)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(row) + "\n")
    predict_file(Pipeline(tmp_path / "run"), source, output)
    assert remarks(output) == ['1 read in pieces ("pieces")']
    assert json.loads(output.read_text())["pieces"] > 2
    output.unlink()
    predict_file(Pipeline(tmp_path / "run", too_long="head"), source, output)
    assert remarks(output) == ['1 read in part only ("unread")']


@pytest.mark.parametrize("name", ["choice", "coref"])
def test_columns_may_be_called_otherwise(name, tmp_path):
    made = recipe(name, tmp_path, epochs=0.5, too_long="split")
    finetune(make_task(made), tmp_path / "run", console=QUIET)
    renamed = {
        "choice": {"text": "passage", "question": "asked", "choices": "offer", "id": "key"},
        "coref": {"sentences": "words", "id": "key"},
    }[name]
    lines = Path(str(made.data.train)).read_text().splitlines()[:3]
    rows = [json.loads(line) for line in lines]
    plain, other = tmp_path / "plain.jsonl", tmp_path / "other.jsonl"
    plain.write_text("\n".join(lines))
    for row in rows:
        for own, column in renamed.items():
            row[column] = row.pop(own)
    other.write_text("\n".join(map(json.dumps, rows)))
    predict_file(Pipeline(tmp_path / "run"), plain, tmp_path / "a")
    check_file(rename(made, renamed), other, renamed)
    predict_file(Pipeline(tmp_path / "run", columns=renamed), other, tmp_path / "b")
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    with pytest.raises(ValueError, match="txet is unknown; did you mean text"):
        Pipeline(tmp_path / "run", columns={"txet": "body"})


def test_outputs_are_guarded(use, tmp_path):
    source, output = labelled(tmp_path / "in.csv", 4), tmp_path / "out.jsonl"
    predict_file(use, source, output)
    with pytest.raises(ValueError, match="--resume goes on with it"):
        predict_file(use, source, output)
    with pytest.raises(ValueError, match=r"has 4 lines, .* only 2 rows"):
        predict_file(use, labelled(tmp_path / "other.csv", 2), output, resume=True)
    rows = [{"id": number, "body": "the cat"} for number in range(6)]
    for first in (0, 1):
        part = "".join(json.dumps(row) + "\n" for row in rows[first:])
        (tmp_path / f"{first}.jsonl").write_text(part)
    predict_file(use, tmp_path / "0.jsonl", tmp_path / "ids.jsonl")
    lines = (tmp_path / "ids.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ids.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(ValueError, match=r"line 2 of .* is not of row 1 of .* id is 2: is it anot"):
        predict_file(use, tmp_path / "1.jsonl", tmp_path / "ids.jsonl", resume=True)
    with pytest.raises(ValueError, match="is a folder; name a file"):
        predict_file(use, source, tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"holds no run: there is no recipe\.json"):
        Pipeline(tmp_path)
    with pytest.raises(ValueError, match="holds no run: it does not exist"):
        Pipeline(tmp_path / "nowhere")


def test_questions_of_a_document_become_rows(tmp_path):
    made = recipe("spans", tmp_path, epochs=0.5)
    finetune(make_task(made), tmp_path / "run", console=QUIET)
    use = Pipeline(tmp_path / "run")
    source = asked(tmp_path / "in.jsonl", 3)
    assert predict_file(use, source, tmp_path / "out.jsonl") == 3
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert first["id"] == "d0#0"
    assert {"answer", "candidates"} <= first.keys()
    # In a table of text they are JSON, as in training.
    table = tmp_path / "in.csv"
    table.write_text('text,qas\nthe cat,"[{""question"": ""when?""}, {""question"": ""why?""}]"\n')
    assert predict_file(use, table, tmp_path / "table.jsonl") == 2
    table.write_text('text,qas\nthe cat,"[""when?""]"\n')
    with pytest.raises(ValueError, match="line 2, column 'qas': expected a list of questions"):
        predict_file(use, table, tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("some/sales.2024.csv", "sales.2024"),
        ("sales.2024.jsonl.xz", "sales.2024"),
        ("a.parquet", "a"),
        ("hub:org/v1.5-set:all#test", "v1.5-set:all#test"),
    ],
)
def test_the_name_for_what_is_made_of_a_source(source, name):
    assert name_of(source) == name
