"""Recipes as values: changed by name, read back, refused where they do not fit."""

import json

import pytest

from longspan.recipes import FINETUNING, find
from longspan.train.recipe import change, from_dict, parse

RECIPE = find("enwik8-small")


def test_there_and_back():
    assert from_dict(json.loads(json.dumps(RECIPE.to_dict()))) == from_dict(RECIPE.to_dict())
    again = from_dict(json.loads(json.dumps(RECIPE.to_dict())))
    assert again.phases == RECIPE.phases
    assert again.optimizer == RECIPE.optimizer


def test_values_are_replaced():
    settings = parse(
        [
            "phases.1.steps=7",
            "model.hidden_size=64",
            "optimizer.kind=muon",
            "optimizer.clip=1",
            "compile=model",
            "data.path=/some/where",
            "phases.0.windows=[1,2]",
            "model.attention.0.clamp=9",
        ]
    )
    changed = change(RECIPE, settings)
    assert changed.phases[1].steps == 7
    assert changed.phases[0].windows == (1, 2)
    assert changed.phases[2] == RECIPE.phases[2]
    assert changed.model["hidden_size"] == 64
    assert changed.model["attention"][0]["clamp"] == 9
    assert (changed.optimizer.kind, changed.optimizer.clip) == ("muon", 1.0)
    assert changed.compile == "model"
    assert changed.data.path == "/some/where"
    assert RECIPE.phases[1].steps == 50_000


def test_epochs_take_the_place_of_updates():
    recipe = FINETUNING["mlm"]()
    assert change(recipe, {"batch": 2}).updates == 65_000
    assert change(recipe, {"epochs": 2}).updates == 0
    assert change(recipe, {"updates": 9, "epochs": 2}).updates == 9


def test_a_part_of_several_values_is_replaced():
    assert change(find("tiny"), {"optimizer.betas.1": 0.9}).optimizer.betas == (0.9, 0.9)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("phases.0.stepps=3", "phases.0.stepps is unknown; did you mean steps?"),
        ("steps=3", "steps is unknown; did you mean phases.0.steps?"),
        ("hidden_size=3", "hidden_size is unknown; did you mean model.hidden_size?"),
        ("lr=3", "lr is unknown; did you mean phases.0.learning_rate?"),
        ("batch_size=3", "batch_size is unknown; did you mean phases.0.batch?"),
        ("optimiser.clip=3", "optimiser is unknown; did you mean optimizer?"),
        ("phases.9.steps=3", "phases.9: there are 5, numbered from 0"),
        ("phases.steps=3", "phases.steps: there are 5, numbered from 0, e.g. phases.0.steps"),
        ("phases.0.steps=many", "phases.0.steps='many': expected int"),
        ("phases.0.steps=1.5", "phases.0.steps=1.5: expected int"),
        ("optimizer.kind=sgd", "choose from adamw, muon"),
        ("optimizer.betas=[0.9]", "expected 2 values"),
        ("checkpointing=1", "checkpointing=1: expected bool"),
        ("compile=yes", "compile='yes': choose from no, model, layers"),
        ("seed=true", "seed=True: expected int"),
        ("name.first=x", "has no parts"),
        ("phases=3", "phases=3: expected a list"),
        ("steps", "expected key=value"),
    ],
)
def test_what_does_not_fit_is_named(setting, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        change(RECIPE, parse([setting]))


def test_steps_belong_to_phases():
    assert RECIPE.steps == 570_000
    assert RECIPE.at(0) == (0, 0)
    assert RECIPE.at(429_999) == (0, 429_999)
    assert RECIPE.at(430_000) == (1, 0)
    assert RECIPE.at(569_999) == (4, 4_999)
    with pytest.raises(ValueError, match="570000 steps"):
        RECIPE.at(570_000)


def test_a_recipe_that_is_older_than_a_setting():
    """What it lacks, at any depth, was as it is by default."""
    recipe = FINETUNING["classify"]()
    known = json.loads(json.dumps(recipe.to_dict()))
    del known["answers"]["blanks"], known["alike"]
    assert recipe.differing(known) == []
    assert change(recipe, {"answers.blanks": 1.0}).differing(known) == ["answers"]
    assert change(recipe, {"alike": 3, "seed": 1}).differing(known) == ["alike", "seed"]
