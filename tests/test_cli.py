"""The command line: doctor, and a benchmark that resumes."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import longspan
from longspan import cli_tasks
from longspan.bench import attention, led, models
from longspan.bench import run as bench_run
from longspan.bench.benchmark import Case, Contender, Pass, Point
from longspan.cli import _flowing, app
from longspan.ops.window import BACKENDS, native


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    # An error comes in a box whose lines break anywhere.
    return result.output if code == 0 else " ".join(result.output.replace("│", " ").split())


def test_version() -> None:
    assert invoke("--version") == f"longspan {longspan.__version__}\n"


def test_python_runs_the_package() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "longspan", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"longspan {longspan.__version__}\n"


def test_a_log_is_told_how_many_rows_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal, a line every half minute."""
    now = [0.0]
    monkeypatch.setattr(cli_tasks, "monotonic", lambda: now[0])
    written = io.StringIO()
    tell = cli_tasks.count_rows(Console(file=written), None)
    for done in (1000, 2000, 3000, 4000):
        now[0] += 20.0
        tell(done)
    assert written.getvalue() == "2,000 rows\n4,000 rows\n"


def commands() -> dict[str, Any]:
    whole: Any = get_command(app)
    found = dict(whole.commands)
    bench = found.pop("bench").commands
    return found | {f"bench {name}": command for name, command in bench.items()}


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_has_an_example_with_options_that_exist(name: str) -> None:
    command = commands()[name]
    examples = re.findall(rf"\[bold\]longspan {name}\b(.*?)\[/\]", command.help)
    assert examples or not command.params or name == "doctor"
    known = {option for one in command.params for option in one.opts}
    for example in examples:
        assert set(re.findall(r"(?<!\S)--[\w-]+", example)) <= known
    assert all(one.help for one in command.params if one.name != "context")


def test_help_is_broken_to_the_width_of_a_terminal() -> None:
    """Only examples stand on lines of their own."""
    words = "Docstrings are as wide as\nthis [bold]file[/] is."
    examples = "[bold]longspan a[/]\n[bold]longspan b[/] does;\n[bold]longspan c[/]\nbeside."
    assert _flowing(f"{words}\n\n{examples}") == f"{words.replace(chr(10), ' ')}\n\n{examples}"
    for name in ("convert", "bench finetuning"):
        assert not re.search(r"[a-z,]\n[a-z]", commands()[name].help)


def test_doctor_names_every_backend() -> None:
    output = invoke("doctor")
    assert "auto picks it" in output
    assert "[" not in output, "markup is drawn, not shown"
    for backend in BACKENDS:
        assert backend.name in output


def test_doctor_json() -> None:
    found = json.loads(invoke("doctor", "--json"))
    assert found["versions"]["longspan"] == longspan.__version__
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu"
    able = [b["name"] for b in cpu["backends"] if b["refusal"] is None]
    assert cpu["auto"] in able


@pytest.mark.skipif(native.unavailable() is not None, reason="native was not built")
def test_doctor_says_which_instructions_native_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"backward: {native.targets()[0]}" in invoke("doctor")
    monkeypatch.setenv("LONGSPAN_NATIVE_TARGET", "plain")
    assert "backward: plain" in invoke("doctor")
    monkeypatch.setenv("LONGSPAN_NATIVE_TARGET", "mmx")
    output = invoke("doctor")
    assert "LONGSPAN_NATIVE_TARGET='mmx'" in output
    assert "backward:" not in output


def test_doctor_gives_commands_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are longer than their column."""
    monkeypatch.setattr(native, "unavailable", lambda: "run " + "x" * 60)
    lines = [line.split("│") for line in invoke("doctor").splitlines() if "│" in line]
    assert sum(cells[-2].count("x") for cells in lines if len(cells) > 3) >= 60
    assert "…" not in invoke("doctor")


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is looked at by nobody."""
    for benchmark in (attention, led, models):
        settings: Any = benchmark.BENCHMARK.quick_settings
        monkeypatch.setitem(settings, "rounds", 1)


@pytest.mark.usefixtures("_hasty")
def test_quick_bench_writes_points_and_figures(tmp_path: Path) -> None:
    """Really measured, at the shortest length there is."""
    arguments = ("bench", "attention", "--quick", "--device", "cpu", "--lengths", "512")
    output = invoke(*arguments, "--output", str(tmp_path))
    content = json.loads((tmp_path / "attention-cpu.json").read_text())
    assert "failed" not in output
    assert len(content["points"]) == 6  # three contenders, two passes
    assert all(p["ms"] > 0 and p["mib"] > 0 for p in content["points"])
    assert set(content) >= {"machine", "versions", "commit", "date", "settings"}
    for ending in (".png", ".svg"):
        assert (tmp_path / f"attention-cpu{ending}").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.usefixtures("_hasty")
def test_quick_bench_of_models(tmp_path: Path) -> None:
    """Really measured, on one of the quick suite's batches."""
    arguments = ("bench", "models", "--quick", "--device", "cpu", "--lengths", "512")
    output = invoke(*arguments, "--output", str(tmp_path))
    content = json.loads((tmp_path / "models-cpu.json").read_text())
    assert "failed" not in output
    assert "tokens/s" in output
    assert content["benchmark"] == "models"
    assert len(content["points"]) == 10  # five contenders, two passes
    assert all(p["ms"] > 0 and p["mib"] > 0 for p in content["points"])


@pytest.mark.slow
@pytest.mark.usefixtures("_hasty")
def test_quick_bench_of_encoder_decoders(tmp_path: Path) -> None:
    arguments = ("bench", "models", "--model", "led", "--quick", "--device", "cpu")
    output = invoke(*arguments, "--lengths", "512", "--output", str(tmp_path))
    content = json.loads((tmp_path / "led-cpu.json").read_text())
    assert "failed" not in output
    assert content["benchmark"] == "led"
    assert len(content["points"]) == 4  # two contenders, two cases
    assert all(p["ms"] > 0 and p["mib"] > 0 for p in content["points"])


class FakeMeasure:
    """Stands in for the clock: counts points, and can be interrupted before one of them."""

    def __init__(self, stop_before: int | None = None) -> None:
        self.measured: list[tuple[int, str, str]] = []
        self.stop_before = stop_before

    def __call__(self, case: Case, kind: Pass, contenders: list[Contender], settings: Any):
        for contender in contenders:
            name = contender.name
            if len(self.measured) == self.stop_before:
                raise KeyboardInterrupt
            self.measured.append((case.tokens, kind, name))
            yield Point(case, name, kind, ms=1.0 * case.tokens, mib=2.0)


def test_interrupted_bench_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("bench", "attention", "--quick", "--device", "cpu", "--lengths", "512,1024")
    arguments += ("--output", str(tmp_path))
    first = FakeMeasure(stop_before=6)
    monkeypatch.setattr(bench_run, "measure", first)
    assert "interrupted" in invoke(*arguments, code=130)
    assert len(json.loads((tmp_path / "attention-cpu.json").read_text())["points"]) == 6

    second = FakeMeasure()
    monkeypatch.setattr(bench_run, "measure", second)
    assert "6 points measured before, 6 to go" in invoke(*arguments)
    assert len(second.measured) == 6
    assert not set(first.measured) & set(second.measured)

    third = FakeMeasure()
    monkeypatch.setattr(bench_run, "measure", third)
    invoke(*arguments)
    assert third.measured == []
    invoke(*arguments, "--fresh")
    assert len(third.measured) == 12


def test_other_settings_start_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("bench", "attention", "--quick", "--device", "cpu", "--lengths", "512")
    arguments += ("--output", str(tmp_path))
    fake = FakeMeasure()
    monkeypatch.setattr(bench_run, "measure", fake)
    invoke(*arguments)
    output = invoke(*arguments, "--threads", "2")
    assert "starting over" in output
    assert len(fake.measured) == 12


@pytest.mark.parametrize("name", ["attention", "models"])
def test_report_redraws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "measure", FakeMeasure())
    invoke("bench", name, "--quick", "--device", "cpu", "--output", str(tmp_path))
    figure = tmp_path / f"{name}-cpu.svg"
    before = figure.read_bytes()
    figure.unlink()
    output = invoke("bench", "report", str(tmp_path / f"{name}-cpu.json"))
    assert "Targets" in output
    assert "[/]" not in output, "markup is drawn, not shown"
    assert figure.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "100"), "multiples of the window"),
        (("--lengths", "many"), "give numbers"),
        (("--only", "nobody"), "choose from"),
        (("--device", "tpu"), "choose from cpu, cuda"),
        (("--dtype", "int8"), "choose from"),
    ],
)
def test_wrong_options_say_what_is_right(arguments: tuple[str, ...], message: str) -> None:
    output = invoke("bench", "attention", *arguments, code=2)
    assert message in " ".join(output.replace("│", " ").split())


def test_report_of_a_missing_file(tmp_path: Path) -> None:
    output = invoke("bench", "report", str(tmp_path / "none.json"), code=2)
    assert "does not exist" in " ".join(output.replace("│", " ").split())


def test_nothing_to_measure_is_said(tmp_path: Path) -> None:
    output = invoke(
        "bench", "attention", "--quick", "--only", "flex", "--output", str(tmp_path), code=2
    )
    assert "nothing to measure" in output
    assert "longspan-layer" in output


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{}", "it has no 'points'"),
        ("[]", "it has no 'points'"),
        ('{"points": [{"case": {}}]}', "it has no"),
        ("{", "not JSON"),
    ],
)
def test_a_damaged_report_is_named(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "attention-cpu.json"
    path.write_text(content)
    said = invoke("bench", "report", str(path), code=2)
    assert "damaged" in said
    assert why in said
    path.write_bytes(b"\xb9\x00")
    assert "damaged" in invoke("bench", "report", str(path), code=2)
    assert "is a folder" in invoke("bench", "report", str(tmp_path), code=2)


def toy_run(tmp_path: Path, *more: str, code: int = 0) -> str:
    text = tmp_path / "text"
    text.write_bytes(b"one two three four five six seven. " * 100)
    command = ("train", "enwik8-small", "--shrink", "--data", str(text))
    return invoke(*command, "--output", str(tmp_path / "run"), *more, code=code)


def test_train_eval_generate(tmp_path: Path) -> None:
    output = toy_run(tmp_path)
    assert "10 steps" in output
    assert "bits per character" in output
    run = str(tmp_path / "run")
    whole = invoke("eval", run)
    assert "test: " in whole
    assert "document 0: 175 bytes" in invoke("eval", run, "--documents")
    assert "nothing to score" in invoke("eval", run, "--documents", "--limit", "1", code=2)
    assert invoke("eval", run, "--limit", "50") != whole

    options = ("--prompt", "one two ", "--tokens", "20", "--seed", "3")
    written = invoke("generate", run, *options)
    assert written.startswith("one two ")
    assert len(written) > len("one two ")
    assert invoke("generate", run, *options) == written
    checkpoint = next((tmp_path / "run" / "checkpoints").iterdir())
    assert invoke("generate", str(checkpoint), *options) == written
    assert invoke("generate", run, "--temperature", "0", "--tokens", "5")
    cut = invoke("generate", run, *options, "--stop", written[12])
    assert cut.rstrip("\n") == written[: written.index(written[12], len("one two ")) + 1]
    refused = plain(invoke("convert", run, str(tmp_path / "long"), code=2))
    assert "LongspanForCausalLM is a language model of longspan's already" in refused


def test_recipes_are_listed() -> None:
    from longspan.recipes import RECIPES

    output = invoke("recipes")
    for name in RECIPES:
        assert name in output


def test_a_recipe_shows_what_can_be_set() -> None:
    from longspan.recipes import FINETUNING, RECIPES, find_any
    from longspan.train.recipe import change, leaves

    shown = dict(line.split(None, 1) for line in invoke("recipes", "classify").splitlines()[2:])
    assert (shown["epochs"].strip(), shown["model.length"].strip()) == ("5.0", "4096")
    assert shown["data.columns.label"].strip() == "label"
    assert "did you mean classify?" in plain(invoke("recipes", "clasify", code=2))
    for name in (*RECIPES, *FINETUNING):
        recipe = find_any(name)
        assert change(recipe, dict(leaves(recipe.to_dict()))) == recipe


def test_training_mistakes_are_said_before_anything_starts(tmp_path: Path) -> None:
    assert "did you mean tiny?" in invoke("train", "tinny", code=2)
    assert "give --data PATH" in invoke("train", "enwik8-small", code=2)
    assert "did you mean steps?" in toy_run(tmp_path, "--set", "phases.0.step=3", code=2)
    assert "expected int" in toy_run(tmp_path, "--set", "seed=x", code=2)
    assert "no run to resume" in toy_run(tmp_path, "--resume", code=2)
    ignored = toy_run(tmp_path, "--model", "bert", "--several", code=2)
    assert (
        "--model, --several: for finetuning on examples; enwik8-small is a language model"
        in ignored
    )
    assert not (tmp_path / "run").exists()
    toy_run(tmp_path)
    assert "holds a run already" in toy_run(tmp_path, code=2)
    assert "no recipe.json" in invoke("eval", str(tmp_path), code=2)
    assert "choose from best, last" in invoke(
        "generate", str(tmp_path / "run"), "--checkpoint", "first", code=2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train classify --epochs 1", "--epochs; did you mean --set epochs=1?"),
        ("train classify --seed=3", "--seed; did you mean --set seed=3?"),
        ("train books --batch 4", "--batch; did you mean --set phases.0.batch=4?"),
        ("train cuad --window --resume", "--window; did you mean --set model.window=...?"),
        ("train cuad --checkpointing", "did you mean --set checkpointing=true?"),
        ("train tiny --betas 0.9", "did you mean --set 'optimizer.betas=[...]'?"),
        ("train cuad --model.length 64", "did you mean --set model.length=64?"),
        ("train imdb --num-train-epochs 2", "did you mean --set epochs=2?"),
        ("train imdb --outptu x", "No such option: --outptu (Possible options: --output)"),
        ("train tinny --epochs 1", "No such option: --epochs"),
        ("compare --learning-rate 1e-4", "did you mean --set learning_rate=1e-4?"),
        ("compare --task spans --longest 9", "did you mean --set answers.longest=9?"),
        ("compare --max-length 9", "--set model.length=9? (Possible options: --length)"),
        ("study rivals --lr 1e-3", "did you mean --set phases.0.learning_rate=1e-3?"),
        ("study positions --steps 3", "did you mean --set updates=3?"),
        ("study summaries --beams 3", "did you mean --set writing.beams=3?"),
    ],
)
def test_settings_given_as_options_are_recognised(arguments: str, message: str) -> None:
    assert message in invoke(*arguments.split(), code=2)


def test_output_must_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in invoke("bench", "attention", "--quick", "--output", str(file), code=2)


def test_finetuning_predicting_and_their_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.finetuned import labelled
    from tasks.tiny import tiny_checkpoint

    from longspan.tasks import predict

    data, source = labelled(tmp_path / "animals.csv"), tiny_checkpoint(tmp_path / "source")
    run = str(tmp_path / "run")
    command = ("train", "classify", "--data", str(data), "--text", "body", "--output", run)
    toy = ("--shrink", "--set", "model.length=24")
    whole = (*command, *toy, "--model", str(source), "--label", "animal")
    assert "give --model" in invoke(*command, *toy, code=2)
    assert "there is no column 'label'" in plain(
        invoke(*command, *toy, "--model", str(source), code=2)
    )
    assert "choose from refuse, split, head" in plain(invoke(*whole, "--too-long", "cut", code=2))
    assert "--choices: classify reads no such column; there are --text, --label, --id" in plain(
        invoke(*whole, "--choices", "x", code=2)
    )
    assert "data.columns.lable is unknown; did you mean label?" in plain(
        invoke(*whole, "--set", "data.columns.lable=animal", code=2)
    )
    assert not Path(run).exists()
    output = invoke(*whole)
    assert "labels: cat, dog" in output
    assert "test (step-00000002): accuracy" in output
    assert "4 rows in" in plain(invoke("predict", run, str(labelled(tmp_path / "new.csv", 4))))
    lines = (tmp_path / "run" / "predictions" / "new.jsonl").read_text().splitlines()
    assert {json.loads(line)["label"] for line in lines} <= {"cat", "dog"}
    assert "exists already" in plain(invoke("predict", run, str(tmp_path / "new.csv"), code=2))
    assert "4 rows in" in plain(invoke("predict", run, str(tmp_path / "new.csv"), "--resume"))
    assert "choose from best, last" in invoke("predict", run, "x", "--checkpoint", "1", code=2)

    (tmp_path / "other.csv").write_text("key,review\na,the cat\nb,a dog\n")
    other = ("predict", run, str(tmp_path / "other.csv"))
    assert "2 rows in" in plain(invoke(*other, "--text", "review", "--id", "key"))
    lines = (tmp_path / "run" / "predictions" / "other.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]
    with monkeypatch.context() as patch:  # what is wrong is said before the model is loaded
        patch.setattr(predict, "load_model", None)
        for given, wrong in (
            ((), "line 2: there is no column 'body'; there are 'key', 'review': --text names"),
            (("--text", "revue"), "there is no column 'revue'; there are"),
            (("--text", "review", "--id", "name"), "there is no column 'name'; there are"),
            (("--question", "key"), "--question: classify reads no such column; there are --text"),
            (("--conll", "x"), "finds no clusters, its task is classify"),
        ):
            assert wrong in plain(invoke(*other, *given, code=2))

    model = str(tmp_path / "model")
    assert "24 -> 48 positions" in invoke("convert", run, model, "--max-length", "48")
    assert sorted(path.name for path in Path(model).iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert "its windows stay as they are" in plain(
        invoke("convert", run, str(tmp_path / "other"), "--window", "8", code=2)
    )

    many = (*command[:-1], str(tmp_path / "runs"), *whole[len(command) :], "--seeds", "2")
    assert "test, 2 seeds: accuracy" in invoke(*many)
    assert "seed-0, seed-1" in plain(invoke("predict", str(tmp_path / "runs"), "x", code=2))
    refused = invoke("convert", str(tmp_path / "runs"), str(tmp_path / "other"), code=2)
    assert "seed-1/checkpoints/step-00000002" in "".join(plain(refused).split())


def test_choosing_and_reasoning(tmp_path: Path) -> None:
    from tasks.finetuned import hopping, offered
    from tasks.tiny import tiny_checkpoint

    source, run = tiny_checkpoint(tmp_path / "source"), str(tmp_path / "run")
    lines = offered(tmp_path / "own.jsonl", 12).read_text().splitlines()
    data = tmp_path / "own.csv"
    with data.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["passage", "asked", "offer", "right"])
        for row in map(json.loads, lines):
            table.writerow([row["text"], row["question"], "|".join(row["choices"]), row["answer"]])
    command = ["train", "choice", "--data", str(data), "--model", str(source), "--shrink"]
    assert "there is no column 'question'" in plain(invoke(*command, code=2))
    command += ["--text", "passage", "--question", "asked", "--choices", "offer"]
    command += ["--answers", "right", "--set", "data.separator=|", "--set", "model.length=24"]
    output = plain(invoke(*command, "--output", run))
    assert "; 2 choices each" in output
    assert "are read in part only" in output
    assert "test (step-00000002): accuracy" in output
    assert "12 rows in" in plain(invoke("predict", run, str(data)))

    hops = str(hopping(tmp_path / "hops.jsonl", 12))
    run = str(tmp_path / "hops")
    command = ["train", "multihop", "--data", hops, "--model", str(source), "--shrink"]
    command += ["--set", "hops.stages=2", "--set", "model.length=80", "--output", run]
    output = plain(invoke(*command))
    assert "the first stage, into" in output
    assert "test (step-00000002): joint_f1" in output
    assert "12 rows in" in plain(invoke("predict", run, hops))
    made = (tmp_path / "hops" / "predictions" / "hops.jsonl").read_text().splitlines()
    assert {one["title"] for one in json.loads(made[0])["evidence"]}


def test_every_column_can_be_named(tmp_path: Path) -> None:
    from tasks.finetuned import hopping, told
    from tasks.tiny import tiny_checkpoint

    source = str(tiny_checkpoint(tmp_path / "source"))
    for name, write, columns in (
        ("multihop", hopping, "text question answer:answers evidence"),
        ("coref", told, "sentences clusters"),
    ):
        path = write(tmp_path / f"{name}.jsonl")
        renamed, options = path.read_text(), []
        for column in columns.split():
            old, option = (column.split(":") * 2)[:2]
            renamed = renamed.replace(f'"{old}":', f'"my {old}":')
            options += [f"--{option}", f"my {old}"]
        path.write_text(renamed)
        command = ("train", name, "--data", str(path), "--model", source, "--shrink")
        run = ("--set", "model.length=32", "--output", str(tmp_path / name))
        assert f"wrote {tmp_path / name}" in plain(invoke(*command, *run, *options))


def test_pretraining_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    """A head first, then the whole; then the run is a start like any other, and fills masks."""
    from tasks.finetuned import documents
    from tasks.tiny import tiny_checkpoint

    data = documents(tmp_path / "documents.jsonl")
    source = str(tiny_checkpoint(tmp_path / "source"))
    toy = ("--data", str(data), "--shrink", "--set", "model.length=48")
    first, then = str(tmp_path / "head"), str(tmp_path / "run")
    command = ("train", "mlm", *toy, "--output", then, "--model")
    assert "has no head that scores words: `longspan train mlm-head`" in invoke(
        *command, source, code=2
    )
    assert not Path(then).exists()
    invoke("train", "mlm-head", *toy, "--model", source, "--output", first)
    output = plain(invoke(*command, first))
    assert "reach beyond a row and go on in the next" in output
    assert "valid (step-00000002): bits_per_character" in output
    (tmp_path / "new.csv").write_text("text\nthe a [MASK] was\n")
    assert "1 row in" in plain(invoke("predict", then, str(tmp_path / "new.csv")))


def plain(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def test_embedding_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.tiny import tiny_checkpoint

    monkeypatch.chdir(tmp_path)
    source, table = str(tiny_checkpoint(tmp_path / "tiny")), tmp_path / "texts.csv"
    table.write_text('body\n"The cat sleeps."\n""\n')
    command = ["embed", source, str(table), "--text", "body", "--length", "64"]
    assert "2 rows in texts.embeddings.jsonl, 1 skipped" in plain(invoke(*command))
    lines = (tmp_path / "texts.embeddings.jsonl").read_text().splitlines()
    assert len(json.loads(lines[0])["vector"]) == len(json.loads(lines[0])["passages"][0]["vector"])
    assert "exists already" in plain(invoke(*command, code=2))
    assert "2 rows in" in plain(invoke(*command, "--resume"))
    other = ["--spans", "sentences", "--output", "other.jsonl"]
    assert "no column 'sentences'" in plain(invoke(*command, *other, code=2))


def test_comparing(tmp_path: Path) -> None:
    from tasks.finetuned import labelled
    from tasks.tiny import tiny_checkpoint

    data, source = labelled(tmp_path / "animals.csv"), tiny_checkpoint(tmp_path / "source")
    command = ["compare", "--data", str(data), "--model", str(source), "--output", str(tmp_path)]
    assert "choose from classify, spans, choice" in invoke(*command, "--task", "guess", code=2)
    command += ["--text", "body", "--label", "animal", "--length", "64", "--short", "16"]
    assert "short=64" in plain(invoke(*command, "--short", "64", code=2))
    for value in ("epochs=0.1", "precision=no", "data.limit=20", "evaluation.every=0"):
        command += ["--set", value]
    output = plain(invoke(*command))
    for name in ("first tokens", "chunk and pool", "long, window only", "macro f1"):
        assert name in output
    assert "of the test examples have more than 16 tokens" in output


def test_comparing_choices(tmp_path: Path) -> None:
    from tasks.finetuned import offered
    from tasks.tiny import tiny_checkpoint

    data, source = offered(tmp_path / "a.jsonl", 20), tiny_checkpoint(tmp_path / "source")
    command = ["compare", "--task", "choice", "--data", str(data), "--model", str(source)]
    command += ["--output", str(tmp_path), "--length", "64", "--short", "20"]
    for value in ("epochs=0.1", "precision=no", "evaluation.every=0"):
        command += ["--set", value]
    output = plain(invoke(*command))
    assert "accuracy" in output
    assert "100% of the test examples have more than 20 tokens" in output
    assert (tmp_path / "compare.json").exists()
    assert (tmp_path / "compare.svg").exists()
