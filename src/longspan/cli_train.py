"""The commands of language models: recipes, train, eval, generate."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longspan import cli_tasks
from longspan.cli_settings import SettingCommand

commands = typer.Typer()


@commands.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="One of them, with its settings.")] = None,
) -> None:
    """List the recipes that [bold]longspan train[/] knows, or what can be set in one of them.

    [bold]longspan recipes classify[/] shows all that --set changes, and what it is otherwise.
    """
    from json import dumps

    from rich.table import Table
    from rich.text import Text

    from longspan.recipes import FINETUNING, RECIPES, find_any, summary
    from longspan.train.finetuning import COLUMNS, Finetuning
    from longspan.train.recipe import leaves

    if name is None:
        table = Table("recipe", "what it is", box=None, pad_edge=False)
        for one in (*RECIPES, *FINETUNING):
            table.add_row(one, summary(one))
    else:
        try:
            recipe = find_any(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        console_for_logs().print(summary(name), highlight=False)
        table = Table("setting", "value", box=None, pad_edge=False)
        values = recipe.to_dict()
        if isinstance(recipe, Finetuning):
            values["data"]["columns"] = COLUMNS[recipe.task] | recipe.data.columns
        for key, value in leaves(values):
            # As --set takes it.
            table.add_row(key, Text(value if isinstance(value, str) else dumps(value)))
    console_for_logs().print(table)


@commands.command(cls=SettingCommand)
def train(
    recipe: Annotated[str, typer.Argument(help="A name from [bold]longspan recipes[/].")],
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="key=value, e.g. phases.0.steps=100; may be repeated. "
            "[bold]longspan recipes RECIPE[/] shows what there is.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text: a file, or a folder of documents. Examples: CSV, TSV, JSON lines, Parquet, "
            "or hub:NAME."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The run's folder; runs/RECIPE by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in that folder.")
    ] = False,
    small: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="Toy size, two steps per phase; the beginnings of a few examples, by the --model "
            "as it is: does it run here?",
        ),
    ] = False,
    model: cli_tasks.Model = None,
    valid: cli_tasks.Valid = None,
    test: cli_tasks.Test = None,
    text: cli_tasks.Text = None,
    label: cli_tasks.Label = None,
    question: cli_tasks.Question = None,
    answers: cli_tasks.Answers = None,
    choices: cli_tasks.Choices = None,
    evidence: cli_tasks.Evidence = None,
    sentences: cli_tasks.Sentences = None,
    clusters: cli_tasks.Clusters = None,
    speakers: cli_tasks.Speakers = None,
    id: cli_tasks.Id = None,
    several: cli_tasks.Several = False,
    too_long: cli_tasks.TooLong = None,
    seeds: cli_tasks.Seeds = 1,
) -> None:
    """Train a language model, or finetune a pretrained model on examples.

    Stop it at any time; [bold]--resume[/] goes on from the last checkpoint, to the same losses.
    Columns of examples are called text, label and so on, or as in the data that a recipe is for,
    unless you name yours.

    [bold]longspan train tiny[/] takes two minutes on a CPU and needs no data.
    [bold]longspan train classify --data reviews.csv --text body --label stars --model NAME[/]
    Several GPUs: [bold]accelerate launch -m longspan train RECIPE ...[/]
    """
    from os import environ

    from torch import device
    from transformers.utils import logging

    from longspan.recipes import FINETUNING, find
    from longspan.recipes.shrink import shrink
    from longspan.tasks.charlm import CharLM
    from longspan.train.loop import train as carry_out
    from longspan.train.recipe import change, parse

    logging.disable_progress_bar()
    main = environ.get("RANK", "0") == "0"  # of several processes, one speaks
    console = console_for_logs() if main else Console(quiet=True)
    run = output or Path("runs") / recipe
    try:
        settings = parse(setting or [])
        columns = {"text": text, "label": label, "question": question, "answers": answers}
        columns |= {"choices": choices, "evidence": evidence, "sentences": sentences}
        columns |= {"clusters": clusters, "speakers": speakers, "id": id}
        if recipe in FINETUNING:
            cli_tasks.finetune(
                recipe,
                settings,
                data=data,
                run=run,
                resume=resume,
                small=small,
                seeds=seeds,
                console=console,
                columns=columns,
                model=model,
                valid=valid,
                test=test,
                several=several,
                too_long=too_long,
            )
            console.print(f"wrote {run}; next: longspan predict {run} FILE", soft_wrap=True)
            return
        if data is not None:
            settings["data.path"] = str(data)
        chosen = find(recipe)
        for_examples = {
            **{"--model": model, "--valid": valid, "--test": test},
            **{f"--{name}": column for name, column in columns.items()},
            **{"--several": several, "--too-long": too_long, "--seeds": seeds > 1},
        }
        given = [name for name, value in for_examples.items() if value]
        if given:
            raise ValueError(
                f"{', '.join(given)}: for finetuning on examples; {recipe} is a language model"
            )
        chosen = change(shrink(chosen) if small else chosen, settings)
        task = CharLM(chosen)
        with device("meta"):
            size = task.build().num_parameters()
        extent = f"{chosen.minutes:g} minutes" if chosen.minutes else f"{chosen.steps:,} steps"
        console.print(
            f"{chosen.name}: {size / 1e6:.1f}M parameters, {len(task.corpus.train):,} bytes to "
            f"train on, {extent}, into {run}",
            soft_wrap=True,
            highlight=False,
        )
        carry_out(chosen, task, run, resume=resume, console=console)
    except (ValueError, OSError, FloatingPointError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        saved = f"goes on from what {run} has saved"
        if not any(run.rglob("model.safetensors")):
            saved = "begins again: nothing was saved yet"
        console.print(f"stopped; with --resume the same command {saved}", soft_wrap=True)
        raise typer.Exit(130) from None
    console.print(f"wrote {run}; next: longspan eval {run}, longspan generate {run}")


@commands.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    split: Annotated[str, typer.Option(help="valid, test or train.")] = "test",
    data: Annotated[Path | None, typer.Option(help="The text, if it has moved.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, e.g. evaluation.length=4096; may be repeated."),
    ] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="Each document by itself, with nothing before it.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Bytes to score; 0 = all.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
) -> None:
    """Bits per character of a language model's run, each byte with much before it.

    Measured as its recipe says. [bold]longspan eval runs/books --split valid --limit 100000[/]
    """
    from torch import autocast, bfloat16
    from transformers.utils import logging

    from longspan.tasks.charlm import CharLM, by_document
    from longspan.tasks.runs import load_model, open_run
    from longspan.train.recipe import change, parse

    logging.disable_progress_bar()
    _check_choice("--split", split, ["valid", "test", "train"])
    _check_choice("--checkpoint", checkpoint, ["best", "last"])
    console = console_for_logs()
    try:
        _, recipe, folder = open_run(run, checkpoint)
        settings = parse(setting or [])
        if data is not None:
            settings["data.path"] = str(data)
        recipe = change(recipe, settings)
        task = CharLM(recipe)
        model = load_model(folder)
        half = autocast(model.device.type, bfloat16, enabled=recipe.precision == "bf16")
        with console.status(f"reading {split} ..."), half:
            if documents:
                text = getattr(task.corpus, split)[: limit or None]
                found = by_document(model, text, recipe.evaluation)
                scored = sum(size - 1 for size, _ in found)  # a document's first byte is given
                if not scored:
                    raise ValueError(f"{len(text)} bytes of {split} hold nothing to score")
                value = sum((size - 1) * value for size, value in found) / scored
            else:
                found = []
                value = task.evaluate(model, split, limit)["bits_per_character"]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    for number, (size, own) in enumerate(found):
        console.print(
            f"document {number}: {size:,} bytes, {own:.4f} bits per character", highlight=False
        )
    console.print(f"{folder.name}, {split}: {value:.4f} bits per character", highlight=False)


@commands.command()
def generate(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run's folder, or one with a model; the packaged one by default."),
    ] = None,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Bytes to write at most.")] = 500,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest byte every time.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Only among the k likeliest; all by default.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="Only among the likeliest that reach this probability.")
    ] = 0.95,
    seed: Annotated[
        int | None, typer.Option(help="The same seed writes the same text; any by default.")
    ] = None,
    stop: Annotated[str, typer.Option(help="End behind this text; at the limit by default.")] = "",
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
) -> None:
    """Write on from a prompt, by a language model; the text appears as it is made.

    [bold]longspan generate --prompt "It was"[/] takes a model of novels that came along;
    [bold]longspan generate runs/tiny --prompt "def "[/] takes a run's.
    """
    from transformers.utils import logging

    from longspan.models.sampling import Sampler
    from longspan.tasks.package import packaged_model
    from longspan.tasks.runs import load_model, open_run
    from longspan.tasks.writing import write

    logging.disable_progress_bar()
    _check_choice("--checkpoint", checkpoint, ["best", "last"])
    try:
        if run is None:
            folder = packaged_model()
        elif (run / "config.json").exists():
            folder = run
        else:
            folder = open_run(run, checkpoint).checkpoint
        model = load_model(folder)
        sampler = Sampler(temperature, top_k, top_p, seed)
        typer.echo(prompt, nl=False)
        for piece in write(model, prompt, tokens, sampler, stop):
            typer.echo(piece, nl=False)
    except BrokenPipeError:
        raise typer.Exit from None  # who reads it has had enough
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        pass
    typer.echo()


@commands.command()
def package(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    output: Annotated[
        Path | None,
        typer.Option(help="A folder; by default the place where `longspan generate` looks."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The text, if it has moved.")] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Bytes of valid and test to score for the card; 0 = all.")
    ] = 0,
) -> None:
    """Make a language model's best checkpoint small enough to be carried along, with a card.

    Weights are written in bfloat16, and at most 12 MB of them. The card says how the model was
    made and what it scores, measured of the weights that were written.

    [bold]longspan package runs/books-small --limit 100000[/]
    """
    from transformers.utils import logging

    from longspan.tasks.package import PLACE, package_run

    logging.disable_progress_bar()
    console = console_for_logs()
    folder = output or PLACE
    try:
        with console.status("measuring what is written ..."):
            card = package_run(run, folder, data, limit)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(card, markup=False, highlight=False)
    console.print(f"wrote {folder}", soft_wrap=True, highlight=False)


def console_for_logs() -> Console:
    """The terminal; or, for logs and files, a page wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _check_choice(option: str, given: str, allowed: list[str]) -> None:
    if given not in allowed:
        raise typer.BadParameter(f"{option} {given}: choose from {', '.join(allowed)}")
