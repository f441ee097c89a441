"""The commands that put language models side by side."""

import json
import shutil

import pytest
from tasks.tiny import tiny_checkpoint
from typer.testing import CliRunner

from longspan.cli import app
from longspan.tasks.charlm import CharLM

RUNNER = CliRunner()
FEW = ["--limit", "100", "--rows", "2", "--longest", "32", "--tokens", "10", "--step", "16"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "novels.jsonl"
    path.write_text((json.dumps({"text": "the fox and the dog. " * 40}) + "\n") * 20)
    return path


def run(*arguments: object) -> str:
    done = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_study_trains_and_plots(text, tmp_path):
    command = ["study", "rivals", "--shrink", "--data", text, "--output", tmp_path / "out"]
    command += ["--only", "rival-dense", "--only", "rival-compressive"]
    shown = run(*command)
    assert "Runs, the best first" in shown
    found = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert [one["name"] for one in found["runs"]] == ["rival-compressive", "rival-dense"]
    assert (tmp_path / "out" / "runs-curves.png").exists()
    assert (tmp_path / "out" / "runs.md").read_text().startswith("| run |")
    assert "rival-dense: done before" in run(*command)
    shown = run("plot", tmp_path / "out" / "rival-dense", "--output", tmp_path / "one", *FEW)
    assert "rival-dense" in shown
    drawn = tmp_path / "one" / "runs-curves.svg"
    before = drawn.read_bytes()
    drawn.unlink()
    again = run("plot", tmp_path / "one" / "runs.json")
    assert "rival-dense" in again
    assert "measur" not in again
    assert drawn.read_bytes() == before


def test_what_is_done_survives_what_is_not(text, tmp_path, monkeypatch):
    """A study killed in its second run leaves the first measured; others join it."""
    command = ["study", "rivals", "--shrink", "--data", text]
    whole, kill = CharLM.loss, {"rival-xl": KeyboardInterrupt}

    def loss(self, *arguments):
        if self.recipe.name in kill:
            raise kill[self.recipe.name]
        return whole(self, *arguments)

    monkeypatch.setattr(CharLM, "loss", loss)
    killed = ["--only", "rival-staged", "--only", "rival-xl", "--output", tmp_path / "killed"]
    done = RUNNER.invoke(app, [str(argument) for argument in [*command, *killed]])
    assert done.exit_code == 130
    run(*command, "--only", "rival-dense", "--output", tmp_path / "apart")
    runs = [tmp_path / "killed" / "rival-staged", tmp_path / "apart" / "rival-dense"]
    for own in runs:
        shutil.rmtree(own / "checkpoints")
    assert run("plot", *runs, "--output", tmp_path / "joined").count("measured before") == 2
    found = json.loads((tmp_path / "joined" / "runs.json").read_text())
    for one in found["runs"]:
        assert one["bits_per_character"].keys() == {"valid", "test"}
        assert min(one["recl"]["0.1"], one["characters_per_second"], one["peak_mib"]) > 0
    assert (tmp_path / "joined" / "runs-context.svg").exists()


def test_an_arena(tmp_path):
    command = ["study", "lra-listops", "--shrink", "--output", tmp_path / "out"]
    command += ["--only", "performer", "--set", "data.train=listops:train#64"]
    shown = run(*command)
    assert "lra-listops: accuracy, %" in shown
    found = json.loads((tmp_path / "out" / "lra-listops.json").read_text())
    assert [arm["kind"] for arm in found["arms"]] == ["performer"]
    assert found["published"]["performer"] == 18.01
    assert "| performer |" in (tmp_path / "out" / "lra-listops.md").read_text()
    figure = tmp_path / "out" / "lra-listops.png"
    figure.unlink()
    assert "lra-listops: accuracy, %" in run("plot", tmp_path / "out" / "lra-listops.json")
    assert figure.exists()
    assert "performer: done before" in run(*command)


def test_positions(text, tmp_path):
    source = tiny_checkpoint(tmp_path / "short")
    command = ["study", "positions", "--shrink", "--data", text, "--model", source]
    command += ["--valid", text, "--output", tmp_path / "out", "--set", "model.length=48"]
    shown = run(*command)
    assert "long, only new positions trained" in shown
    found = json.loads((tmp_path / "out" / "positions.json").read_text())
    assert len(found["arms"]) == 7
    assert found["machine"]
    assert (tmp_path / "out" / "positions.png").exists()
    assert "| long, positions copied |" in (tmp_path / "out" / "positions.md").read_text()
    assert run(*command).count("done before") == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "position"], "did you mean positions"),
        (["study", "positions"], "give --model"),
        (["study", "positions", "--only", "middle"], "there is no arm 'middle'"),
        (
            ["study", "rivals", "--model", "x"],
            "are for studies of positions, summaries or lra",
        ),
        (["study", "summaries"], "give --data FILE"),
        (["study", "summaries", "--lengths", "1K"], "--lengths 1K: give numbers"),
        (["study", "summaries", "--lengths", "64,0"], "at least one token has to be read"),
        (["study", "summaries", "--only", "1K"], "choose with --lengths"),
        (["study", "lra-list"], "did you mean lra-listops"),
        (["study", "lra-text"], "give --data"),
        (["study", "lra-text", "--only", "lstm", "--data", "x.csv"], "choose from window"),
        (["study", "lra-listops", "--lengths", "5"], "are for the study of summaries"),
        (["study", "rivals", "--jobs", "2"], "are for studies of positions, summaries or lra"),
        (["study", "positions", "--jobs", "2"], "--jobs and --shared are for the studies of lra"),
        (["study", "rival"], "did you mean rivals"),
        (["study", "rivals", "--only", "rival-lstm"], "choose from rival-longformer"),
        (["study", "windows", "--set", "nimutes=2"], "nimutes is unknown; did you mean minutes"),
        (["study", "windows"], "give --data PATH"),
        (["plot", "nowhere"], "holds no run: it does not exist"),
        (["plot", "runs.json"], "No such file"),
        (["plot", "other.json"], "other.json is no results file of longspan plot"),
        (["plot", "cut.json"], "cut.json is not JSON"),
        (["plot", "none.json"], "none.json is no results file of longspan plot"),
        (["plot", "bare.json"], "its runs lack bits_per_character, characters_per_second, curve"),
        (["plot", "failed.json"], "failed.json cannot be drawn: no kind of attention came to"),
        (["plot", "runs", "other.json"], "other.json is drawn as it is: give no other runs"),
        (["plot", "other.json", "--shared"], "other.json is drawn as it is: give no other runs"),
    ],
)
def test_mistakes_are_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"arms": []}')
    (tmp_path / "failed.json").write_text('{"recipe": "lra-text", "arms": []}')
    (tmp_path / "cut.json").write_text('{"runs": [')
    (tmp_path / "none.json").write_text('{"runs": []}')
    (tmp_path / "bare.json").write_text('{"runs": [{"name": "tiny"}]}')
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
