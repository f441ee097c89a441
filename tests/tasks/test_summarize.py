"""Summaries: learned, measured, written, and refused where they should be."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tasks.finetuned import QUIET, recipe, summed
from tasks.tiny import tiny_checkpoint, tiny_writer
from transformers import AutoTokenizer
from typer.testing import CliRunner

import longspan
from longspan import LongspanForConditionalGeneration, LongspanSeq2SeqConfig
from longspan.cli import app
from longspan.data.examples import Skips
from longspan.data.tables import Row
from longspan.tasks.finetune import finetune, make_task
from longspan.tasks.summaries import ROUGE, Rouge, read_requests
from longspan.tasks.summarize import Document, Summarizer
from longspan.train.recipe import change


def test_it_learns_what_is_asked_and_predicts(tmp_path: Path):
    """Which animal, and what is asked of it, are both needed to be right."""
    data = summed(tmp_path / "few.jsonl", count=8)
    same = {f"data__{name}": str(data) for name in ("train", "valid", "test")}
    own = recipe("summarize", tmp_path, **same, epochs=80.0, evaluation__every=0)
    found = finetune(make_task(own), tmp_path / "run", console=QUIET)
    assert found["test"]["rougeLsum"] > 0.9
    assert found["test"]["rougeLsum"] > 2 * found["test"]["lead_rougeLsum"]
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(data), "--batch", "3"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(x) for x in (tmp_path / "run/predictions/few.jsonl").open()]
    assert [line["id"] for line in lines[:4]] == ["d0#0", "d0#1", "d1#0", "d1#1"]
    assert lines[0]["summary"] == "the cat is in the house."
    assert lines[3]["summary"] == "the dog and the dog."
    text = json.loads(data.open().readline())["text"]
    use = longspan.pipeline(tmp_path / "run")
    assert use(text, question="why?")["summary"] == "the cat and the cat."
    assert use("  ") == {"skipped": "the text is empty"}
    with pytest.raises(ValueError, match=r"the input: \d+ tokens, the model reads 24.*head"):
        use(text * 9)
    head = longspan.pipeline(tmp_path / "run", too_long="head")(text * 9, question="why?")
    assert head["unread"] > 0
    rows = [{"text": text * 9, "question": "why?"}, {"text": text}, {"text": ""}]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["predict", str(tmp_path / "run"), str(tmp_path / "long.jsonl")]
    done = CliRunner().invoke(app, command)
    assert "the model reads 24" in " ".join(done.output.split())
    done = CliRunner().invoke(app, [*command, "--too-long", "head"])
    assert '1 skipped ("skipped"), 1 read in part only ("unread")' in done.output
    said: list[str] = []
    told = use(text, question="why?", say=said.append)
    assert len(said) > 2
    assert "".join(said).strip() == told["summary"] == "the cat and the cat."
    out = tmp_path / "streamed.jsonl"
    command = ["predict", str(tmp_path / "run"), str(data), "--stream", "--output", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("the cat is in the house.\nthe cat and the cat.\n")
    streamed = [json.loads(x) for x in out.read_text().splitlines()]
    assert [x["summary"] for x in streamed] == [x["summary"] for x in lines]


def test_targets_begin_as_they_end_where_mbart_names_its_language(tmp_path: Path):
    """Also those that are cut short, and what is generated: else it begins with what it never saw
    in training."""
    own = recipe("summarize", tmp_path, writing__longest=4)
    source = str(own.model.source)
    config = LongspanSeq2SeqConfig.from_pretrained(source)
    config.wrap_target, config.decoder_start_token_id = True, None
    model = LongspanForConditionalGeneration.from_pretrained(source, config=config)
    model.generation_config.decoder_start_token_id = None
    model.save_pretrained(source)
    task = make_task(own)
    built: Any = task.build()
    batch, _ = task.batch(0, 0, range(4))
    assert built.prepare_decoder_input_ids_from_labels(batch["labels"])[:, 0].tolist() == [3] * 4
    assert built.generate(batch["input_ids"], max_new_tokens=2)[:, 0].tolist() == [3] * 4


def test_queries_are_global(tmp_path: Path):
    own = recipe("summarize", tmp_path)
    use = Summarizer(own, AutoTokenizer.from_pretrained(own.model.source))
    long, none = np.arange(5, 15), np.zeros(0, dtype=int)
    batch = use.collate([Document(long, np.array([20, 21])), Document(long[:4], none)])
    assert batch["input_ids"].tolist()[0] == [2, 20, 21, 3, *range(5, 15), 3]
    assert batch["attention_mask"].sum(1).tolist() == [15, 6]
    assert batch["global_attention_mask"].sum(1).tolist() == [4, 1]
    assert "global_attention_mask" not in use.collate([Document(long, none)])
    assert [use.size(one) for one in (Document(long, long), Document(long, none))] == [23, 12]


def test_it_writes_as_the_recipe_says(tmp_path: Path):
    """And not as the checkpoint's own settings of generation do."""
    how = {"beams": 3, "length_penalty": -0.5, "no_repeat": 2, "longest": 7}
    own = recipe("summarize", tmp_path, **{f"writing__{k}": v for k, v in how.items()})
    task = make_task(own)
    model: Any = task.build()
    model.generation_config.min_length = 6
    asked: dict[str, Any] = {}
    generate = model.generate

    def remember(**given: Any) -> Any:
        asked.update(given)
        return generate(**given)

    model.generate = remember
    text = Document(np.arange(5, 15), np.array([20, 21]))
    task.write(model, [text])
    names = ("num_beams", "length_penalty", "no_repeat_ngram_size", "max_new_tokens", "min_length")
    assert [asked[name] for name in names] == [3, -0.5, 2, 7, 0]
    assert asked["global_attention_mask"].sum() == 4


def test_the_loss_is_smoothed_in_training_only(tmp_path: Path):
    losses = []
    for smoothing in (0.0, 0.5):
        own = recipe("summarize", tmp_path, writing__smoothing=smoothing, measure="loss")
        task = make_task(own)
        model = task.build().eval()
        batch, _ = task.batch(0, 0, range(4))
        labels = batch["labels"]
        assert (labels[:, 0] == 2).all()
        assert all(row[row != -100][-1] == 3 for row in labels)
        with torch.no_grad():
            losses.append(
                (float(task.loss(model, batch, None).total), task.evaluate(model, "test"))
            )
    (plain, one), (smooth, other) = losses
    assert plain != smooth
    assert one == other
    assert set(one) == {"loss", "perplexity"}


def test_forms_of_data():
    sections = [{"title": "One", "text": "a b"}, {"title": "", "text": "c"}]
    turns = [{"speaker": "Ann", "content": "hi"}, {"speaker": "Bob", "content": "yes"}]
    skips = Skips()
    (paper,) = read_requests(
        Row("x", {"id": 7, "sections": sections, "abstract": " short "}),
        {"text": "sections", "answers": "abstract"},
        skips,
    )
    assert paper == ("7", "One\na b\nc", "", "short")
    queries = [{"query": "who?", "answer": "Ann"}, {"query": "what?", "answer": ""}]
    (asked,) = read_requests(
        Row("y", {"id": "m", "transcript": turns, "queries": queries}),
        {"text": "transcript"},
        skips,
    )
    assert asked == ("m#0", "Ann: hi\nBob: yes", "who?", "Ann")
    assert skips.lines() == ["skipped 1, the summary is empty: y, query 1"]
    with pytest.raises(ValueError, match="sections with title and text"):
        list(read_requests(Row("z", {"text": [3], "summary": "s"}), {}, skips))
    with pytest.raises(ValueError, match="there is no column 'asked'"):
        list(read_requests(Row("z", {"text": "t", "summary": "s"}), {"question": "asked"}, skips))


def test_rouge_by_hand():
    """Of 4 and 3 words 2 are shared, "cats" and "cat" among them, in two sentences turned round."""
    scores = Rouge()(["The cats sleep. Dogs run."], ["Dogs run. The cat."])[0]
    by_name = dict(zip(ROUGE, scores, strict=True))
    one = 2 * (4 / 5) * (4 / 4) / (4 / 5 + 4 / 4)
    assert by_name["rouge1"] == pytest.approx(one)
    assert by_name["rouge2"] == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))
    assert by_name["rougeL"] == pytest.approx(2 * (2 / 5) * (2 / 4) / (2 / 5 + 2 / 4))
    assert by_name["rougeLsum"] == pytest.approx(one)


def test_what_is_too_long_is_said(tmp_path: Path):
    with pytest.raises(ValueError, match=r"80 of 80 documents.*--too-long head"):
        make_task(recipe("summarize", tmp_path, model__length=12))
    own = recipe("summarize", tmp_path, model__length=12, too_long="head", writing__longest=4)
    notes = " ".join(make_task(own).notes())
    assert "80 of 80 documents (100.0%) have more than 12 tokens" in notes
    assert "64 of 64 summaries to learn from have more than 4 tokens" in notes


def test_a_question_that_leaves_no_room_is_said_at_once(tmp_path: Path):
    own = recipe("summarize", tmp_path, too_long="head")
    row = {"id": "x", "text": "the cat", "question": "why " * 30, "summary": "the cat"}
    with Path(str(own.data.train)).open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"a question of 30 tokens leaves room for 0"):
        make_task(own)
    use = Summarizer(own, AutoTokenizer.from_pretrained(str(own.model.source)))
    with pytest.raises(ValueError, match=r"line 7: a question of 30 tokens"):
        use.predict(None, [Row("line 7", row)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"too_long": "split"}, "no summary is put together from pieces"),
        ({"measure": "accuracy"}, "measure=accuracy: choose from rouge1"),
        ({"writing__beams": 0}, "writing.beams=0"),
        ({"writing__smoothing": 1.0}, "writing.smoothing"),
        ({"writing__longest": 300}, "decoder of .* has positions for 256"),
        ({"model__freeze": "all-but-head"}, "not for models that write"),
    ],
)
def test_what_cannot_be_done_is_said(changes, message, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        make_task(recipe("summarize", tmp_path, **changes)).build()


def test_what_writes_nothing_cannot_be_followed(tmp_path: Path):
    finetune(make_task(recipe("classify", tmp_path, epochs=0.1)), tmp_path / "run", console=QUIET)
    with pytest.raises(ValueError, match="classify writes no texts"):
        longspan.pipeline(tmp_path / "run")("the cat", say=print)


def test_the_right_kind_of_model_is_asked_for(tmp_path: Path):
    encoder = tiny_checkpoint(tmp_path / "encoder")
    own = change(recipe("summarize", tmp_path), {"model.source": str(encoder)})
    with pytest.raises(ValueError, match=r"\(bert\) has no decoder: give one of LED, Bart, MBart"):
        make_task(own).build()
    writer = tiny_writer(tmp_path / "writer")
    other = change(recipe("classify", tmp_path), {"model.source": str(writer)})
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        make_task(other).build()


def test_without_rouge_score_the_loss_measures(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match=r"pip install 'longspan\[summarize\]'.*measure=loss"):
        make_task(recipe("summarize", tmp_path))
    assert make_task(recipe("summarize", tmp_path, measure="loss")).goal.lower_is_better
