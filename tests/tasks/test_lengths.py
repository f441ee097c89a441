"""The study of how much of a document a summary needs, and the start it is given."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks.finetuned import QUIET, summed
from transformers import AutoTokenizer
from typer.testing import CliRunner

from longspan import LongspanForConditionalGeneration
from longspan.cli import app
from longspan.recipes.summaries import scratch
from longspan.tasks.documents import make_template
from longspan.tasks.lengths import prepare, score, study
from longspan.tasks.practice import Practice, practice
from longspan.tasks.scratch import learn_words, make_writer
from longspan.train.recipe import change

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "words": 300}


def recipe(data: Path, **changes: Any) -> Any:
    settings = {
        "data.train": str(data),
        "model.window": 16,
        "updates": 3,
        "batch": 4,
        "evaluation.every": 0,
        "precision": "no",
        "writing.longest": 12,
        "writing.beams": 2,
    }
    return change(scratch(), settings | changes)


def test_words_are_learned(tmp_path: Path):
    tokenizer = learn_words(["the cat is in the house. " * 20, "the döner and the cat"], 300)
    ids = tokenizer("the cat")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert len(ids) == 4
    text = "the Döner, unseen: \u4e2d\n  spaces"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    template = make_template(tokenizer, pair=True)
    assert (template.before, template.between, template.after) == ([0], [2, 2], [2])
    folder = tmp_path / "start"
    made = make_writer(folder, ["a b " * 9], positions=64, window=8, longest=10, **TINY)
    assert make_writer(folder, [], positions=1, window=2, longest=1) == made  # it is there
    model = LongspanForConditionalGeneration.from_pretrained(made)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(made))
    assert model.config.decoder_positions == 11
    assert model.config.intermediate_size == 64


def test_readings_differ_in_their_length_alone(tmp_path: Path):
    data = summed(tmp_path / "few.jsonl", count=12)
    asked: Any = {"lengths": (48, 12), "limit": 2, "sizes": TINY, "console": QUIET}
    result = study(recipe(data), tmp_path / "out", **asked)
    assert [(arm.name, arm.length, arm.updates) for arm in result.arms] == [
        ("12", 12, 3),
        ("48", 48, 3),
    ]
    assert result.arms[0].cut == 1.0
    assert result.arms[1].cut == 0.0
    assert result.examples == 2
    recipes = [
        json.loads((tmp_path / "out" / name / "recipe.json").read_text()) for name in ("12", "48")
    ]
    differing = [key for key in recipes[0] if recipes[0][key] != recipes[1][key]]
    assert sorted(differing) == ["model", "name", "phases"]
    written = [json.loads(x) for x in (tmp_path / "out/12/written.jsonl").open()]
    assert [sorted(one) for one in written] == [["lead", "right", "written"]] * 2
    assert written[0]["right"].startswith("the ")
    with pytest.raises(ValueError, match=r"done with other settings \(updates, phases\)"):
        study(recipe(data, updates=4), tmp_path / "out", **asked)


def test_practice_is_copying(tmp_path: Path):
    """What is asked for stands in the text, and what is to be written goes on from there."""
    data = summed(tmp_path / "few.jsonl", count=4, words=90)
    own = recipe(data, **{"model.length": 64})
    ready = prepare(own, tmp_path, practised=2, sizes=TINY, console=QUIET)
    task = Practice(practice(change(own, {"model.source": str(tmp_path / "start")}), 2))
    assert task.recipe.batch == 32
    example = task.examples.train[0]
    document, asked = example.document.ids.tolist(), example.document.question.tolist()
    at = next(i for i in range(len(document)) if document[i : i + 8] == asked)
    assert document[at + 8 : at + 18] == example.target.tolist()[1:-1]
    assert len(example.target) == 12  # writing.longest
    assert all(task.size(one.document) <= 64 for one in task.examples.train)
    assert len({one.target.tobytes() for one in task.examples.train}) > 4
    # All arms start from it, and it is not made again, whoever asks.
    assert ready.model.source == str(tmp_path / "practice/checkpoints/step-00000002")
    before = (tmp_path / "practice/results.json").stat().st_mtime_ns
    asked_of: Any = {"limit": 1, "sizes": TINY, "console": QUIET, "practised": 2}
    found = study(own, tmp_path, lengths=(100,), **asked_of)
    assert (tmp_path / "practice/results.json").stat().st_mtime_ns == before
    assert (found.practised, found.arms[0].updates) == (2, 3)
    folder = next((tmp_path / "100/checkpoints").glob("step-*"))
    grown, known = (
        LongspanForConditionalGeneration.from_pretrained(path).encoder.embeddings.positions
        for path in (folder, ready.model.source)
    )
    assert (grown.num_embeddings, known.num_embeddings) == (100, 64)


def test_arms_may_be_carried_out_apart(tmp_path: Path):
    data = summed(tmp_path / "few.jsonl", count=12, words=60)
    command = ["study", "summaries", "--shrink", "--data", str(data), "--limit", "2"]
    command += ["--practice", "2", "--set", "writing.longest=10", "--output"]
    first = CliRunner().invoke(app, [*command, str(tmp_path / "a"), "--prepare"])
    assert first.exit_code == 0, first.output
    assert not (tmp_path / "a/summaries.json").exists()
    for lengths in ("16", "32", "16,32"):
        done = CliRunner().invoke(app, [*command, str(tmp_path / "a"), "--lengths", lengths])
        assert done.exit_code == 0, done.output
        assert "practised before" in done.output
    assert done.output.count("trained before") == 2
    whole = CliRunner().invoke(app, [*command, str(tmp_path / "b"), "--lengths", "16,32"])
    assert whole.exit_code == 0, whole.output
    for name in ("16", "32"):
        texts = [(tmp_path / path / name / "written.jsonl").read_text() for path in "ab"]
        assert texts[0] == texts[1]
    summed(data, count=12)
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "c"), "--prepare"])
    assert "no document of a split is that long" in " ".join(
        refused.output.replace("│", "").split()
    )
    refused = CliRunner().invoke(app, ["study", "rivals", "--practice", "2"])
    assert "--jobs and --shared are for" in " ".join(refused.output.replace("│", "").split())


def test_scores_are_those_of_the_texts(tmp_path: Path):
    """One arm copies what is right, the other is wrong; the gain is all there is to gain."""
    for name, written in (("1K", "a dog runs"), ("4K", "the cat sleeps")):
        (tmp_path / name).mkdir()
        line = {"right": "the cat sleeps", "lead": "the cat", "written": written}
        (tmp_path / name / "written.jsonl").write_text((json.dumps(line) + "\n") * 3)
    found = score({"arms": [{"name": "1K"}, {"name": "4K"}]}, tmp_path)
    first, second = found["arms"]
    assert first["gain"] is None
    assert first["scores"]["rouge1"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert second["scores"]["rougeLsum"]["value"] == 1.0
    assert second["gain"]["rouge2"]["value"] == 1.0
    assert found["lead"]["rouge1"]["value"] == pytest.approx(0.8)


def test_the_command_scores_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where rouge-score is missing texts are written all the same, and scored later."""
    data, out = summed(tmp_path / "few.jsonl", count=12), str(tmp_path / "out")
    command = ["study", "summaries", "--shrink", "--data", str(data), "--output", out]
    command += ["--lengths", "16,32", "--limit", "2"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "rouge_score.rouge_scorer", None)
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "not scored: ROUGE needs the rouge-score package" in said
    assert "longspan[summarize]" in said
    assert not (tmp_path / "out/summaries.png").exists()
    assert "lead" not in json.loads((tmp_path / "out/summaries.json").read_text())
    done = CliRunner().invoke(app, ["study", "summaries", "--output", out])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out/summaries.json").read_text())
    assert found["machine"]
    assert set(found["lead"]) == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    assert (tmp_path / "out/summaries.png").exists()
    assert "| first words |" in (tmp_path / "out/summaries.md").read_text()
    done = CliRunner().invoke(app, command)
    assert done.output.count("trained before") == 2


def test_compiled_batches_have_few_shapes(tmp_path: Path):
    from longspan.tasks.summarize import Summarize

    data = summed(tmp_path / "few.jsonl", count=8)
    start = make_writer(tmp_path / "s", ["the cat"], positions=900, window=8, longest=12, **TINY)
    own = recipe(data, **{"model.source": str(start), "model.length": 900})
    plain, compiled = (Summarize(change(own, {"compile": how})) for how in ("no", "layers"))
    batch, padded = (task.batch(0, 0, range(2))[0] for task in (plain, compiled))
    assert batch["input_ids"].shape[1] < 100
    assert padded["input_ids"].shape == (2, 512)
    assert padded["labels"].shape == (2, 12)
    assert padded["attention_mask"].sum() == batch["attention_mask"].sum()
    model = plain.build().eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**padded).loss, model(**batch).loss)
    long = {name: one.repeat(1, 9) for name, one in batch.items() if name != "labels"}
    wide = compiled._round_up({name: one[:, :600] for name, one in long.items()})
    assert wide["input_ids"].shape[1] == 900
