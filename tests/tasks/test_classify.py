"""Classification: it learns, padded or packed, whole or in pieces, and says what it cannot do."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tasks.finetuned import QUIET, recipe
from tasks.tiny import tiny_checkpoint
from torch._dynamo.utils import counters

import longspan
from longspan.tasks.classify import Classify
from longspan.tasks.finetune import finetune, finetune_seeds, make_task
from longspan.train import loop
from longspan.train.recipe import change


def test_it_learns_and_predicts(tmp_path):
    made = recipe("classify", tmp_path, epochs=12.0)
    results = finetune(make_task(made), tmp_path / "run", console=QUIET)
    assert results["test"]["accuracy"] == 1.0
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    use = longspan.pipeline(tmp_path / "run")
    found = use("the river was a cat in the house")
    assert found["label"] == "cat"
    assert sum(found["scores"].values()) == pytest.approx(1.0)
    assert use("a dog is the river")["label"] == "dog"
    several = use.rows([{"body": "a cat"}, {"body": ""}, {"body": "the river was a cat"}])
    assert [one.get("label") for one in several] == ["cat", None, "cat"]
    with pytest.raises(ValueError, match="row 1: there is no column 'body'; there are 'text'"):
        use.rows([{"body": "a cat"}, {"text": "a dog"}])
    assert use(" ") == {"skipped": "the text is empty"}
    with pytest.raises(ValueError, match=r'the input: .* reads 22; .*too_long="split"'):
        use("dog " * 40)
    split = longspan.pipeline(tmp_path / "run", too_long="split")
    assert split("dog " * 40)["label"] == "dog"


def test_a_run_resumes_to_the_same_weights(tmp_path):
    made = recipe("classify", tmp_path, save_every=2, evaluation__every=0)
    whole, broken = (Classify(made) for _ in range(2))
    longspan_train(whole, tmp_path / "whole")
    count = 0

    def interrupted(model, batch, state):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return Classify.loss(broken, model, batch, state)

    broken.loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        longspan_train(broken, tmp_path / "broken")
    longspan_train(Classify(made), tmp_path / "broken", resume=True)
    one, two = (lines(tmp_path / name) for name in ("whole", "broken"))
    assert one == two


def test_resumes_with_the_fused_optimizer_of_a_gpu(tmp_path, monkeypatch):
    """Which a CPU has too."""
    plain = loop.build_optimizers
    monkeypatch.setattr(
        loop, "build_optimizers", lambda *given, fused: plain(*given, fused=not fused)
    )
    test_a_run_resumes_to_the_same_weights(tmp_path)


def test_compiled_once_for_all_lengths(tmp_path, monkeypatch):
    # Graphs are traced and run as they are: generating code for a CPU takes minutes.
    made_by: Any = loop.TorchDynamoPlugin
    monkeypatch.setattr(
        loop, "TorchDynamoPlugin", lambda **options: made_by(**options | {"backend": "aot_eager"})
    )
    made = recipe("classify", tmp_path, too_long="split", model__length=9, updates=6, batch=3)
    found, graphs = {}, {}
    for how in ("no", "layers"):
        torch.compiler.reset()
        counters.clear()
        task = Classify(change(made, {"compile": how}))
        task.documents = task.documents._replace(
            train=[
                one._replace(ids=one.ids[: 2 + place % 9])
                for place, one in enumerate(task.documents.train)
            ]
        )
        sizes = {task.batch(0, step, range(3))[0]["input_ids"].shape for step in range(6)}
        assert len(sizes) > 3
        longspan_train(task, tmp_path / how)
        found[how] = [loss for _, loss in lines(tmp_path / how)]
        graphs[how] = counters["stats"]["unique_graphs"]
    assert found["layers"] == pytest.approx(found["no"], rel=1e-4)
    assert graphs == {"no": 0, "layers": 3}  # embeddings, every layer, head


@pytest.mark.parametrize(
    ("gpu", "updates", "compiled"), [(True, 500, True), (True, 499, False), (False, 500, False)]
)
def test_long_runs_on_a_gpu_are_compiled(gpu, updates, compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    task = Classify(recipe("classify", tmp_path, updates=updates, compile="auto"))
    chosen = loop._compiler(task.recipe, task)
    assert (chosen is not None) == compiled
    assert chosen is None or (chosen.dynamic and chosen.use_regional_compilation)


def longspan_train(task, run, **options):
    from longspan.train.loop import train

    return train(change(task.recipe, {"log_every": 1}), task, run, console=QUIET, **options)


def lines(run):
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in entries]


def test_padded_packed_and_alone_are_the_same(tmp_path):
    """In pieces, too: a document's scores do not depend on its neighbours."""
    made = recipe("classify", tmp_path, too_long="split", model__length=9, overlap=2)
    packed = Classify(made)
    padded = Classify(replace(made, packed=False))
    torch.manual_seed(0)
    model = packed.build().eval()
    documents = [
        one._replace(ids=one.ids[: 3 + 2 * i]) for i, one in enumerate(packed.documents.train[:5])
    ]
    ids = [one.ids for one in documents]
    with torch.no_grad():
        together = packed.logits(model, packed.collate(ids), 5)
        torch.testing.assert_close(together, padded.logits(model, padded.collate(ids), 5))
        alone = [packed.logits(model, packed.collate([one]), 1) for one in ids]
        torch.testing.assert_close(together, torch.cat(alone))


def test_pieces_are_averaged(tmp_path):
    made = recipe("classify", tmp_path, too_long="split", model__length=9)
    task = Classify(made)
    model = task.build().eval()
    ids = task.documents.train[0].ids[:12]
    batch = task.collate([ids])
    assert batch["document"].tolist() == [0, 0]
    with torch.no_grad():
        found = task.logits(model, batch, 1)
        halves = [task.logits(model, task.collate([part]), 1) for part in (ids[:7], ids[5:])]
    torch.testing.assert_close(found, torch.stack(halves).mean(dim=0))


def test_the_first_token_is_global_unless_told_otherwise(tmp_path):
    made = recipe("classify", tmp_path)
    for preset, expected in ((None, [0]), ("none", [])):
        task = Classify(change(made, {"model.global_tokens": preset}))
        model = task.build()
        batch = task.collate([task.documents.train[0].ids])
        batch.pop("document")
        mask = model(**batch).global_attention_mask
        assert ([] if mask is None else mask[0].nonzero().flatten().tolist()) == expected


def test_several_labels(tmp_path):
    random = np.random.default_rng(0)
    animals = ["cat", "dog"]
    with (tmp_path / "several.jsonl").open("w") as file:
        for _ in range(60):
            has = [name for name in animals if random.random() < 0.5]
            text = " ".join(["the", *has, "was", "in", "a", "house"])
            file.write(json.dumps({"text": text, "label": has}) + "\n")
    settings = {"data__several": True, "data__columns": {}, "epochs": 20.0, "evaluation__every": 0}
    made = recipe("classify", tmp_path, data__train=str(tmp_path / "several.jsonl"), **settings)
    results = finetune(make_task(made), tmp_path / "run", console=QUIET)
    assert results["test"]["accuracy"] == 1.0
    use = longspan.pipeline(tmp_path / "run")
    assert use("the cat was in a house")["labels"] == ["cat"]
    assert use("the cat dog was in a house")["labels"] == ["cat", "dog"]
    assert use("the was in a house")["labels"] == []


@pytest.mark.parametrize("cell", ["a; b", '["a", "b"]', "a;b;;a"])
def test_several_labels_in_a_cell(cell, tmp_path):
    path = tmp_path / "t.tsv"
    quoted = '"' + cell.replace('"', '""') + '"'
    path.write_text("text\tlabel\n" + f"the cat\t{quoted}\n" * 12)
    made = recipe("classify", tmp_path, data__train=str(path), data__columns={})
    task = Classify(change(made, {"data.several": True, "data.separator": ";"}))
    assert task.labels == ["a", "b"]


def test_seeds_are_summed_up_and_resume(tmp_path):
    made = recipe("classify", tmp_path, epochs=1.0)
    summary = finetune_seeds(make_task(made), tmp_path / "runs", 2, console=QUIET)
    found = [
        json.loads((tmp_path / "runs" / f"seed-{seed}" / "results.json").read_text())["test"]
        for seed in (0, 1)
    ]
    losses = [one["loss"] for one in found]
    assert losses[0] != losses[1]
    assert summary["test"]["loss"]["mean"] == pytest.approx(np.mean(losses))
    assert summary["test"]["loss"]["deviation"] == pytest.approx(np.std(losses, ddof=1))
    for name in ("results.json", "recipe.json"):
        (tmp_path / "runs" / "seed-1" / name).unlink()
    (tmp_path / "runs" / "seed-1").rename(tmp_path / "gone")
    assert (
        finetune_seeds(make_task(made), tmp_path / "runs", 2, resume=True, console=QUIET) == summary
    )
    other = make_task(change(made, {"learning_rate": 1e-4}))
    with pytest.raises(ValueError, match=r"was done with other settings \(learning_rate, phases"):
        finetune_seeds(other, tmp_path / "runs", 2, resume=True, console=QUIET)


def test_a_column_of_other_things_is_not_listed_whole(tmp_path):
    data = tmp_path / "data.csv"
    data.write_text("body,animal\n" + "".join(f"a cat,{number}\n" for number in range(100)))
    with pytest.raises(ValueError, match=r"which no training example has; .* and \d+ more$"):
        Classify(recipe("classify", tmp_path, data__train=str(data)))


def test_too_long_is_refused_or_reported(tmp_path):
    made = recipe("classify", tmp_path, model__length=10)
    with pytest.raises(ValueError, match=r"60 of 60 documents \(100.0%\) have more than 8 tokens"):
        Classify(made)
    for policy, words in (("split", "read in pieces"), ("head", "read in part only")):
        task = Classify(change(made, {"too_long": policy}))
        assert any(words in note for note in task.notes())
    assert task.collate([task.documents.train[0].ids])["input_ids"].shape == (1, 10)


def test_what_cannot_be_learned_is_said(tmp_path):
    made = recipe("classify", tmp_path)

    def refused(message, **settings):
        with pytest.raises(ValueError, match=message):
            Classify(change(made, {k.replace("__", "."): v for k, v in settings.items()}))

    refused(
        "line 2: there is no column 'words'; there are 'body', 'animal'",
        data__columns={"text": "words"},
    )
    refused("give --model", model__source=None)
    nothing = {"model__freeze": "all-but-positions", "optimizer__weight_decay": 0.0}
    refused("needs no new positions for 24 tokens", **nothing)
    refused("measure=f2: choose from", measure="f2")
    refused("say which by data.positive", measure="f1")
    refused("data.positive='cow' is none of 'cat', 'dog'", data__positive="cow")
    refused("leaves no room", model__length=2)
    refused("epochs=0.0 must be above 0", epochs=0.0)
    other = tmp_path / "other.csv"
    other.write_text("body,animal\na cow,cow\n")
    refused("the test examples have the label 'cow', which no training", data__test=str(other))
    other.write_text("body,animal\n" + "a cat,cat\n" * 20)
    refused("nothing to tell apart", data__train=str(other))
    other.write_text("body,animal\n" + "a cat,cat\na dog,dog\n" * 20 + ",cat\n  ,dog\na cat,\n")
    task = Classify(change(made, {"data.train": str(other)}))
    assert task.skips.lines() == [
        f"skipped 2, the text is empty: {other}, line 42; {other}, line 43",
        f"skipped 1, there is no label: {other}, line 44",
    ]


def test_a_label_that_is_rare_or_none(tmp_path):
    """Neither stops training: a rare one may be drawn for a test, and a table's gap is no label."""
    rare, path = [f"rare{index}" for index in range(20)], tmp_path / "rare.jsonl"
    labels = [*["cat", "dog"] * 40, *rare, float("nan")]
    path.write_text("".join(json.dumps({"body": "a cat", "animal": own}) + "\n" for own in labels))
    task = Classify(recipe("classify", tmp_path, data__train=str(path)))
    assert "nan" not in task.labels
    lost = len({*rare, "cat", "dog"} - set(task.labels))
    gap, unknown = task.skips.lines()
    assert gap == f"skipped 1, there is no label: {path}, line 101"
    assert unknown.startswith(f"skipped {lost}, no training example has the label: 'rare")
    assert sum(len(split) for split in task.documents) == 100 - lost
    assert any(one.startswith("labels that a single training example") for one in task.notes())


def test_a_longspan_checkpoint_is_a_start_too(tmp_path):
    """Its encoder comes over, with more positions if they are needed."""
    from transformers import AutoTokenizer

    source = tiny_checkpoint(tmp_path / "short")
    long = longspan.convert(source, max_length=24, window=8)
    long.save_pretrained(tmp_path / "long")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "long")
    made = recipe("classify", tmp_path, model__source=str(tmp_path / "long"), model__length=30)
    model = Classify(made).build()
    assert model.config.longest == 30
    mine, theirs = model.base_model.state_dict(), long.state_dict()
    for name in ("layers.0.attention.qkv.weight", "embeddings.words.weight"):
        assert torch.equal(mine[name], theirs[name])
    assert model.config.attention[0]["window"] == 8
