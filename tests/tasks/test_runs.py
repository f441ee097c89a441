"""Several runs one after the other: what is done stays, what fails is named and tried again."""

import numpy as np
import pytest
from rich.console import Console

from longspan.data.text import Corpus
from longspan.recipes import find, find_study
from longspan.recipes.shrink import shrink
from longspan.tasks import runs
from longspan.tasks.runs import carry_out, open_run
from longspan.train.recipe import change

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
CORPUS = Corpus(TEXT, TEXT[:100], TEXT[:100])
QUIET = Console(quiet=True)


def test_a_failure_stops_nothing_and_is_tried_again(tmp_path, monkeypatch):
    recipes = [shrink(find(name)) for name in ("rival-dense", "rival-xl", "rival-staged")]
    done, train = [], runs.train

    def failing(recipe, *arguments, **options):
        done.append(recipe.name)
        if recipe.name == "rival-xl" and done.count("rival-xl") == 1:
            raise RuntimeError("CUDA out of memory\nand a long explanation")
        return train(recipe, *arguments, **options)

    monkeypatch.setattr(runs, "train", failing)
    assert carry_out(recipes, tmp_path, QUIET, CORPUS) == {"rival-xl": "CUDA out of memory"}
    assert carry_out(recipes, tmp_path, QUIET, CORPUS) == {}
    assert done == ["rival-dense", "rival-xl", "rival-staged", "rival-xl"]
    assert open_run(tmp_path / "rival-xl", "last").checkpoint.name == "step-00000002"


def test_a_run_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    recipe = shrink(find("rival-dense"), steps=3)
    train = runs.train

    def interrupted(*arguments, **options):
        (tmp_path / recipe.name).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out([recipe], tmp_path, QUIET, CORPUS)
    monkeypatch.setattr(runs, "train", train)
    assert carry_out([recipe], tmp_path, QUIET, CORPUS) == {}


def test_settings_that_do_not_fit_stop_everything(tmp_path):
    recipe = shrink(find("rival-dense"))
    carry_out([recipe], tmp_path, QUIET, CORPUS)
    with pytest.raises(ValueError, match=r"other settings \(phases"):
        carry_out([shrink(find("rival-dense"), steps=5)], tmp_path, QUIET, CORPUS)


def test_folders_without_a_run_are_named(tmp_path):
    with pytest.raises(ValueError, match="longspan train"):
        open_run(tmp_path)
    with pytest.raises(ValueError, match="did you mean rivals"):
        find_study("rival")


@pytest.mark.parametrize("number", ["", "1."])
def test_a_toy_takes_what_its_recipe_takes(number):
    """One setting for all layers stays one, and a list stays a list."""
    name = "rival-longformer" if number else "causal-sparse"
    option = f"model.attention.{number}{'left' if number else 'stride'}"
    for recipe in (find(name), shrink(find(name))):
        assert change(recipe, {option: 3}).model["attention"] != recipe.model["attention"]
