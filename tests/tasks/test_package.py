"""The model that is carried along: small, measured as written, and found without a name."""

import json
import math

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from longspan.cli import app
from longspan.recipes import find
from longspan.recipes.shrink import shrink
from longspan.tasks import package
from longspan.tasks.charlm import CharLM
from longspan.tasks.package import package_run, packaged_model
from longspan.tasks.runs import carry_out, load_model, open_run
from longspan.train.recipe import change


@pytest.fixture
def run(tmp_path):
    text = tmp_path / "novels.jsonl"
    text.write_text((json.dumps({"text": "the fox and the dog. " * 10}) + "\n") * 20)
    recipe = change(shrink(find("books-small"), steps=3), {"data.path": str(text)})
    carry_out([recipe], tmp_path / "runs", Console(quiet=True))
    return tmp_path / "runs" / "books-small"


def test_the_card_says_what_was_written(run, tmp_path):
    card = package_run(run, tmp_path / "made")
    weights = load_file(tmp_path / "made" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    model = load_model(tmp_path / "made")
    assert model.dtype == torch.float32
    score = CharLM(open_run(run).recipe).evaluate(model, "test")["bits_per_character"]
    assert f"**{score:.4f}** on test" in card
    assert "3 steps, 72 bytes read" in card
    assert (tmp_path / "made" / "README.md").read_text() == card
    assert not [*tmp_path.glob("*.tmp")]
    again = package_run(run, tmp_path / "made", limit=50)  # takes the place of the one before
    assert "all of both" in card
    assert "the first 50 bytes of each" in again


def test_the_model_that_came_along_has_learned():
    """English as nobody has printed it, in far fewer bits than its letters alone would take."""
    folder = packaged_model()
    assert (folder / "model.safetensors").stat().st_size <= package.LARGEST
    text = "The old man walked slowly down to the river, and his daughter followed him with a lamp."
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        loss = load_model(folder)(ids, labels=ids).loss
    assert loss / math.log(2) < 2.5


def test_it_writes_without_a_run():
    command = ["generate", "--prompt", "It was", "--tokens", "40", "--seed", "1"]
    first, second = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert len(first.output) > 40
    assert first.output == second.output


def test_what_is_too_large_or_too_coarse_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "_WORSE", -1.0)
    with pytest.raises(ValueError, match="bfloat16 takes it from"):
        package_run(run, tmp_path / "made")
    monkeypatch.setattr(package, "LARGEST", 1000)
    with pytest.raises(ValueError, match="longspan train books-small"):
        package_run(run, tmp_path / "made")
    assert not (tmp_path / "made").exists()
    assert not [*tmp_path.glob("*.tmp")]


def test_generate_needs_no_name(run, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "PLACE", tmp_path / "packaged")
    with pytest.raises(ValueError, match="longspan train tiny"):
        packaged_model()
    done = CliRunner().invoke(app, ["generate"])
    assert done.exit_code == 2
    done = CliRunner().invoke(app, ["package", str(run)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["generate", "--prompt", "It was", "--tokens", "5"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("It was")
