"""Answers with evidence over several paragraphs: formats, layout, decoding, stages, measures."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tasks.finetuned import QUIET, by_heart, hopping, recipe

import longspan
from longspan.data.tables import Row, read_rows
from longspan.tasks.documents import Template, pieces
from longspan.tasks.evidence import Found, choose_evidence, describe
from longspan.tasks.finetune import finetune, finetune_seeds, make_task, read_metrics
from longspan.tasks.hops import Hop, Paragraph, read_hop
from longspan.tasks.measures import joint_scores
from longspan.tasks.multihop import Multihop
from longspan.tasks.paragraphs import TOKENS, Asked, Part
from longspan.tasks.predict import Pipeline, predict_file
from longspan.train.recipe import change

HOTPOT = {"text": "context", "answers": "answer", "evidence": "supporting_facts", "id": "_id"}
CONTEXT = [["Rome", ["Rome is old.", " It is in Italy."]], ["Paris", ["Paris is in France."]]]


def hop(answer="Italy", facts=(("Rome", 1),), question="Where?"):
    paragraphs = tuple(Paragraph(title, tuple(sentences)) for title, sentences in CONTEXT)
    return Hop(question, paragraphs, answer, tuple(facts))


def test_hotpotqa_is_read_as_published(tmp_path):
    published = {
        "_id": "5a7a",
        "answer": "Italy",
        "question": "Where is Rome?",
        "supporting_facts": [["Rome", 0], ["Rome", 1], ["Rome", 0]],
        "context": CONTEXT,
        "type": "bridge",
        "level": "easy",
    }
    path = tmp_path / "hotpot_dev_distractor_v1.json"
    path.write_text(json.dumps([published]))
    [row] = read_rows(path)
    expected = hop("Italy", [("Rome", 0), ("Rome", 1)], "Where is Rome?")
    assert read_hop(row, HOTPOT, answered=True) == expected
    on_the_hub = {
        **published,
        "supporting_facts": {"title": ["Rome", "Rome"], "sent_id": [0, 1]},
        "context": {"title": ["Rome", "Paris"], "sentences": [one[1] for one in CONTEXT]},
    }
    assert read_hop(Row("here", on_the_hub), HOTPOT, answered=True) == expected
    in_a_table = {**published, "context": json.dumps(CONTEXT)}
    assert read_hop(Row("here", in_a_table), HOTPOT, answered=True) == expected
    asked = read_hop(Row("here", {"question": "Where?", "context": CONTEXT}), HOTPOT, False)
    assert (asked.answer, asked.facts) == ("", ())


def test_what_cannot_be_used():
    row = {"question": "q", "text": CONTEXT, "answers": "Italy", "evidence": []}
    for column in row:
        with pytest.raises(ValueError, match=f"there is no column '{column}'"):
            read_hop(Row("here", {k: v for k, v in row.items() if k != column}), {}, True)
    for wrong, message in (
        ({"text": "Rome"}, "expected a list of pairs, title and sentences, not 'Rome'"),
        ({"text": [["Rome", "Rome is old."]]}, "a title and a list of sentences"),
        ({"text": [["Rome"]]}, "expected a list of pairs"),
        ({"evidence": [["Rome", "1"]]}, "a fact is a title and a number"),
    ):
        with pytest.raises(ValueError, match=message):
            read_hop(Row("here", row | wrong), {}, True)
    for empty, flaw in (
        ({"question": " "}, "the question is empty"),
        ({"text": []}, "there is no paragraph with text"),
        ({"text": [["Rome", [" "]]]}, "there is no paragraph with text"),
        ({"answers": ""}, "the answer is empty"),
    ):
        assert read_hop(Row("here", row | empty), {}, True).flaw(answered=True) == flaw


def test_where_answers_stand():
    assert hop().places() == {(0, 2): [(10, 15)]}
    assert hop("old").places() == {(0, 1): [(8, 11)]}  # in the paragraph, though not in the fact
    assert hop("Rome").places() == {(0, 0): [(0, 4)]}  # its title
    assert hop("France").places() == {}  # chance
    assert hop("is").places() == {(0, 2): [(4, 6)]}
    assert hop("Yes").places() == {}
    assert [hop(answer).kind for answer in ("Yes.", "no", "nowhere")] == ["yes", "no", "span"]


def toy(folder, **changes):
    return recipe("multihop", folder, **({"model__length": 80} | changes))


def test_the_layout_is_hotpotqas(tmp_path):
    path = tmp_path / "one.jsonl"
    context = [["garden", ["the cat is in.", " a dog was in."]], ["river", ["and a house."]]]
    row = {"question": "when?", "answer": "dog", "text": context, "evidence": [["garden", 1]]}
    path.write_text((json.dumps(row) + "\n") * 6)
    task = Multihop(toy(tmp_path, data__train=str(path)))
    batch, [at, _] = task.collate(task.asked.train[:2])
    tokens = task.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    expected = (
        "[CLS] [q] when ? [/q] <t> garden </t> the cat is in . [s] a dog was in . [s] "
        "<t> river </t> and a house . [s] [SEP]"
    )
    assert " ".join(tokens) == f"{expected} {expected}"
    half = tokens[: len(tokens) // 2]
    wide = [n for n, own in enumerate(batch["global_attention_mask"][0]) if own and n < len(half)]
    assert wide == [0, 1, 2, 3, 4, *(n for n, t in enumerate(half) if t in ("<t>", "[s]"))]
    assert [tokens[place] for place in batch["paragraphs"]] == ["<t>"] * 4
    assert [tokens[place] for place in batch["sentences"]] == ["[s]"] * 6
    assert batch["relevant"].tolist() == [1, 0] * 2
    assert batch["evidence"].tolist() == [0, 1, 0] * 2
    for name in ("starts", "ends"):
        places = batch["tokens"][batch[name]]
        assert [tokens[place] for place in places] == ["dog"] * 2
    assert not {tokens[place] for place in batch["tokens"]} & {*TOKENS, "[CLS]", "[SEP]"}
    assert len(set(at.unit.tolist())) == 5  # two titles, three sentences


@pytest.mark.parametrize(
    ("chosen", "count"), [("none", 0), ("first", 1), ("question", 5), (None, 5 + 4 + 8)]
)
def test_what_is_global_can_be_set(chosen, count, tmp_path):
    task = Multihop(toy(tmp_path, model__global_tokens=chosen))
    batch, _ = task.collate(task.asked.train[:1])
    assert int(batch["global_attention_mask"].sum()) == count


def test_pieces_hold_whole_paragraphs():
    template = Template([1], [], [2], False)
    document, question = np.arange(100, 130), np.array([7, 8])

    def spans(breaks, length, overlap=0):
        made = pieces(document, length, template, "split", overlap, question, breaks=breaks)
        assert all(len(piece.ids) <= length for piece in made)
        return [piece.span for piece in made]

    assert spans([10, 20, 30], 40) == [(0, 30)]
    assert spans([10, 20, 30], 24) == [(0, 20), (20, 30)]
    assert spans([10, 20, 30], 16) == [(0, 10), (10, 20), (20, 30)]
    assert spans([3, 28, 30], 24) == [(0, 3), (3, 23), (8, 28), (28, 30)]  # one is cut


def test_pieces_change_nothing_but_what_is_seen(tmp_path):
    """Each token is scored once, and whatever is right is still right."""
    whole, cut = (Multihop(toy(tmp_path, model__length=n)) for n in (80, 34))
    assert any("read in pieces" in note for note in cut.notes())
    one, _ = whole.collate(whole.asked.train[:4])
    two, _ = cut.collate(cut.asked.train[:4])
    assert two["pieces"].min() > 1
    for name in ("starts", "ends", "relevant", "evidence", "kind", "group"):
        assert torch.equal(one[name], two[name])
    for name in ("tokens", "paragraphs", "sentences"):
        ids = [batch["input_ids"].flatten()[batch[name]] for batch in (one, two)]
        assert torch.equal(*ids)
    model = cut.build().eval()
    with torch.no_grad():
        kinds = cut.scores(model, two).kind
        names = ("input_ids", "cu_seqlens", "token_type_ids", "global_attention_mask")
        each = model(**{name: two[name] for name in names}).kind_logits
    parts = each.split(two["pieces"].tolist())
    torch.testing.assert_close(kinds, torch.stack([own.mean(dim=0) for own in parts]))


def test_padded_and_packed_are_the_same(tmp_path):
    made = toy(tmp_path, model__length=34)
    packed, padded = Multihop(made), Multihop(change(made, {"packed": False}))
    model = packed.build().eval()
    some = packed.asked.train[:3]
    with torch.no_grad():
        one = packed.scores(model, packed.collate(some)[0])
        two = padded.scores(model, padded.collate(some)[0])
    for mine, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_beginning_alone(tmp_path):
    task = Multihop(toy(tmp_path, model__length=34, too_long="head"))
    assert "(100.0%) have more than 34 tokens" in task.notes()[-1]
    batch, layouts = task.collate(task.asked.train[:5])
    assert batch["pieces"].tolist() == [1] * 5
    assert {len(at.paragraphs) for at in layouts} == {2}
    model = task.build().eval()
    assert bool(task.loss(model, batch, None).total.isfinite())
    for found in task.find(model, task.asked.train[:5]):
        assert set(found.paragraphs) == {0, 1}
    shortest = Multihop(toy(tmp_path, model__length=9, too_long="head"))
    batch, _ = shortest.collate(shortest.asked.train[:2])
    assert len(batch["sentences"]) == 0
    assert bool(shortest.loss(model, batch, None).total.isfinite())


def test_evidence_comes_from_two_paragraphs():
    paragraphs = {0: 3.0, 1: -1.0, 2: 2.0, 3: 9.0}
    sentences = {(0, 0): 1.0, (0, 1): -1.0, (0, 2): 0.5, (1, 0): 8.0, (2, 0): -3.0, (2, 1): -2.0}
    # The third has no sentence that was read; the best of the second one counts though unlikely.
    assert choose_evidence(paragraphs, sentences) == [(0, 0), (0, 2), (2, 1)]
    assert choose_evidence({5: -4.0}, {(5, 0): -1.0}) == [(5, 0)]
    assert choose_evidence({}, {}) == []


def scores(found, right, facts=(("a", 0),), right_facts=(("a", 0),)):
    made = joint_scores(found, right, facts, right_facts)
    return [made["exact"], made["f1"], made["evidence_exact"], made["evidence_f1"]], made


def test_official_measures_by_hand():
    """HotpotQA's script: joint precision and recall are products; yes and no count as a whole."""
    assert scores("The Rome!", "rome")[0] == [1.0, 1.0, 1.0, 1.0]
    # Words: 2 of 3 found are right, 2 of 2 right ones are found: F1 4/5.
    # Facts: 1 of 2 found is right, 1 of 3 right ones is found: F1 2/5.
    parts, made = scores(
        "old city Rome", "the old Rome", [("a", 0), ("b", 1)], [("a", 0), ("c", 0), ("c", 1)]
    )
    assert parts == [0.0, pytest.approx(4 / 5), 0.0, pytest.approx(2 / 5)]
    # Joint: precision 2/3 * 1/2 = 1/3, recall 1 * 1/3 = 1/3.
    assert made["joint_f1"] == pytest.approx(1 / 3)
    assert made["joint_exact"] == 0.0
    assert scores("yes", "yes it is")[0][:2] == [0.0, 0.0]
    assert scores("no way", "no")[0][:2] == [0.0, 0.0]
    assert scores("noanswer", "noanswer here")[0][:2] == [0.0, 0.0]
    assert scores("Yes", "yes")[0][:2] == [1.0, 1.0]
    # The same facts twice count once, nothing found is nothing right.
    assert scores("a", "b", [("a", 0), ("a", 0)], [("a", 0)])[0][2:] == [1.0, 1.0]
    parts, made = scores("Rome", "Rome", [], [("a", 0)])
    assert parts == [1.0, 1.0, 0.0, 0.0]
    assert (made["joint_f1"], made["joint_exact"]) == (0.0, 0.0)
    assert scores("x", "y")[0][:2] == [0.0, 0.0]


def test_it_learns_by_heart_and_predicts(tmp_path):
    path = hopping(tmp_path / "few.jsonl", 4)
    made = recipe("multihop", tmp_path, **by_heart(path) | {"epochs": 240.0}, answers__longest=3)
    results = finetune(make_task(made), tmp_path / "run", console=QUIET)
    assert results["test"]["joint_exact"] == 1.0
    use = longspan.pipeline(tmp_path / "run")
    assert set(TOKENS) <= set(use.task.tokenizer.get_vocab())  # saved beside the weights
    assert predict_file(use, path, tmp_path / "out.jsonl") == 4
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for line, row in zip(lines, map(json.loads, path.read_text().splitlines()), strict=True):
        assert (line["id"], line["answer"]) == (row["id"], row["answer"])
        found = {(one["title"], one["sentence"]) for one in line["evidence"]}
        assert found == {tuple(fact) for fact in row["evidence"]}
        for one in line["evidence"]:
            title, sentences = row["text"][one["paragraph"]]
            assert (one["title"], one["text"]) == (title, sentences[one["sentence"]])
        for one in line["candidates"]:
            title, sentences = row["text"][one["paragraph"]]
            text = "".join(sentences) if one["in"] == "text" else title
            assert text[one["start"] : one["end"]] == one["text"]
        assert ("start" in line) == (line["kind"] == "span") == (row["answer"] == "dog")
    assert use([], question="when?") == {"skipped": "there is no paragraph with text"}
    with pytest.raises(ValueError, match="multihop needs question"):
        use(CONTEXT)
    with pytest.raises(ValueError, match="a question of 92 tokens leaves room for 0"):
        use(CONTEXT, question="when " * 90)
    with pytest.raises(ValueError, match="the input, column 'text': expected a list of pairs"):
        use("the cat", question="when?")


def test_offsets_with_odd_white_space(tmp_path):
    made = toy(tmp_path, epochs=0.2, answers__longest=2)
    finetune(make_task(made), tmp_path / "run", console=QUIET)
    context = [("The  Cat", ["A\tdog  was.", "in the  house .", "  and a River"])]
    found = Pipeline(tmp_path / "run")(context, question="when?")
    assert len(found["candidates"]) > 10
    for one in found["candidates"]:
        text = "".join(context[0][1]) if one["in"] == "text" else context[0][0]
        assert text[one["start"] : one["end"]] == one["text"] == one["text"].strip() != ""


def test_an_answer_keeps_its_last_accent():
    """Also where that is a character of its own, of which no token knows."""
    own = Hop("Where?", (Paragraph("T", ("cafe\u0301 .",)),), "", ())
    empty, no = np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=bool)
    part = Part(np.arange(1), np.array([1]), np.array([(0, 4)]), no, empty, no, False)
    asked = Asked(np.arange(1), [part], (0,), 0)
    told = describe(own, asked, Found("span", [(0, 0, 0, 1.0)], 2.0, [], {}, {}))
    assert (told["answer"], told["end"]) == ("cafe\u0301", 5)


def test_candidates_come_once_and_are_not_blank():
    """As byte pairs have it: tokens of white space alone, and two of them for one character."""
    own = Hop("Where?", (Paragraph("Rome", ("Is \U0001f600",)),), "", ())
    ids, unit = np.arange(6), np.array([-1, -1, 1, 1, 1, 1])
    offsets = np.array([(0, 0), (0, 0), (0, 2), (2, 3), (3, 4), (3, 4)])
    empty = np.zeros((0, 2), dtype=np.int64)
    part = Part(ids, unit, offsets, np.array([5]), empty, np.array([False]), False)
    spans = [(0, 3, 3, 5.0), (0, 4, 5, 4.0), (0, 5, 5, 3.0), (0, 2, 3, 2.0), (0, 2, 2, 1.0)]
    found = Found("span", spans, 6.0, [], {}, {})
    told = describe(own, Asked(ids, [part], (0,), 0), found)
    assert [(one["text"], one["start"], one["end"]) for one in told["candidates"]] == [
        ("\U0001f600", 3, 4),
        ("Is", 0, 2),
    ]
    assert told["answer"] == "\U0001f600"
    assert told["candidates"][0]["probability"] == pytest.approx(np.exp(-2.0))


def test_two_stages(tmp_path):
    made = toy(tmp_path, hops__stages=2, hops__keep=2, epochs=1.0)
    task = make_task(made)
    results = finetune(task, tmp_path / "run", console=QUIET)
    assert "the first stage chose 2.0 paragraphs a question" in results["notes"]
    for one in task.asked.train:  # what matters is read in any case
        assert set(one.chosen) == {n for n, part in enumerate(one.parts) if part.relevant}
    assert all(len(one.chosen) == 2 for one in task.asked.test)
    # The first stage is chosen by what it chooses, the second by what it answers.
    measures = {
        folder.name: json.loads((folder / "recipe.json").read_text())["measure"]
        for folder in (tmp_path / "run", tmp_path / "run" / "chooser")
    }
    assert measures == {"run": "joint_f1", "chooser": "paragraphs_kept"}
    assert "paragraphs_kept" in read_metrics(tmp_path / "run" / "chooser")[-1]
    use = longspan.pipeline(tmp_path / "run")
    row = json.loads((tmp_path / "hopping.jsonl").read_text().splitlines()[0])
    found = use(row["text"], question="when?")
    assert len(found["paragraphs"]) == 2
    # Done before: nothing is trained again, in neither stage.
    first = tmp_path / "run" / "chooser"
    before = [(folder / "metrics.jsonl").read_bytes() for folder in (first, tmp_path / "run")]
    again = finetune(make_task(made), tmp_path / "run", resume=True, console=QUIET)
    assert again["test"] == pytest.approx(results["test"])
    after = [(folder / "metrics.jsonl").read_bytes() for folder in (first, tmp_path / "run")]
    assert before == after
    with pytest.raises(ValueError, match="run holds a run already"):
        finetune(make_task(made), tmp_path / "run", console=QUIET)
    with pytest.raises(ValueError, match="chooser holds no run to resume"):
        finetune(make_task(made), tmp_path / "other", resume=True, console=QUIET)


def test_a_second_stage_goes_on(tmp_path):
    """Killed between the stages: the first one is not done again."""
    made = toy(tmp_path, hops__stages=2, epochs=0.5)
    task = make_task(made)
    first = task.before()
    assert first is not None
    assert first.before() is None
    chooser = tmp_path / "run" / "seed-0" / "chooser"
    finetune(first, chooser, console=QUIET)
    done = (chooser / "metrics.jsonl").read_bytes()
    results = finetune_seeds(task, tmp_path / "run", 1, resume=True, console=QUIET)
    assert (chooser / "metrics.jsonl").read_bytes() == done
    assert "joint_f1" in results["test"]


def test_a_first_stage_is_not_carried_out_in_vain(tmp_path):
    made = toy(tmp_path, hops__stages=2, epochs=0.5)
    task, run = make_task(made), tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text("{}")
    with pytest.raises(ValueError, match="run holds a run already"):
        finetune(task, run, console=QUIET)
    assert not (run / "chooser").exists()
    # Nor is one gone on from that had other settings.
    finetune(task.before(), tmp_path / "other" / "chooser", console=QUIET)
    changed = make_task(replace(made, learning_rate=1e-5))
    with pytest.raises(ValueError, match=r"chooser was done with other settings \(learning_rate"):
        finetune(changed, tmp_path / "other", resume=True, console=QUIET)


def test_the_best_paragraphs_are_chosen(tmp_path):
    task = Multihop(toy(tmp_path, hops__keep=3, hops__above=0.5))
    found = {0: -9.0, 1: 0.6, 2: 4.0, 3: 0.7}
    task.find = lambda model, asked: [  # pyright: ignore
        type("Found", (), {"paragraphs": own})
        for own in (found, {place: score - 9 for place, score in found.items()})
    ]
    assert task.choose(None, task.asked.train[:2]) == [[2, 3, 1], [2, 3]]


def test_what_a_second_stage_would_be_given(tmp_path):
    task = Multihop(toy(tmp_path, hops__keep=2, hops__above=0.5))
    asked = task.asked.valid[0]
    matter = [place for place, part in enumerate(asked.parts) if part.relevant]
    other = next(place for place in range(len(asked.parts)) if place not in matter)
    assert len(matter) == 2
    model = task.build().eval()
    [found] = task.find(model, [asked])
    for best, share in ((matter, 1.0), ([matter[0], other], 0.5)):
        scores = {place: float(place in best) for place in range(len(asked.parts))}
        task.find = lambda model, asked, own=scores: [found._replace(paragraphs=own)]  # pyright: ignore
        assert task.evaluate(model, "valid", limit=1)["paragraphs_kept"] == share


def test_missing_evidence_is_counted_and_measured(tmp_path):
    path = hopping(tmp_path / "some.jsonl", 12)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:4]:
        row["evidence"] = [["elsewhere", 0], row["evidence"][0]]
    path.write_text("\n".join(map(json.dumps, [*rows, rows[5] | {"text": []}])))
    task = Multihop(toy(tmp_path, data__train=str(path)))
    assert any(note.startswith("4 of 12 questions (33.3%) lack a para") for note in task.notes())
    assert f"skipped 1, there is no paragraph with text: {path}, line 13" in task.notes()
    first, *others = rows[6:]
    first["evidence"] = [[title, 99] for title, _ in first["evidence"]]
    path.write_text("\n".join(map(json.dumps, [first, *others] * 2)))
    note = (
        "2 of 12 questions (16.7%) have evidence in a sentence that its paragraph lacks; they count"
    )
    assert note in Multihop(change(task.recipe, {"data.train": str(path)})).notes()
    told = [{"text": [["garden", ["a cat ."]]], "question": "why?", "evidence": [["garden", 0]]}]
    rows = [one | {"answer": answer} for one in told * 4 for answer in ("cat", "yes", "dog")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    note = "4 of 12 questions (33.3%) have an answer that is in no paragraph it follows from"
    assert note in Multihop(change(task.recipe, {"data.train": str(path)})).notes()
    lost = [one for one in task.asked.train if sum(part.relevant for part in one.parts) == 1]
    assert lost
    # No right place for the answer: that part of the loss is 0.
    batch, _ = task.collate(lost[:1])
    assert bool(batch["starts"].all())
    long = rows[0] | {"question": "when " * 90}
    path.write_text("\n".join(map(json.dumps, [*rows, long])))
    with pytest.raises(ValueError, match=r"a question of .* leaves room for 0"):
        Multihop(toy(tmp_path, data__train=str(path)))
    with pytest.raises(ValueError, match=r"hops\.keep=1: evidence comes from two paragraphs"):
        Multihop(toy(tmp_path, hops__keep=1))
