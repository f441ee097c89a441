"""Predicting files: in order, streamed, and resumed where a kill left them."""

import json

import pytest
from tasks.finetuned import QUIET, asked, labelled, recipe

from longspan.tasks.finetune import finetune, make_task
from longspan.tasks.predict import Pipeline, predict_file


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


def test_outputs_are_guarded(use, tmp_path):
    source, output = labelled(tmp_path / "in.csv", 4), tmp_path / "out.jsonl"
    predict_file(use, source, output)
    with pytest.raises(ValueError, match="--resume goes on with it"):
        predict_file(use, source, output)
    with pytest.raises(ValueError, match=r"has 4 lines, .* only 2 rows"):
        predict_file(use, labelled(tmp_path / "other.csv", 2), output, resume=True)
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
