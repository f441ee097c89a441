"""Coreference: it learns, whole or in pieces, gives exact offsets, and says what it cannot do."""

import csv
import json

import numpy as np
import pytest
import torch
from tasks.finetuned import QUIET, recipe, told
from typer.testing import CliRunner

import longspan
from longspan.cli import app
from longspan.data.conll import write_conll
from longspan.data.examples import Skips
from longspan.data.tables import Row, read_rows
from longspan.models.coreference import Links
from longspan.tasks.coref import Coref, decode
from longspan.tasks.finetune import finetune, make_task
from longspan.tasks.mentions import cuts, read_speakers, read_words
from longspan.train.loop import train
from longspan.train.recipe import change

SMALL = {
    "model__length": 64,
    "mentions__size": 16,
    "mentions__longest": 4,
    "mentions__dropout": 0.0,
    "batch": 4,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has learned its documents, and its results."""
    folder = tmp_path_factory.mktemp("coref")
    data = told(folder / "many.jsonl", 80)
    more = {"data__train": str(data), "learning_rate": 1e-3, "epochs": 10.0, "mentions__keep": 0.2}
    made = recipe("coref", folder, **SMALL, **more, evaluation__every=0)
    return folder / "run", finetune(make_task(made), folder / "run", console=QUIET)


def test_it_learns(run):
    folder, results = run
    assert results["test"]["conll"] == pytest.approx(1.0)
    assert results["test"]["lea"] == pytest.approx(1.0)
    assert json.loads((folder / "results.json").read_text()) == results


def test_offsets_are_characters_of_the_text(run):
    use = longspan.pipeline(run[0])
    text = "The cat is in the house. A  dog is in the river.\n\nA cat is in the river."
    clusters = use(text)["clusters"]
    assert [[one["text"] for one in own] for own in clusters] == [["The cat", "A cat"], ["A  dog"]]
    for own in clusters:
        for one in own:
            assert text[one["start"] : one["end"]] == one["text"]
    assert clusters[0][1]["words"] == [14, 15]
    assert use(" \n") == {"skipped": "the document is empty"}


def test_files_in_and_out(run, tmp_path):
    """JSON lines are predicted, written as CoNLL, and that is predicted the same."""
    source = told(tmp_path / "in.jsonl", 3)
    # Columns that CoNLL's files have no part in, whatever they are called.
    lines = [json.loads(line) | {"lines": 4, "begin": 1} for line in source.open()]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = {}
    for name, path in (("a", source), ("b", tmp_path / "a.conll")):
        options = ["--output", str(tmp_path / name), "--conll", str(tmp_path / f"{name}.conll")]
        done = CliRunner().invoke(app, ["predict", str(run[0]), str(path), *options])
        assert done.exit_code == 0, done.output
        rows[name] = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [one["id"] for one in rows["a"]] == ["d0", "d1", "d2"]
    for one, other in zip(rows["a"], rows["b"], strict=True):
        assert one["clusters"] == other["clusters"]
    assert (tmp_path / "a.conll").read_text() == (tmp_path / "b.conll").read_text()
    for row, known in zip(read_rows(tmp_path / "a.conll"), read_rows(source), strict=True):
        assert row.values["sentences"] == known.values["sentences"]
        assert row.values["clusters"] == sorted(known.values["clusters"])


def test_conll_is_learned_from_too(tmp_path):
    path = tmp_path / "told.conll"
    with path.open("w") as file:
        for row in read_rows(told(tmp_path / "in.jsonl", 12)):
            file.writelines(write_conll(row.values, row.values["clusters"]))
    made = recipe("coref", tmp_path, **SMALL, data__train=str(path))
    task = Coref(made)
    assert [len(split) for split in task.documents] == [10, 1, 1]
    results = finetune(task, tmp_path / "run", console=QUIET)
    assert 0 <= results["test"]["conll"] <= 1


def test_a_run_resumes_to_the_same_losses(tmp_path):
    made = recipe("coref", tmp_path, **SMALL, save_every=2, evaluation__every=0)
    made = change(made, {"epochs": 1.0, "log_every": 1, "mentions.dropout": 0.2})
    whole, broken = Coref(made), Coref(made)
    train(whole.recipe, whole, tmp_path / "whole", console=QUIET)
    count = 0

    def interrupted(model, batch, state):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return Coref.loss(broken, model, batch, state)

    broken.loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        train(broken.recipe, broken, tmp_path / "broken", console=QUIET)
    again = Coref(made)
    train(again.recipe, again, tmp_path / "broken", resume=True, console=QUIET)
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "broken")
    ]
    one, two = ([(x["step"], x["loss"]) for x in own if "loss" in x] for own in lines)
    assert len(one) == 6
    assert one == two


def test_half_precision_trains_and_scores(tmp_path):
    made = recipe("coref", tmp_path, **SMALL, precision="bf16", epochs=0.5)
    results = finetune(make_task(made), tmp_path / "run", console=QUIET)
    assert 0 <= results["test"]["conll"] <= 1
    assert "clusters" in longspan.pipeline(tmp_path / "run")("the cat is in a house .")


@pytest.mark.parametrize("packed", [True, False])
def test_documents_do_not_disturb_one_another(packed, tmp_path):
    """Nor do pieces: together, alone, packed and padded, every span has the same scores."""
    made = recipe("coref", tmp_path, **SMALL | {"model__length": 18}, packed=packed)
    task = Coref(made)
    model = task.build().eval()
    documents = task.documents.train[:3]
    genres = {"": 0}
    with torch.no_grad():
        together = model(**task.collate(documents, genres, right=False)).links
        for own, document in zip(together, documents, strict=True):
            (alone,) = model(**task.collate([document], genres, right=False)).links
            for one, other in zip(own, alone, strict=True):
                torch.testing.assert_close(one, other)


def test_long_documents_are_cut_between_sentences(tmp_path):
    made = recipe("coref", tmp_path, **SMALL | {"model__length": 18})
    task = Coref(made)
    document = task.documents.train[0]
    found = task.pieces(document)
    assert [piece.span for piece in found] == [(0, 14), (14, 28)]  # two sentences of 7 words each
    assert "30 of 30 documents (100.0%) have more than 16 tokens" in task.notes()[-1]
    batch = task.collate([document], {}, right=True)
    # Every word is there once, and every mention.
    tokens = batch["input_ids"].flatten()[batch["first"]]
    assert tokens.tolist() == document.ids.tolist()
    assert len(batch["mentions"]) == sum(map(len, document.words.clusters))
    head = Coref(change(made, {"too_long": "head"}))
    assert head.collate([document], {}, right=True)["words"].tolist() == [14]
    assert "read in part only" in head.notes()[-1]
    with pytest.raises(ValueError, match=r"are refused: a larger model\.length"):
        Coref(change(made, {"too_long": "refuse"}))


def test_cuts_go_where_they_do_least_harm():
    sentences, words = np.array([0, 4, 9, 30]), np.array([0, 2, 4, 7, 9, 11, 13, 22, 28, 30])
    assert cuts((sentences, words), 33, 10) == [(0, 9), (9, 13), (13, 22), (22, 30), (30, 33)]
    assert cuts((sentences, words), 33, 5) == [
        (0, 4),
        (4, 9),
        (9, 13),
        (13, 18),
        (18, 22),
        (22, 27),
        (27, 30),
        (30, 33),
    ]
    assert cuts((sentences, words), 33, 40) == [(0, 33)]


def test_words_of_several_tokens_begin_and_end_where_they_do(tmp_path):
    task = Coref(recipe("coref", tmp_path, **SMALL))
    words = read_words(Row("here", {"sentences": [["the", "cat?.", "."], ["dog"]]}), {})
    assert words is not None
    (document,) = task.encode([words])
    assert document.first.tolist() == [0, 1, 4, 5]
    assert document.last.tolist() == [0, 3, 4, 5]


def links(first, last, mention, antecedents, scores):
    padded = torch.cat([torch.zeros(len(first), 1), torch.tensor(scores)], dim=1)
    first, last, mention, antecedents = map(torch.tensor, (first, last, mention, antecedents))
    return Links(first, last, mention, antecedents, padded)


def test_decoding():
    none = -torch.inf
    given = links(
        [0, 2, 4, 6, 8],
        [0, 2, 5, 6, 9],
        [1.0, 2.0, 3.0, -1.0, 0.5],
        [[0, 0], [0, 0], [1, 0], [0, 1], [2, 3]],
        [[none, none], [-1.0, none], [2.0, 1.0], [-1.0, -2.0], [0.5, 0.7]],
    )
    # The last joins one that is not a mention by itself.
    linked = [[(2, 2), (4, 5)], [(6, 6), (8, 9)]]
    assert decode(given, singletons=False) == linked
    assert decode(given, singletons=True) == [[(0, 0)], *linked]


def test_mentions_do_not_cross():
    given = links(
        [0, 1, 1, 4],
        [2, 1, 3, 5],
        [1.0, 0.5, 2.0, 1.0],
        [[0], [0], [0], [0]],
        [[-torch.inf], [1.0], [-1.0], [9.0]],
    )
    # 0-2 crosses 1-3, which is better: it is gone, and what named it stands alone.
    assert decode(given, singletons=True) == [[(1, 1)], [(1, 3)], [(4, 5)]]


def test_singletons_are_found_where_training_has_them(tmp_path):
    made = recipe("coref", tmp_path, **SMALL)
    task = Coref(made)
    assert task.singletons is True
    assert "singletons are found" in task.notes()[0]
    assert Coref(change(made, {"mentions.singletons": False})).singletons is False
    pairs = tmp_path / "pairs.jsonl"
    line = {"sentences": [["the", "cat", "is", "a", "cat"]], "clusters": [[[0, 1], [3, 4]]]}
    pairs.write_text((json.dumps(line) + "\n") * 10)
    assert Coref(change(made, {"data.train": str(pairs)})).singletons is False


def test_speakers_and_genres_are_optional(tmp_path):
    path = tmp_path / "talk.jsonl"
    line = {
        "sentences": [["the", "cat"], [], ["a", "cat"]],
        "speakers": [["A", ""], [], ["B", "A"]],
        "genre": "talk",
        "clusters": [[[0, 1], [2, 3]]],
    }
    path.write_text((json.dumps(line) + "\n") * 10)
    task = Coref(recipe("coref", tmp_path, **SMALL, data__train=str(path)))
    assert task.genres == ["talk"]
    batch = task.batch(0, 0, range(2))[0]
    assert batch["speaker"].tolist() == [1, 0, 2, 1] * 2
    assert batch["genre"].tolist() == [1, 1]
    other = task.documents.train[0]
    other = other._replace(words=other.words._replace(genre="news"))
    assert task.collate([other], {"talk": 1}, right=False)["genre"].tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"clusters": [[[0, 9]]]},
            r"the mention \[0, 9\] is not within the document's words 0 to 3",
        ),
        ({"clusters": [[[2, 1]]]}, r"the mention \[2, 1\]"),
        ({"clusters": [[3]]}, "expected clusters of mentions"),
        ({"clusters": [[[0.5, 1]]]}, "expected clusters of mentions"),
        ({"clusters": "none"}, "expected clusters of mentions"),
        ({"sentences": "the cat"}, "expected sentences, each a list of words"),
        ({"sentences": [["the", 3]]}, "expected sentences, each a list of words"),
        ({"speakers": [["A"]]}, "a speaker for each word"),
    ],
)
def test_bad_rows_are_named(changes, message):
    values = {"sentences": [["the", "cat"], ["is", "in"]], "clusters": []}
    with pytest.raises(ValueError, match=f"told.jsonl, line 3, column .*{message}"):
        read_words(Row("told.jsonl, line 3", values | changes), {})


@pytest.mark.parametrize(("columns", "name"), [({"id": "key"}, "k"), ({}, "0")])
def test_documents_have_the_ids_of_their_column(columns, name):
    row = Row("here", {"id": 0, "key": "k", "sentences": [["cat"]]})
    found = read_words(row, columns)
    assert found is not None
    assert found.id == name


def test_odd_rows_are_counted():
    skips = Skips()
    values = {"sentences": [["the", "cat"]], "clusters": [[[0, 1]], [[0, 1], [1, 1]], [[0, 1]]]}
    words = read_words(Row("here", values), {}, skips)
    assert words is not None
    assert words.clusters == [[(0, 1)], [(1, 1)]]
    assert len(skips) == 2
    assert read_words(Row("here", {"sentences": [[]]}), {}) is None
    assert read_words(Row("here", {"text": " "}), {}) is None


def test_tables_of_text_hold_json(tmp_path):
    values = {
        "sentences": [["the", "cat"], ["it"]],
        "clusters": [[[0, 1], [2, 2]]],
        "speakers": [["A", "A"], ["B"]],
    }
    path = tmp_path / "told.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, values)
        table.writeheader()
        table.writerow({name: json.dumps(value) for name, value in values.items()})
        table.writerow({"sentences": '[["the"]]'})
    first, second = [read_words(row, {}) for row in read_rows(path)]
    assert first is not None
    assert second is not None
    assert first.clusters == [[(0, 1), (2, 2)]]
    assert first.speaker.tolist() == [1, 1, 2]
    assert (second.text, second.clusters, second.speaker.tolist()) == ("the", [], [0])
    (row, _), columns = read_rows(path), {}
    assert read_speakers(row, columns) == values["speakers"]
    assert read_speakers(Row("here", {"text": "the cat", "speakers": "A"}), columns) == []


def test_what_cannot_be_learned_is_said(tmp_path):
    made = recipe("coref", tmp_path, **SMALL)

    def refused(message, **settings):
        with pytest.raises(ValueError, match=message):
            Coref(change(made, {k.replace("__", "."): v for k, v in settings.items()}))

    refused("measure=f1: choose from conll, mentions, muc", measure="f1")
    refused("mentions.keep=0.0 must be above 0", mentions__keep=0.0)
    refused("leaves no room", model__length=2)
    path = tmp_path / "plain.jsonl"
    path.write_text('{"text": "the cat"}\n' * 10)
    refused("line 1: there is no column 'clusters'", data__train=str(path))
    path.write_text('{"sentences": [["the", "cat"]], "clusters": []}\n' * 10)
    refused("no training document has a mention", data__train=str(path))
    wide = Coref(change(made, {"mentions.longest": 1}))
    assert "120 of 120 mentions (100.0%) have more than 1 words or leave" in wide.notes()[-1]


def test_text_is_cut_into_words_and_sentences():
    text = "Mr. Brown's dog slept. \"Why?\" he\nasked. J. Smith didn't leave!\n\nA title\n\nEnd"
    words = read_words(Row("here", {"text": text}), {})
    assert words is not None
    assert [" ".join(one) for one in words.sentences()] == [
        "Mr. Brown 's dog slept .",
        '" Why ? "',
        "he asked .",
        "J. Smith didn't leave !",
        "A title",
        "End",
    ]


def test_accents_and_vowel_signs_stay_in_their_word():
    """Also where they are characters of their own."""
    text = "E\u0301galite\u0301! \u0939\u093f\u0928\u094d\u0926\u0940 I \u2764\ufe0f a\u0308."
    words = read_words(Row("here", {"text": text}), {})
    assert words is not None
    first, second = words.sentences()
    assert first == ["E\u0301galite\u0301", "!"]
    assert second[0] == "\u0939\u093f\u0928\u094d\u0926\u0940"
    assert second[1] == "I"
    assert second[-2:] == ["a\u0308", "."]


def test_other_runs_have_no_clusters_to_write(tmp_path):
    finetune(make_task(recipe("classify", tmp_path, epochs=0.2)), tmp_path / "run", console=QUIET)
    options = [str(tmp_path / "run"), str(tmp_path / "animals.csv"), "--conll", "x.conll"]
    done = CliRunner().invoke(app, ["predict", *options])
    assert done.exit_code == 2
    assert "its task is classify" in done.output.replace("\n", " ")
