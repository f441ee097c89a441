"""Masked tokens: packed as separate, hidden reproducibly, frozen where told, measured in bits."""

import json
import lzma
import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tasks.finetuned import QUIET, documents, recipe
from tasks.tiny import tiny_checkpoint
from torch._dynamo.utils import counters

import longspan
from longspan.models import LongspanForMaskedLM
from longspan.tasks.finetune import finetune, make_task
from longspan.tasks.mlm import MaskedLM
from longspan.tasks.start import build_model
from longspan.train import checkpoint, loop
from longspan.train.loop import train
from longspan.train.recipe import change


def carry_out(made, run, **options):
    task = MaskedLM(made)
    return train(task.recipe, task, run, console=QUIET, **options)


def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


def batches(task, steps, rows=4):
    return [task.batch(0, step, range(rows))[0] for step in range(steps)]


def test_it_learns_what_follows_what(tmp_path):
    made = recipe("mlm", tmp_path, updates=180, learning_rate=1e-2, masking__share=0.3)
    before = MaskedLM(made)
    new = before.evaluate(before.build(), "valid")
    results = finetune(make_task(made), tmp_path / "run", console=QUIET)
    assert results["valid"]["bits_per_token"] < 0.5 * new["bits_per_token"]
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    use = longspan.pipeline(tmp_path / "run")
    text = "river house the a [MASK] was in and"
    (found,) = use(text)["masks"]
    assert text[found["start"] : found["end"]] == "[MASK]"
    assert found["words"][0]["word"] == "is"
    scores = [one["score"] for one in found["words"]]
    assert scores == sorted(scores, reverse=True)
    assert use("no mask") == {"skipped": "the text has no [MASK]"}
    # Beyond the model a text is read in pieces, and every mask found.
    long = "the a [MASK] was in and river house " * 20
    beyond = use(long)["masks"]
    assert [long[one["start"] : one["end"]] for one in beyond] == ["[MASK]"] * 20
    assert [one["words"][0]["word"] for one in beyond] == ["is"] * 20
    with pytest.raises(ValueError, match=r"the input: 160 tokens, the model reads 30"):
        longspan.pipeline(tmp_path / "run", too_long="refuse")(long)
    begun = longspan.pipeline(tmp_path / "run", too_long="head")(long)
    assert (len(begun["masks"]), begun["unread"]) == (4, 16)


def test_packed_is_separate(tmp_path):
    """What is said of a hidden token does not depend on what else is in the batch."""
    task = MaskedLM(recipe("mlm", tmp_path, masking__share=0.4))
    model = task.build().eval()
    (batch,) = batches(task, 1)
    ids, bounds = batch["input_ids"][0].long(), batch["cu_seqlens"].tolist()
    wanted = batch["targets"] >= 0
    with torch.no_grad():
        together = model(
            ids[None], cu_seqlens=batch["cu_seqlens"], logits_to_keep=batch["places"]
        ).logits[0]
        parts = [model(ids[None, first:last]).logits[0] for first, last in pairwise(bounds)]
    assert len(parts) > 4  # more documents than rows
    alone = torch.cat(parts)[batch["places"]]
    torch.testing.assert_close(together[wanted], alone[wanted])


def test_targets_are_what_was_hidden_and_shapes_never_change(tmp_path):
    task = MaskedLM(recipe("mlm", tmp_path, masking__random=0.0, masking__masked=1.0))
    found, rows = batches(task, 8), task._rows["train"]
    words = Counter(rows.ids[: rows.tokens][rows.ordinary[: rows.tokens]].tolist())
    for batch in found:
        assert {name: tuple(own.shape) for name, own in batch.items() if name != "cu_seqlens"} == {
            "input_ids": (1, 4 * 32),
            "places": (4 * round(0.15 * 30),),
            "targets": (4 * round(0.15 * 30),),
        }
        asked = batch["targets"] != -100
        assert asked.any()
        shown = batch["input_ids"][0, batch["places"][asked]]
        assert (shown == task.tokenizer.mask_token_id).all()
        assert set(batch["targets"][asked].tolist()) <= set(words)
        # Nothing else is a mask: the places are all there are.
        assert int((batch["input_ids"] == task.tokenizer.mask_token_id).sum()) == int(asked.sum())


def test_what_is_hidden_follows_from_seed_and_step(tmp_path):
    made = recipe("mlm", tmp_path)
    task, same = MaskedLM(made), MaskedLM(made)
    other = task.again(change(made, {"seed": 1}))
    steps = task._rows["train"].count // 4 + 1  # into the second pass
    one, two, three = (batches(t, steps) for t in (task, same, other))
    for a, b in zip(one, two, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(one[0]["input_ids"], three[0]["input_ids"])
    # Rows of a process are those that a single one would have read.
    halves = [task.batch(0, 3, rows)[0]["input_ids"] for rows in (range(2), range(2, 4))]
    assert torch.equal(torch.cat(halves, dim=1), one[3]["input_ids"])


def test_bits_are_what_a_hand_would_compute(tmp_path):
    """One document, one row: the mean over hidden tokens, and over characters in proportion."""
    text = "the cat is in a house and a river was in the house"
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": text}) + "\n")
    made = recipe("mlm", tmp_path, data__valid=str(tmp_path / "one.jsonl"))
    task = MaskedLM(made)
    model = task.build().eval()
    found = task.evaluate(model, "valid")
    rows = task._rows["valid"]
    shown, is_asked = task._hidden["valid"]
    ids, places = rows.ids[: rows.tokens], np.flatnonzero(is_asked)
    assert task.tokenizer.decode(ids[1:-1]) == text
    assert len(places) == round(0.15 * 13)
    with torch.no_grad():
        logits = model(torch.from_numpy(shown[: rows.tokens].astype(np.int64))[None]).logits[0]
    chances = logits.double().softmax(dim=-1)
    bits = [-math.log2(chances[place, ids[place]]) for place in places]
    assert found["bits_per_token"] == pytest.approx(np.mean(bits), rel=1e-5)
    assert found["bits_per_character"] == pytest.approx(np.mean(bits) * 13 / len(text), rel=1e-5)
    assert found["loss"] == pytest.approx(np.mean(bits) * math.log(2), rel=1e-5)
    assert task.evaluate(model, "valid") == found  # the same tokens are hidden again


def test_the_same_tokens_are_hidden_whatever_the_length_and_seed(tmp_path):
    made = recipe("mlm", tmp_path)
    tasks = [MaskedLM(made), MaskedLM(change(made, {"model.length": 20, "seed": 3}))]
    hidden = []
    for task in tasks:
        task.evaluate(task.build(), "valid")
        hidden.append(task._hidden["valid"])
    for one, other in zip(*hidden, strict=True):
        assert np.array_equal(one, other)


def test_the_rows_of_a_limit_are_scored(tmp_path):
    task = MaskedLM(recipe("mlm", tmp_path))
    model = task.build()
    assert task._rows["valid"].count > 1
    assert task.evaluate(model, "valid", 1) != task.evaluate(model, "valid")


def weights(run):
    folder = checkpoint.find(run)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def test_only_the_head_is_trained(tmp_path):
    source = tiny_checkpoint(tmp_path / "bare")
    made = recipe("mlm-head", tmp_path, model__source=str(source), model__length=24)
    task = MaskedLM(made)
    torch.manual_seed(made.seed)
    before = task.build().state_dict()
    train(task.recipe, task, tmp_path / "run", console=QUIET)
    after = weights(tmp_path / "run")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {
        "lm_head.dense.weight",
        "lm_head.dense.bias",
        "lm_head.norm.weight",
        "lm_head.norm.bias",
        "lm_head.decoder.bias",
    }
    # Its run is what pretraining then starts from, head included.
    follow = MaskedLM(
        change(made, {"model.source": str(tmp_path / "run"), "model.freeze": "nothing"})
    )
    assert torch.equal(follow.build().lm_head.dense.weight, after["lm_head.dense.weight"])


def test_a_new_head_begins_with_how_common_words_are(tmp_path):
    source = tiny_checkpoint(tmp_path / "bare")
    task = MaskedLM(recipe("mlm-head", tmp_path, model__source=str(source)))
    words = [id for one in task.documents.train for id in one.ids.tolist()]
    share = np.array(list(Counter(words).values())) / len(words)
    entropy = -(share * np.log2(share)).sum()
    plain = build_model(task.recipe.model, LongspanForMaskedLM, task.tokenizer)
    without, found = (task.evaluate(m, "valid")["bits_per_token"] for m in (plain, task.build()))
    assert entropy < found < entropy + 2 < without


def test_only_new_positions_are_trained(tmp_path):
    made = recipe("mlm-positions", tmp_path, model__length=40)
    task = MaskedLM(made)
    before = task.build().state_dict()
    train(task.recipe, task, tmp_path / "run", console=QUIET)
    after = weights(tmp_path / "run")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"encoder.embeddings.positions.weight"}
    one, other = (own["encoder.embeddings.positions.weight"] for own in (before, after))
    assert torch.equal(one[:24], other[:24])
    assert (one[24:] != other[24:]).any(dim=1).all()


def test_global_projections_follow_the_local_ones(tmp_path):
    """No token is global, so nothing trains them; later tasks start from copies."""
    made = recipe("mlm", tmp_path)
    before = MaskedLM(made).build().state_dict()
    carry_out(made, tmp_path / "run")
    after = weights(tmp_path / "run")
    name = "encoder.layers.0.attention.qkv{}.weight"
    assert not torch.equal(after[name.format("")], before[name.format("")])
    assert torch.equal(after[name.format("")], after[name.format("_global")])
    made = change(made, {"model.global_tokens": "first"})
    carry_out(made, tmp_path / "global")
    after = weights(tmp_path / "global")
    assert not torch.equal(after[name.format("")], after[name.format("_global")])


@pytest.mark.parametrize("name", ["mlm", "mlm-positions"])
def test_a_run_resumes_to_the_same_losses(name, tmp_path):
    made = recipe(
        name, tmp_path, updates=9, save_every=2, log_every=1, model__length=40, accumulate=2
    )
    carry_out(made, tmp_path / "whole")
    broken, count = MaskedLM(made), 0

    def interrupted(model, batch, state):
        nonlocal count
        count += 1
        if count == 12:
            raise KeyboardInterrupt
        return MaskedLM.loss(broken, model, batch, state)

    broken.loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        train(broken.recipe, broken, tmp_path / "broken", console=QUIET)
    carry_out(made, tmp_path / "broken", resume=True)
    one, two = (losses(tmp_path / run) for run in ("whole", "broken"))
    assert len(one) == 10  # nine steps and an evaluation
    assert one == two


def test_new_positions_are_copied_or_random(tmp_path):
    made = recipe("mlm", tmp_path, model__length=60)
    tables = {}
    for how in ("copied", "random"):
        model = MaskedLM(change(made, {"model.positions": how})).build()
        tables[how] = model.state_dict()["encoder.embeddings.positions.weight"]
    assert torch.equal(tables["copied"][:24], tables["copied"][24:48])
    assert torch.equal(tables["copied"][:24], tables["random"][:24])
    assert not torch.isclose(tables["copied"][24:], tables["random"][24:]).any(dim=1).all()
    assert tables["random"][24:].std() == pytest.approx(0.02, rel=0.2)


def test_checkpointing_changes_nothing(tmp_path):
    made = recipe("mlm", tmp_path, log_every=1)
    found = []
    for on in (False, True):
        own = change(made, {"checkpointing": on})
        found.append(carry_out(own, tmp_path / str(on))["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("ending", [".csv", ".txt", ".jsonl.xz"])
def test_files_of_other_kinds(ending, tmp_path):
    path = tmp_path / f"t{ending}"
    texts = ["the cat is in a house", "a river was in the house"]
    if ending == ".csv":
        path.write_text("text\n" + "".join(f'"{text}"\n' for text in texts))
    elif ending == ".txt":
        path.write_text("\n".join(texts))
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        path.write_bytes(lzma.compress(lines.encode()))
    same = {"data__valid": str(path), "data__test": str(path)}
    task = MaskedLM(recipe("mlm", tmp_path, data__train=str(path), **same))
    read = [task.tokenizer.decode(one.ids) for one in task.documents.train]
    assert read == ([" ".join(texts)] if ending == ".txt" else texts)


def test_what_is_cut_and_skipped_is_said(tmp_path):
    path = tmp_path / "t.jsonl"
    texts = ["the cat " * 36, "  ", *["a house"] * 10]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = recipe("mlm", tmp_path, data__train=str(path), data__valid=str(path))
    made = change(made, {"data.test": str(path)})
    notes = MaskedLM(made).notes()
    assert notes[0].startswith("documents: 11 train (92 tokens), 11 valid (92 tokens)")
    assert "1 of 11 documents (9.1%) reach beyond a row and go on in the next" in notes[1]
    assert notes[2].startswith(f"skipped 3, the text is empty: {path}, line 2")
    with pytest.raises(ValueError, match=r"3 of 33 documents .* have more than 30 tokens"):
        MaskedLM(change(made, {"too_long": "refuse"}))
    blank = tmp_path / "blank.jsonl"
    blank.write_text('{"text": " "}\n' * 2)
    with pytest.raises(ValueError, match=r"no example for train.*; skipped 5, the text is empty"):
        MaskedLM(change(made, {"data.train": str(blank), "data.valid": str(blank)}))
    task = MaskedLM(change(made, {"too_long": "head"}))
    assert "are read in part only" in task.notes()[-1]
    assert int(task._rows["train"].ordinary.sum()) == 30 + 20


def test_what_cannot_be_done_is_said(tmp_path):
    made = recipe("mlm", tmp_path)

    def refused(message, **settings):
        with pytest.raises(ValueError, match=message):
            MaskedLM(change(made, {k.replace("__", "."): v for k, v in settings.items()}))

    bare = tiny_checkpoint(tmp_path / "bare")
    refused("has no head that scores words: `longspan train mlm-head`", model__source=str(bare))
    refused("give --model", model__source=None)
    refused("give --data FILE", data__train=None)
    refused("measure=accuracy: choose from bits_per_character", measure="accuracy")
    refused("masking.share=0.0 must be above 0", masking__share=0.0)
    refused("together at most 1", masking__masked=0.95)
    refused("leaves no room", model__length=2)
    refused("always packs its rows", packed=False)
    refused("updates=-1 must not be negative", updates=-1)
    refused("set it to 0", model__freeze="all-but-positions")
    none = {"model__freeze": "all-but-positions", "optimizer__weight_decay": 0.0}
    refused("needs no new positions for 24 tokens", model__length=24, **none)
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": " "}\n' * 5)
    refused("leaves no example for train", data__train=str(empty))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text("{}")
    refused("has no checkpoint yet", model__source=str(tmp_path / "run"))


def test_a_run_shows_what_it_finds(tmp_path):
    task = MaskedLM(recipe("mlm", tmp_path))
    shown = task.sample(task.build())
    assert "[MASK]" in shown
    assert " ... for " in shown


def test_places_choose_among_all_scores(tmp_path):
    task = MaskedLM(recipe("mlm", tmp_path))
    model = task.build().eval()
    ids = torch.randint(5, 30, (2, 12))
    places = torch.tensor([3, 3, 11])
    with torch.no_grad():
        some = model(ids, logits_to_keep=places, labels=ids[:, places])
        every = model(ids, labels=ids)
    torch.testing.assert_close(some.logits, every.logits[:, places])
    assert some.loss is not None
    assert every.loss != some.loss


def test_compiled_losses_are_the_same_and_compiled_once(tmp_path, monkeypatch):
    made_by: Any = loop.TorchDynamoPlugin
    monkeypatch.setattr(
        loop, "TorchDynamoPlugin", lambda **options: made_by(**options | {"backend": "aot_eager"})
    )
    documents(tmp_path / "short.jsonl", words=6)
    made = recipe("mlm", tmp_path, log_every=1, data__train=str(tmp_path / "short.jsonl"))
    graphs = {}
    for updates in (2, 6):
        torch.compiler.reset()
        counters.clear()
        own = change(made, {"updates": updates, "compile": "layers"})
        carry_out(own, tmp_path / str(updates))
        graphs[updates] = counters["stats"]["unique_graphs"]
    carry_out(change(made, {"updates": 6}), tmp_path / "plain")
    found = [[loss for _, loss in losses(tmp_path / run)] for run in ("6", "plain")]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert graphs[2] == graphs[6] > 0
