"""Real checkpoints on real data, a few examples of it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hub.test_real import granite, minilm
from tasks.finetuned import QUIET

import longspan
from longspan.data.tables import read_rows
from longspan.recipes import FINETUNING
from longspan.tasks.coref_measures import coref_counts, coref_measures
from longspan.tasks.finetune import finetune, make_task
from longspan.train.recipe import change


def data(name: str) -> str:
    if not os.environ.get("LONGSPAN_DATA"):
        pytest.skip("LONGSPAN_DATA names no data folder")
    return str(Path(os.environ["LONGSPAN_DATA"]) / name)


def test_hyperpartisan_is_split_as_published():
    settings = {"model.source": str(granite()), "data.train": data("hyperpartisan.jsonl.xz")}
    task = make_task(change(FINETUNING["hyperpartisan"](), settings))
    assert [len(split) for split in task.documents] == [517, 64, 64]
    assert task.labels == ["false", "true"]
    assert "4 of 645 documents (0.6%) have more than 4,094 tokens" in task.notes()[-1]


@pytest.mark.slow
def test_a_real_checkpoint_learns_reviews(tmp_path):
    """Three passes over 32 short reviews: they are told apart better than by chance."""
    settings = {
        "model.source": str(minilm()),
        "model.length": 48,
        "model.window": 48,
        "data.train": data("imdb-test-a.jsonl.xz"),
        "data.limit": 32,
        "batch": 8,
        "epochs": 3.0,
        "learning_rate": 3e-4,
        "precision": "no",
        "evaluation.every": 0,
        "log_every": 4,
    }
    task = make_task(change(FINETUNING["imdb"](), settings))
    finetune(task, tmp_path / "run", console=QUIET)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "split" not in line]
    assert len(losses) == 3
    assert losses[-1] < 0.6 < losses[0]
    use = longspan.pipeline(tmp_path / "run", too_long="split")
    assert use("A wonderful, moving film. " * 40)["label"] in ("pos", "neg")


def test_answers_in_contracts_come_back_exactly():
    """Through tokens to characters: none is lost, and what differs is punctuation at the ends."""
    contracts = data("cuad-dev.jsonl.xz")
    settings = {"model.source": str(granite()), "data.train": contracts, "data.limit": 400}
    task = make_task(change(FINETUNING["cuad"](), settings))
    assert len(task.skips) == 0
    inside = 0
    for question, asked in zip(task.questions.train, task.asked.train, strict=True):
        offsets = asked.document.offsets
        starts, ends = set(offsets[asked.starts, 0]), set(offsets[asked.ends, 1])
        for start, stop in question.spans:
            near = [s for s in starts if s <= start]
            far = [e for e in ends if e >= len(question.text[:stop].rstrip())]
            assert near
            assert far
            assert not any(c.isalnum() for c in question.text[max(near) : start])
            inside += 1
    assert inside > 100
    batch = task.collate([task.asked.train[0]])
    assert int(np.prod(batch["input_ids"].shape)) >= len(task.asked.train[0].document.ids)


def test_mentions_in_novels_come_back_exactly():
    """Through tokens and back: every mention of a novel is among the candidates or counted."""
    novels = data("litbank-coref-dev.jsonl.xz")
    settings = {"model.source": str(granite()), "data.train": novels}
    task = make_task(change(FINETUNING["litbank"](), settings))
    assert task.singletons is True
    assert "12 of 3,564 mentions (0.3%) have more than 20 words" in task.notes()[1]
    for document in (one for split in task.documents for one in split):
        offsets = document.words.offsets
        for place in range(0, len(offsets), 97):
            start, stop = offsets[place]
            ids = document.ids[document.first[place] : document.last[place] + 1]
            assert task.tokenizer.decode(ids).strip() == document.words.text[start:stop]
    perfect = task.documents.test[0].words.clusters
    assert coref_measures(coref_counts(perfect, perfect))["conll"] == 1.0


@pytest.mark.slow
def test_a_real_checkpoint_learns_who_is_who(tmp_path):
    """Sixteen steps on the beginnings of four novels: mentions are told from other spans."""
    source, short = data("litbank-coref-dev.jsonl.xz"), tmp_path / "short.jsonl"
    with short.open("w") as file:
        for row in list(read_rows(source))[:6]:
            sentences = row.values["sentences"][:5]
            words = sum(map(len, sentences))
            clusters = [[m for m in own if m[1] < words] for own in row.values["clusters"]]
            line = {"sentences": sentences, "clusters": [own for own in clusters if own]}
            file.write(json.dumps(line) + "\n")
    settings = {
        "model.source": str(granite()),
        "model.length": 512,
        "data.train": str(short),
        "epochs": 4.0,
        "precision": "no",
        "evaluation.every": 0,
        "log_every": 4,
    }
    task = make_task(change(FINETUNING["litbank"](), settings))
    results = finetune(task, tmp_path / "run", console=QUIET)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "split" not in line]
    assert losses[-1] < 0.9 * losses[0]
    assert 0 <= results["test"]["conll"] <= 1


def test_race_is_read_whole():
    """Every question has four choices, one of them right; what is beyond the model is counted."""
    settings = {"model.source": str(granite()), "data.train": data("race-high-dev.jsonl.xz")}
    settings |= {"model.length": 512, "too_long": "head"}
    task = make_task(change(FINETUNING["race"](), settings))
    assert sum(len(split) for split in task.asked) == 3451
    assert len(task.skips) == 0
    assert all(one.right.sum() == 1 and len(one.right) == 4 for one in task.asked.train)
    assert "of 3,451 documents" in task.notes()[-1]
    batch = task.collate(task.asked.train[:2])
    words = task.tokenizer.convert_ids_to_tokens(
        batch["input_ids"].flatten()[batch["place"]].tolist()
    )
    assert words == ["[ent]"] * 8


def test_hotpotqa_answers_come_back_exactly():
    """Through tokens to characters; what its paragraphs lack is said."""
    settings = {"model.source": str(granite()), "data.train": data("hotpotqa-dev.jsonl.xz")}
    task = make_task(change(FINETUNING["hotpotqa"](), settings))
    assert "71 of 100 questions (71.0%) lack a paragraph" in " ".join(task.notes())
    found = 0
    for hop, asked in zip(task.hops.train, task.asked.train, strict=True):
        for paragraph, part in zip(hop.paragraphs, asked.parts, strict=True):
            for first, last in part.answers:
                unit = paragraph.unit(int(part.unit[first]))
                words = unit[part.offsets[first, 0] : part.offsets[last, 1]]
                assert hop.answer.lower() in words.lower()
                found += 1
    assert found > 40


@pytest.mark.slow
def test_a_real_checkpoint_learns_to_choose(tmp_path):
    """Two questions about passages, by heart."""
    race = data("race-high-dev.jsonl.xz")
    settings = {
        "model.source": str(granite()),
        "model.length": 96,
        "data.train": race,
        "data.limit": 2,
        "batch": 2,
        "epochs": 16.0,
        "warmup": 4.0,
        "learning_rate": 5e-4,
        "optimizer.schedule": "constant",
        "precision": "no",
        "evaluation.every": 0,
        "log_every": 4,
        "too_long": "head",
    }
    task = make_task(change(FINETUNING["race"](), settings))
    finetune(task, tmp_path / "run", console=QUIET)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "split" not in line]
    assert losses[-1] < 0.2 < 1.2 < losses[0]


def test_novels_are_packed_and_hidden():
    """Whole novels in rows of 512: what is shown, with what was hidden put back, is their text."""
    novels = data("books-valid.jsonl.xz")
    settings = {"model.source": str(granite()), "data.train": novels, "data.limit": 1}
    task = make_task(change(FINETUNING["mlm-head"](), settings))
    (document,) = task.documents.train
    assert 3.0 < document.characters / len(document.ids) < 5.0
    batch, _ = task.batch(0, 0, range(2))
    ids = batch["input_ids"][0].numpy().copy()
    assert len(ids) == 2 * 512
    hidden = batch["targets"].numpy() >= 0
    ids[batch["places"].numpy()[hidden]] = batch["targets"].numpy()[hidden]
    whole = task.tokenizer.decode(document.ids)
    for row in np.split(ids, 2):
        assert task.tokenizer.decode(row[row > 2]) in whole
    assert hidden.sum() >= 2 * 70
