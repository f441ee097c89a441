"""What positions are worth: every arm starts where it should, and nothing is done twice."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tasks.finetuned import QUIET, documents, recipe
from tasks.tiny import tiny_checkpoint

from longspan.analyze.positions import describe, draw, markdown, table
from longspan.models import LongspanForMaskedLM
from longspan.tasks import positions
from longspan.tasks.positions import (
    CONTROL,
    COPIED,
    HEAD,
    POSITIONS,
    RANDOM,
    SHORT,
    TRAINED,
    judge,
    plan,
    study,
)
from longspan.train import checkpoint
from longspan.train.recipe import change


def toy(tmp_path, masked, **changes):
    source = tiny_checkpoint(tmp_path / "checkpoint", masked=masked)
    settings = {"model__source": str(source), "model__length": 48, "batch": 2, "updates": 3}
    settings |= {"evaluation__every": 1, "log_every": 1}
    data = str(documents(tmp_path / "long.jsonl", count=12, words=60))
    return recipe("mlm", tmp_path, data__train=data, **(settings | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A recipe, the folder of all its arms one after the other, and what came of them."""
    folder = tmp_path_factory.mktemp("whole")
    made = toy(folder, masked=False)
    return made, folder / "out", study(made, folder / "out", QUIET)


def test_all_arms(whole, tmp_path, monkeypatch):
    made, out, result = whole
    assert result is not None
    assert [arm.name for arm in result.arms] == [
        *(HEAD, SHORT, RANDOM, COPIED, TRAINED, POSITIONS, CONTROL)
    ]
    assert (result.short, result.length, result.window) == (24, 48, 8)
    arms = {arm.name: arm for arm in result.arms}
    for name, arm in arms.items():
        trained = name not in (RANDOM, COPIED)
        assert arm.updates == (3 if trained else 0)
        assert arm.tokens == (3 * 2 * 48 if trained else 0)
        assert [step for step, _ in arm.curve] == ([1, 2, 3] if trained else [])
        # Tokens per character is all that two measures differ by.
        ratio = result.valid_tokens / result.valid_characters
        assert arm.bits_per_character == pytest.approx(arm.bits_per_token * ratio)
    # The short model sees all of its row, the long one its windows.
    short = LongspanForMaskedLM.from_pretrained(checkpoint.find(out / SHORT, "best"))
    assert {layer["window"] for layer in short.config.attention} == {48}
    last = LongspanForMaskedLM.from_pretrained(checkpoint.find(out / TRAINED))
    assert {layer["window"] for layer in last.config.attention} == {8}
    assert (short.config.longest, last.config.longest) == (24, 48)
    # With only new positions trained, all else is the short model's.
    folder = checkpoint.find(out / POSITIONS)
    assert folder is not None
    weights, old = load_file(folder / "model.safetensors"), short.state_dict()
    for name in weights:
        whole = name != "encoder.embeddings.positions.weight"
        assert torch.equal(weights[name] if whole else weights[name][:24], old[name])

    def never(*arguments, **options):
        raise AssertionError("this was done already")

    monkeypatch.setattr(positions, "finetune", never)
    monkeypatch.setattr(positions, "_score", never)
    assert study(made, out, QUIET) == result
    with pytest.raises(ValueError, match=r"head was done with other settings \(batch"):
        study(change(made, {"batch": 4}), out, QUIET)

    found = json.loads(json.dumps(describe(result)))
    shown = markdown(found)
    assert "| long, positions copied |" in shown
    assert f"{arms[COPIED].bits_per_character:.4f}" in shown
    assert table(found).row_count == 7
    assert [path.suffix for path in draw(found, tmp_path / "positions")] == [".png", ".svg"]


def test_an_interrupted_study_goes_on(tmp_path, monkeypatch):
    made, out = toy(tmp_path, masked=True, evaluation__every=0), tmp_path / "out"
    carry_out, begun = positions.finetune, []

    def interrupted(task, run, **options):
        begun.append(run.name)
        if begun == [TRAINED]:
            raise KeyboardInterrupt
        return carry_out(task, run, **options)

    monkeypatch.setattr(positions, "finetune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study(made, out, QUIET)
    result = study(made, out, QUIET)
    assert result is not None
    assert begun == [TRAINED, TRAINED, POSITIONS, CONTROL]
    # A checkpoint that has a head is a short model of masked tokens as it is.
    assert [arm.name for arm in result.arms] == [SHORT, RANDOM, COPIED, TRAINED, POSITIONS, CONTROL]
    assert result.arms[0].updates == 0


def test_arms_side_by_side_are_those_one_after_the_other(whole, tmp_path):
    made, _, together = whole
    for only in ([HEAD, SHORT], [CONTROL], [COPIED, RANDOM], [TRAINED], [POSITIONS]):
        assert study(made, tmp_path / "apart", QUIET, only) is None
    apart = study(made, tmp_path / "apart", QUIET)
    assert apart is not None
    bits = [[arm.bits_per_character for arm in own.arms] for own in (apart, together)]
    assert bits[0] == pytest.approx(bits[1])


@pytest.mark.parametrize(
    ("masked", "arm", "advice"),
    [
        (True, COPIED, "run --only short first"),
        (False, TRAINED, "run --only head --only short first"),
        (False, SHORT, "run --only head --only short first"),
    ],
)
def test_an_arm_says_what_has_to_come_before_it(tmp_path, masked, arm, advice):
    with pytest.raises(ValueError, match=f"the arm {arm} starts from .*: {advice}"):
        study(toy(tmp_path, masked), tmp_path / "study", QUIET, [arm])


def test_arms_read_as_many_tokens(tmp_path):
    made = toy(tmp_path, masked=False)
    arms = plan(made, tmp_path, 24, headless=True)
    assert {own.model.length * own.batch for own in arms.values()} == {96}
    assert arms[TRAINED].learning_rate == arms[CONTROL].learning_rate == made.learning_rate
    assert arms[POSITIONS].optimizer.weight_decay == 0
    assert arms[COPIED].model == arms[TRAINED].model


def test_claims_are_judged():
    bits = {SHORT: 1.846, RANDOM: 10.299, COPIED: 1.957, TRAINED: 1.753, POSITIONS: 1.85}
    assert all(claim.holds for claim in judge({**bits, CONTROL: 1.8}))
    wrong = judge({**bits, RANDOM: 2.0, TRAINED: 1.9, CONTROL: 1.8})
    assert [claim.holds for claim in wrong] == [False, True, False, True, False, False]


def test_what_cannot_be_studied_is_said(tmp_path):
    made = toy(tmp_path, masked=False)
    with pytest.raises(ValueError, match="give --model"):
        study(change(made, {"model.source": None}), Path(tmp_path / "out"), QUIET)
    with pytest.raises(ValueError, match="no arm 'middle': choose from head, short"):
        study(made, tmp_path / "out", QUIET, ["middle"])
    with pytest.raises(ValueError, match="has 24 learned positions: the study needs"):
        study(change(made, {"model.length": 24}), tmp_path / "out", QUIET)
