"""The best of given answers: formats, pieces, learning, bad input."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from tasks.finetuned import QUIET, all_splits, by_heart, offered, recipe
from tasks.tiny import tiny_checkpoint
from torch.nn.functional import cross_entropy

import longspan
from longspan.data.tables import Row, read_rows
from longspan.tasks.choice import TOKENS, Choice
from longspan.tasks.choices import read_offer, unfold_offers
from longspan.tasks.finetune import finetune, make_task
from longspan.tasks.predict import Pipeline, predict_file
from longspan.tasks.start import add_tokens, build_model, load_tokenizer
from longspan.train.recipe import change

WIKIHOP = {"text": "supports", "question": "query", "choices": "candidates", "answers": "answer"}
RACE = {"text": "article", "question": "questions", "choices": "options"}


def read(values, columns=None, separator=","):
    rows = unfold_offers(Row("here", values), columns or {})
    return [(row, read_offer(row, columns or {}, separator, answered=True)) for row in rows]


def test_wikihop_is_read_as_published(tmp_path):
    path = tmp_path / "train.json"
    one = {
        "id": "WH_train_0",
        "query": "participant_of juan rossell",
        "supports": ["The 2004 Games were held in Athens.", " ", "Rossell was in the 2004 Games."],
        "candidates": ["1996 games", "2004 games"],
        "answer": "2004 games",
    }
    path.write_text(json.dumps([one, one], indent=1))
    rows = list(read_rows(path))
    assert [row.where for row in rows] == [f"{path}, object 1", f"{path}, object 2"]
    [(_, offer)] = read(rows[0].values, WIKIHOP)
    assert offer.question == "participant_of juan rossell"
    assert offer.texts == (one["supports"][0], one["supports"][2])
    assert (offer.choices, offer.right) == (("1996 games", "2004 games"), (1,))


def test_race_has_several_questions_in_a_row():
    row = {
        "id": "dev/7",
        "article": "The cat sleeps.",
        "questions": ["Who?", "What?"],
        "options": [["cat", "dog"], ["sleeps", "A"]],
        "answers": ["A", "A"],
    }
    (first, one), (second, two) = read(row, RACE)
    assert (first.values["id"], second.values["id"]) == ("dev/7#0", "dev/7#1")
    assert second.where == "here, question 1"
    assert one.right == (0,)
    assert two.right == (1,)  # the text of a choice comes before its letter
    assert one.texts == two.texts == ("The cat sleeps.",)
    with pytest.raises(ValueError, match="column 'answers': expected a list of 2"):
        read({**row, "answers": ["A"]}, RACE)


@pytest.mark.parametrize(
    ("choices", "answer", "right"),
    [
        (["cat", "dog"], "dog", (1,)),
        (["cat", "dog"], 1, (1,)),
        ("cat,dog , cow", "dog", (1,)),
        ('["cat", "dog, wet"]', "dog, wet", (1,)),
        (["cat", "dog", "cat"], "cat", (0, 2)),
        (["cat", "dog"], "B", (1,)),
        (["cat", "dog"], "C", ()),
        (["cat", "dog"], 2, ()),
        (["cat", "dog"], "cow", ()),
        ([3, 4], 4, (1,)),
    ],
)
def test_the_forms_of_choices(choices, answer, right):
    row = {"text": "x", "question": "who?", "choices": choices, "answers": answer}
    [(_, offer)] = read(row)
    assert offer.right == right
    assert (offer.flaw(answered=True) is None) == bool(right)


def test_what_cannot_be_used():
    row = {"text": "x", "question": "who?", "choices": ["a", "b"], "answers": "a"}
    for change_, flaw in (
        ({"text": " "}, "the text is empty"),
        ({"text": []}, "the text is empty"),
        ({"question": ""}, "the question is empty"),
        ({"choices": ["a"]}, "there are fewer than two choices"),
        ({"choices": ["a", " "]}, "a choice is empty"),
        ({"answers": "c?"}, "the answer is none of the choices"),
    ):
        [(_, offer)] = read(row | change_)
        assert offer.flaw(answered=True) == flaw
    for column in row:
        with pytest.raises(ValueError, match=f"there is no column '{column}'"):
            read({name: value for name, value in row.items() if name != column})
    with pytest.raises(ValueError, match="expected a list, found 5"):
        read(row | {"choices": 5})
    with pytest.raises(ValueError, match="expected a list of texts"):
        read(row | {"text": ["a", 5]})


def test_the_layout_is_wikihops(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"text": ["the river", "in a house"], "question": "when?", "choices": ["cat", "dog"]}
    path.write_text((json.dumps(row | {"answer": "dog"}) + "\n") * 8)
    task = Choice(recipe("choice", tmp_path, **all_splits(path), model__length=40))
    batch = task.collate(task.asked.train[:2])
    tokens = task.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    expected = (
        "[CLS] [question] when ? [/question] [ent] cat [/ent] [ent] dog [/ent] [SEP] "
        "the river [SEP] in a house [SEP]"
    )
    assert " ".join(tokens) == f"{expected} {expected}"
    assert [tokens[place] for place in batch["place"]] == ["[ent]"] * 4
    assert batch["right"].tolist() == [False, True] * 2
    # Everything before the first separator is global.
    done = task.build().eval()(batch["input_ids"], cu_seqlens=batch["cu_seqlens"])
    wide = done.global_attention_mask[0].tolist()
    assert wide == ([True] * 11 + [False] * 8) * 2


def test_scores_are_the_mean_over_pieces(tmp_path):
    task = Choice(recipe("choice", tmp_path))
    assert "30 of 30 documents (100.0%) have more than 24 tokens" in task.notes()[-1]
    model = task.build().eval()
    some = task.asked.train[:3]
    batch = task.collate(some)
    assert batch["pieces"].min() > 1
    with torch.no_grad():
        found = task.scores(model, batch)
        names = ("input_ids", "cu_seqlens", "token_type_ids")
        logits = model(**{name: batch[name] for name in names}).logits.flatten()
    ids = batch["input_ids"].flatten()
    marks = logits[ids == task.tokenizer.convert_tokens_to_ids("[ent]")]
    each = marks.split((2 * batch["pieces"]).tolist())
    expected = torch.stack([own.view(-1, 2).mean(dim=0) for own in each])
    torch.testing.assert_close(found.view(-1, 2), expected)
    right = torch.tensor([int(one.right.argmax()) for one in some])
    torch.testing.assert_close(
        task.loss(model, batch, None).total, cross_entropy(expected, right), check_dtype=False
    )
    # Every token of a document is read.
    lengths = torch.tensor([len(one.document) for one in some])
    front = len(some[0].front) + task.template.size
    assert len(ids) >= int(lengths.sum()) + front * int(batch["pieces"].sum())


def test_padded_and_packed_are_the_same(tmp_path):
    made = recipe("choice", tmp_path, overlap=3)
    packed, padded = Choice(made), Choice(change(made, {"packed": False}))
    model = packed.build().eval()
    some = packed.asked.train[:3]
    with torch.no_grad():
        one = packed.scores(model, packed.collate(some))
        two = padded.scores(model, padded.collate(some))
    torch.testing.assert_close(one, two)


def test_first_tokens_only(tmp_path):
    """The baseline: the same checkpoint reads the beginning, and says of how many."""
    task = Choice(recipe("choice", tmp_path, too_long="head"))
    assert "have more than 24 tokens (the longest 31) and are read in part only" in task.notes()[-1]
    batch = task.collate(task.asked.train[:4])
    assert batch["pieces"].tolist() == [1] * 4
    assert batch["cu_seqlens"].diff().tolist() == [24] * 4


def test_new_tokens_have_embeddings_like_the_others(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    tokenizer = load_tokenizer(source)
    size = len(tokenizer)
    added = add_tokens(tokenizer, TOKENS)
    assert added == list(range(size, size + 4))
    assert add_tokens(tokenizer, TOKENS) == []
    task = Choice(recipe("choice", tmp_path))
    old = build_model(task.recipe.model, longspan.LongspanForTokenClassification, tokenizer)
    new: Any = task.build()
    before, after = (one.get_input_embeddings().weight.detach() for one in (old, new))
    assert len(after) == new.config.vocab_size == size + 4
    torch.testing.assert_close(after[:size], before[:size])
    fresh = after[size:]
    assert len(before) > size  # a table may have spare rows; what was in them is nobody's
    assert not torch.equal(fresh[0], before[size])
    assert 0.5 < float(fresh.std() / before.std()) < 1.5
    assert len({tuple(row) for row in fresh.tolist()}) == 4


def test_it_learns_by_heart_and_predicts(tmp_path):
    path = offered(tmp_path / "few.jsonl", 6, words=40)
    made = recipe("choice", tmp_path, **by_heart(path))
    results = finetune(make_task(made), tmp_path / "run", console=QUIET)
    assert results["test"]["accuracy"] == 1.0
    use = longspan.pipeline(tmp_path / "run")
    assert set(TOKENS) <= set(use.task.tokenizer.get_vocab())  # saved beside the weights
    row = json.loads(path.read_text().splitlines()[0])
    found = use(row["text"], question=row["question"], choices=row["choices"])
    assert found["answer"] == row["answer"] == row["choices"][found["choice"]]
    chances = [one["probability"] for one in found["candidates"]]
    assert sum(chances) == pytest.approx(1.0)
    assert int(np.argmax(chances)) == found["choice"]
    assert [one["text"] for one in found["candidates"]] == row["choices"]
    assert predict_file(use, path, tmp_path / "out.jsonl") == 6
    made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["id"] for one in made] == [f"d{n}" for n in range(6)]
    assert use(" ", question="when?", choices=["a", "b"]) == {"skipped": "the text is empty"}
    with pytest.raises(ValueError, match="choice needs choices"):
        use("the cat", question="when?")
    with pytest.raises(ValueError, match="question with its choices of 108 tokens leaves room"):
        use("the cat", question="when " * 100, choices=["cat", "dog"])


def test_a_run_goes_on_to_the_same_losses(tmp_path):
    made = recipe("choice", tmp_path, epochs=2.0, log_every=1)

    def losses(run):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "split" not in line}

    finetune(make_task(made), tmp_path / "whole", console=QUIET)
    stopped = make_task(made)
    batch = stopped.batch

    def fail(number, step, rows):
        if step == 4:
            raise KeyboardInterrupt
        return batch(number, step, rows)

    stopped.batch = fail
    with pytest.raises(KeyboardInterrupt):
        finetune(stopped, tmp_path / "broken", console=QUIET)
    finetune(make_task(made), tmp_path / "broken", resume=True, console=QUIET)
    assert losses(tmp_path / "broken") == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)


def test_race_rows_are_predicted_question_by_question(tmp_path):
    path = tmp_path / "race.jsonl"
    row = {"id": "r", "article": "the cat is in the house", "questions": ["when?", "why?"]}
    row |= {"options": [["cat", "dog"], ["house", "river"]], "answers": ["A", "A"]}
    path.write_text((json.dumps(row) + "\n") * 6)
    columns = {**RACE, "id": "id"}
    how = {"epochs": 0.5, "data__columns": columns, "model__length": 40}
    made = recipe("choice", tmp_path, **all_splits(path), **how)
    finetune(make_task(made), tmp_path / "run", console=QUIET)
    del row["answers"]
    path.write_text(json.dumps(row) + "\n")
    assert predict_file(Pipeline(tmp_path / "run"), path, tmp_path / "out.jsonl") == 2
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["r#0", "r#1"]
    assert [one["text"] for one in lines[1]["candidates"]] == ["house", "river"]


def test_bad_examples_are_counted_or_refused(tmp_path):
    path = offered(tmp_path / "some.jsonl", 12)
    lines = path.read_text().splitlines()
    wrong = json.loads(lines[0]) | {"answer": "a cow"}
    path.write_text("\n".join([*lines, json.dumps(wrong)]))
    task = Choice(recipe("choice", tmp_path, data__train=str(path)))
    assert f"skipped 1, the answer is none of the choices: {path}, line 13" in task.notes()
    path.write_text("\n".join([json.dumps(wrong)] * 3))
    with pytest.raises(ValueError, match=r"leaves no example .* skipped 3, the answer is none of"):
        Choice(recipe("choice", tmp_path, data__train=str(path)))
    long = json.loads(lines[0]) | {"question": "when " * 90}
    path.write_text("\n".join([*lines, json.dumps(long)]))
    with pytest.raises(ValueError, match=r"leaves room for 0 of the text in model\.length=24"):
        Choice(recipe("choice", tmp_path, data__train=str(path)))
    with pytest.raises(ValueError, match=r"documents .* are refused"):
        Choice(recipe("choice", tmp_path, too_long="refuse"))
