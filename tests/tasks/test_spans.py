"""Answers in long documents: losses, offsets, decoding, thresholds."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tasks.finetuned import QUIET, all_splits, asked, recipe
from torch.nn.functional import cross_entropy

import longspan
from longspan.data.examples import Skips
from longspan.data.tables import Row
from longspan.tasks.answers import (
    Answer,
    Found,
    best_answers,
    best_threshold,
    measure,
    read_candidates,
)
from longspan.tasks.finetune import finetune, make_task
from longspan.tasks.questions import Question, read_questions, unfold_questions
from longspan.tasks.spans import Spans, or_loss
from longspan.train.recipe import change


def test_or_loss_with_one_right_place_is_cross_entropy():
    scores = torch.randn(3, 7, dtype=torch.float64)
    place = torch.tensor([2, 0, 6])
    right = torch.nn.functional.one_hot(place, 7).bool()
    group = torch.arange(3).repeat_interleave(7)
    found = or_loss(scores.flatten(), right.flatten(), group, 3)
    torch.testing.assert_close(found, cross_entropy(scores, place, reduction="none"))


def test_or_loss_is_the_probability_of_any_right_place():
    scores = torch.tensor([1.0, 2.0, 500.0, 3.0, 4.0, -2.0], requires_grad=True)
    group = torch.tensor([0, 0, 1, 0, 0, 1])
    right = torch.tensor([True, False, True, False, True, False])
    found = or_loss(scores, right, group, 2)
    chances = torch.tensor([1.0, 2.0, 3.0, 4.0]).softmax(0)
    assert found[0].item() == pytest.approx(-float((chances[0] + chances[3]).log()))
    assert found[1].item() == pytest.approx(0.0)
    found.sum().backward()
    assert scores.grad is not None
    assert bool(scores.grad.isfinite().all())


def chosen(*given):
    return read_candidates([best_answers(*given)])[0]


@given(data=st.data())
def test_best_answers_among_equals(data):
    """Few scores for many tokens: of equals those that begin first count, then the shorter ones,
    whatever may not be chosen (-inf), and whatever the units are."""
    tokens, longest, count = (data.draw(st.integers(1, n)) for n in (40, 50, 30))
    numbers = st.lists(
        st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 2.0]), min_size=tokens, max_size=tokens
    )
    start, end = (torch.tensor(data.draw(numbers)) for _ in range(2))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=tokens))
    units = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[:tokens]
    for unit in (None, units):
        every = [
            (-float(start[i] + end[j]), i, j)
            for i in range(tokens)
            for j in range(i, min(i + longest, tokens))
            if unit is None or unit[i] == unit[j]
        ]
        best = [(i, j, -score) for score, i, j in sorted(every) if score < torch.inf][:count]
        assert chosen(start, end, longest, count, unit) == best


def test_choosing_answers_waits_for_no_device():
    """It can be asked of tensors that have no numbers."""
    scores, unit = torch.empty(1000, device="meta"), torch.empty(1000, device="meta")
    for units in ((), (unit,)):
        assert [one.shape for one in best_answers(scores, scores, 30, 5, *units)] == [(5,)] * 3


def test_best_answers_of_long_documents_are_those_of_all_pairs():
    torch.manual_seed(0)
    start, end = torch.randn(2, 5000)
    padded = torch.cat([end, end.new_full((255,), -torch.inf)])
    scores, places = (start[:, None] + padded.unfold(0, 256, 1)).flatten().topk(20)
    expected = [
        (at // 256, at // 256 + at % 256, score)
        for at, score in zip(places.tolist(), scores.tolist(), strict=True)
    ]
    assert chosen(start, end, 256, 20) == expected


def test_best_answers_are_the_best_of_all_pairs():
    torch.manual_seed(0)
    start, end = torch.randn(12), torch.randn(12)
    every = [(float(start[i] + end[j]), i, j) for i in range(12) for j in range(i, min(i + 4, 12))]
    expected = [(i, j) for _, i, j in sorted(every, reverse=True)[:6]]
    assert [pair[:2] for pair in chosen(start, end, 4, 6)] == expected
    assert len(chosen(start[:2], end[:2], 30, 20)) == 3


def test_one_loss_over_all_pieces(tmp_path):
    """Pieces that do not overlap: as if their scores stood in one row."""
    task = Spans(recipe("spans", tmp_path, model__length=16, answers__longest=1))
    model = task.build().eval()
    own = next(one for one in task.asked.train if len(one.starts))
    batch = task.collate([own])
    assert batch["pieces"].item() > 2
    tokens = len(own.document.ids)
    assert len(batch["place"]) == tokens + batch["pieces"].item()
    # Every token of the document is there once, in its order.
    ids = batch["input_ids"].flatten()[batch["place"]][batch["pieces"].item() :]
    assert ids.tolist() == own.document.ids.tolist()
    start, end = task.scores(model, batch)
    places = torch.from_numpy(own.starts) + batch["pieces"]
    expected = [one.logsumexp(0) - one[places].logsumexp(0) for one in (start, end)]
    found = task.loss(model, batch, None).total
    torch.testing.assert_close(found, sum(expected) / 2)


@pytest.mark.parametrize("overlap", [0, 3])
def test_padded_and_packed_are_the_same(overlap, tmp_path):
    made = recipe("spans", tmp_path, model__length=18, overlap=overlap)
    packed, padded = Spans(made), Spans(change(made, {"packed": False}))
    model = packed.build().eval()
    some = packed.asked.train[:3]
    with torch.no_grad():
        one = packed.scores(model, packed.collate(some))
        two = padded.scores(model, padded.collate(some))
    for mine, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert "token_type_ids" in packed.collate(some)


def test_it_learns_and_predicts(tmp_path):
    data = str(asked(tmp_path / "many.jsonl", 90))
    settings = {"epochs": 12.0, "answers__longest": 3, "evaluation__every": 0}
    made = recipe("spans", tmp_path, data__train=data, **settings)
    results = finetune(make_task(made), tmp_path / "run", console=QUIET)
    assert results["test"]["f1"] == 1.0
    assert results["valid"]["threshold"] == results["test"]["threshold"]
    use = longspan.pipeline(tmp_path / "run")
    text = "The river was\n in a house " * 8 + "and the Cat was in" + " the house" * 9
    found = use(text, question="when cat?")
    assert found["answer"] == "Cat"
    assert text[found["start"] : found["end"]] == "Cat"
    assert found["candidates"][0]["probability"] > 0.5
    for one in found["candidates"]:
        assert text[one["start"] : one["end"]] == one["text"]
    assert use("the river was in a house", question="when cat?")["answer"] == ""
    assert use(" ", question="when?") == {"skipped": "the text is empty"}
    with pytest.raises(ValueError, match="spans needs question"):
        use(text)
    with pytest.raises(ValueError, match="a question of 60 tokens leaves room for 0"):
        use(text, question="when " * 60)


def test_blank_questions_are_trained_on_by_their_share(tmp_path):
    def made(blanks, **more):
        return Spans(recipe("spans", tmp_path, answers__blanks=blanks, **more))

    def count(split):
        return sum(bool(q.right) for q in split), sum(not q.right for q in split)

    everything = made(None)
    answered, blank = count(everything.questions.train)
    assert answered
    assert blank > 2
    some = made(2 / answered)
    assert count(some.questions.train) == (answered, 2)
    assert len(some.asked.train) == answered + 2
    assert any(f"{blank - 2} training questions without an" in line for line in some.notes())
    assert made(2 / answered, seed=5).questions == some.questions  # the same for every seed
    assert (some.questions.valid, some.questions.test) == everything.questions[1:]
    assert count(made(0.0).questions.train) == (answered, 0)
    assert made(1000.0).questions == everything.questions
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"answers.blanks=.*not negative"):
            made(wrong)
    with pytest.raises(ValueError, match="data, model and answers must be the same"):
        some.again(change(some.recipe, {"answers.blanks": 1.0}))


def test_answers_are_found_at_their_characters(tmp_path):
    """Every answer, through tokens and back, in text with odd white space."""
    path = tmp_path / "odd.jsonl"
    text = "A  cat\tis\n\nin the   garden.The DOG sleeps ."
    wanted = ["cat", "the   garden.", "The DOG", "in the"]
    answers = [{"text": one, "start": text.index(one)} for one in wanted]
    qas = [{"question": "why?", "answers": [one]} for one in answers]
    path.write_text((json.dumps({"text": text, "qas": qas}) + "\n") * 12)
    task = Spans(recipe("spans", tmp_path, **all_splits(path)))
    for question, own in zip(task.questions.train, task.asked.train, strict=True):
        offsets = own.document.offsets
        start, stop = offsets[own.starts[0], 0], offsets[own.ends[0], 1]
        assert (start, stop) == question.spans[0]


def read(values, **columns):
    skips = Skips()
    return list(read_questions(Row("here", values), columns, skips)), skips.lines()


def test_the_forms_of_answers():
    text = "The cat saw the Cat."
    both = ((4, 7), (16, 19))
    flat = {"text": text, "question": "who?"}
    for told, spans in (
        ([{"text": "cat", "start": 4}], both[:1]),
        ([{"text": "cat", "answer_start": 4}, {"text": "Cat", "answer_start": 16}], both),
        ({"text": ["cat", "Cat"], "answer_start": [4, 16]}, both),
        ({"text": [], "answer_start": []}, ()),
        ('[{"text": "cat", "start": 4}]', both[:1]),
        ([{"text": "cat", "start": 4.0}], both[:1]),
        ("cat", both),
        (["CAT"], both),
        (None, ()),
        ([], ()),
    ):
        found, skipped = read({**flat, "answers": told})
        assert found[0].spans == spans
        assert skipped == []
    named, _ = read({"body": text, "q": "who?", "a": "cat"}, text="body", question="q", answers="a")
    assert named[0].spans == both


def test_an_answer_that_is_longer_in_small_letters():
    """The dotted capital I becomes two characters, as the text has them here."""
    (found,), _ = read({"text": "In i\u0307zmir.", "question": "where?", "answers": "\u0130zmir"})
    assert found.spans == ((3, 9),)


def test_an_id_that_is_empty_is_none():
    """Else all questions without one would be taken for the same by TriviaQA's measure."""
    for empty in (None, ""):
        flat = {"text": "The cat.", "question": "who?", "answers": "cat", "id": empty}
        assert read(flat)[0][0].id == "here"
        nested = {"text": "The cat.", "id": "d", "qas": [{**flat, "question": q} for q in "ab"]}
        assert [one.id for one in read(nested)[0]] == ["d#0", "d#1"]
        row = Row("here", nested)
        assert [one.values["id"] for one in unfold_questions(row, {})] == ["d#0", "d#1"]


def test_answers_that_are_not_there():
    flat = {"text": "The cat.", "question": "who?"}
    found, skipped = read({**flat, "answers": [{"text": "dog", "start": 4}]})
    assert found == []
    assert skipped == ["skipped 1, an answer does not stand where it says: here"]
    for start in (-4, 99):  # -4 is where "cat." begins, counted from the end
        found, skipped = read({**flat, "answers": [{"text": "cat", "start": start}]})
        assert (found, len(skipped)) == ([], 1)
    found, _ = read({**flat, "answers": "dog"})
    assert (found[0].spans, found[0].right) == ((), ("dog",))
    assert read({**flat, "text": "", "answers": []})[1] == ["skipped 1, the text is empty: here"]
    with pytest.raises(ValueError, match="there is no column 'answers'"):
        read(flat)
    with pytest.raises(ValueError, match="an answer is text, or text and start, not 5"):
        read({**flat, "answers": [5]})
    with pytest.raises(ValueError, match="here: an answer starts at a whole number, not '4'"):
        read({**flat, "answers": [{"text": "cat", "start": "4"}]})
    with pytest.raises(ValueError, match="here: 2 answers, but 1 starts"):
        read({**flat, "answers": {"text": ["cat", "The"], "answer_start": [4]}})
    with pytest.raises(ValueError, match="here: an answer is text, or text and start, not"):
        read({**flat, "answers": {"text": [None], "answer_start": [4]}})


@pytest.mark.parametrize(
    "wrong",
    [{"answers__longest": 0}, {"answers__best": 0}, {"evaluation__limit": -3}, {"data__limit": -3}],
)
def test_numbers_that_no_evaluation_can_do_with(wrong, tmp_path):
    """Said before training, not at the end of its first pass."""
    name = next(iter(wrong)).replace("__", r"\.")
    with pytest.raises(ValueError, match=rf"{name}=.* must"):
        Spans(recipe("spans", tmp_path, **wrong))


def test_a_question_beyond_the_model_is_found_before_training(tmp_path):
    path, long = tmp_path / "long.jsonl", "when " * 20
    rows = [{"text": "the cat", "question": q, "answers": "cat"} for q in ["why?"] * 19 + [long]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"'when .*: a question of 20 tokens leaves room for 1 of"):
        Spans(recipe("spans", tmp_path, **all_splits(path), overlap=2))


def test_a_document_has_room_beside_its_own_question(tmp_path):
    """A long question about another document does not count against it."""
    path = tmp_path / "two.jsonl"
    made = [{"text": "the " * 18 + "cat", "question": "why?", "answers": "cat"}] * 10
    made += [{"text": "the cat", "question": "when " * 10, "answers": "cat"}] * 10
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    task = Spans(recipe("spans", tmp_path, **all_splits(path), too_long="refuse"))
    assert (task.reach.documents, task.reach.too_long) == (2, 0)


def test_an_answer_keeps_its_last_accent():
    """Also where that is a character of its own, over which BERT's tokenizers pass."""
    text, offsets = "the cafe\u0301 .", np.array([(0, 3), (4, 8), (10, 11)])
    (answer,) = Found([(1, 1, 9.0)], 0.0, 10.0).answers(text, offsets)
    assert answer[:3] == ("cafe\u0301", 4, 9)


def test_white_space_is_no_answer():
    text = "a\n\n b"
    offsets = np.array([[0, 1], [1, 3], [3, 5]])
    found = Found([(1, 1, 9.0), (1, 2, 8.0), (2, 2, 7.0)], 0.0, 10.0)
    assert [(one.text, one.start) for one in found.answers(text, offsets)] == [("b", 4)]
    blank = Found([(1, 1, 9.0)], 0.0, 10.0)
    assert blank.describe(text, offsets, -1e9) == {"answer": "", "candidates": []}
    assert blank.best(text, offsets).text == ""


def question(right, id="q"):
    return Question(id, "", "", (), tuple(right))


def answer(text, margin):
    return Answer(text, 0, 0, margin, 0.0)


def test_the_threshold_that_is_best():
    questions = [question(["cat"]), question([]), question(["dog"]), question([])]
    answers = [answer("cat", 3.0), answer("cow", 2.0), answer("dog", 1.0), answer("cow", -1.0)]
    best = best_threshold(questions, answers, "squad")
    tried = [measure(questions, answers, "squad", t)["f1"] for t in np.arange(-3, 5, 0.25)]
    assert measure(questions, answers, "squad", best)["f1"] == max(tried) == 0.75
    assert best_threshold(questions[:1], answers[:1], "squad") == 0.0
    assert best_threshold(questions[2:3], [answer("dog", -4.0)], "squad") == -5.0
    assert best_threshold(questions[1:2], [answer("dog", 4.0)], "squad") == 5.0
    found = measure(questions, answers, "squad", 0.0)
    assert found["f1_answerable"] == 1.0
    assert found["f1_unanswerable"] == 0.5


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([-2.0, 0.0, 1.0, 3.0]))))
def test_no_other_threshold_is_better(drawn):
    """Nor where answers have the same margin, which no threshold tells apart."""
    drawn = [(True, True, 1.0), *drawn]
    questions = [question(["cat"] if has else []) for has, _, _ in drawn]
    answers = [answer("cat" if right else "dog", margin) for _, right, margin in drawn]
    best = best_threshold(questions, answers, "squad")
    reached = measure(questions, answers, "squad", best)["f1"]
    for other in (-3.0, -1.0, 0.5, 2.0, 4.0):
        assert measure(questions, answers, "squad", other)["f1"] <= reached + 1e-9


def test_triviaqa_takes_the_best_document():
    questions = [question(["the cat"], "1"), question(["cats!"], "1"), question(["dog"], "2")]
    answers = [answer("cow", 1.0), answer("Cats", 2.0), answer("a dog", 0.0)]
    assert measure(questions, answers, "triviaqa", -9.0)["exact"] == 1.0
    assert measure(questions, answers, "squad", -9.0)["exact"] == pytest.approx(2 / 3)


def test_the_threshold_is_best_for_questions_not_for_documents():
    """One of a question's documents may lack the answer that another has."""
    questions = [question([], "1"), question(["cat"], "1"), question([], "2")]
    answers = [answer("cat", 3.0), answer("cat", 2.0), answer("dog", 2.5)]
    best = best_threshold(questions, answers, "triviaqa")
    assert measure(questions, answers, "triviaqa", best)["f1"] == 1.0


def test_a_text_is_in_one_split_whatever_is_asked_of_it(tmp_path):
    path = tmp_path / "flat.jsonl"
    rows = [{"text": f"cat {n // 4} dog", "question": "why?", "answers": "cat"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Spans(recipe("spans", tmp_path, data__train=str(path)))
    texts = [{one.text for one in split} for split in task.questions]
    assert [len(own) for own in texts] == [8, 1, 1]
    assert not texts[0] & (texts[1] | texts[2])


def test_head_leaves_answers_unread(tmp_path):
    task = Spans(recipe("spans", tmp_path, too_long="head"))
    own = next(one for one in task.asked.train if one.starts.size and one.starts[0] > 25)
    batch = task.collate([own])
    assert batch["starts"].nonzero().flatten().tolist() == [0]
    assert any("read in part only" in note for note in task.notes())
