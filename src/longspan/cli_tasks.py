"""The commands of tasks on examples: what `train` finetunes, predict, embed and compare."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console

from longspan.cli_settings import SettingCommand

commands = typer.Typer()

_PANEL = "Finetuning on examples"


def _column(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Columns, if not those of training")


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL, **more)


Model = Annotated[
    str | None, _option("What to start from: a folder, a run's folder, or a name on the hub.")
]
Valid = Annotated[str | None, _option("Validation examples; by default taken from the data.")]
Test = Annotated[str | None, _option("Test examples; by default taken from the data.")]
Text = Annotated[str | None, _option("The column of the text.")]
Label = Annotated[str | None, _option("The column of the label.")]
Question = Annotated[str | None, _option("The column of the question.")]
Answers = Annotated[str | None, _option("The column of the answers, or of the summaries.")]
Choices = Annotated[str | None, _option("The column of the answers to choose from.")]
Evidence = Annotated[str | None, _option("The column of the evidence, for several hops.")]
Sentences = Annotated[str | None, _option("The column of the words, for coreference.")]
Clusters = Annotated[str | None, _option("The column of the clusters of words.")]
Speakers = Annotated[str | None, _option("The column of who says the words.")]
Id = Annotated[str | None, _option("The column of the id, if there is one.", "--id")]
Several = Annotated[bool, _option("An example may have several labels, or none.", "--several")]
TooLong = Annotated[
    str | None,
    _option(
        "Documents beyond the model: refuse them, split them, or read their head; refuse unless "
        "the recipe says otherwise."
    ),
]
Seeds = Annotated[int, _option("Runs, each with another seed; mean and deviation.", min=1)]


def named_columns(task: str, **given: str | None) -> dict[str, str]:
    """The columns that options name; an error for one of something that the task does not read."""
    from longspan.train.finetuning import COLUMNS

    found = {name: column for name, column in given.items() if column is not None}
    for name in found:
        if name not in COLUMNS[task]:
            known = ", ".join(f"--{one}" for one in given if one in COLUMNS[task])
            raise ValueError(f"--{name}: {task} reads no such column; there are {known}")
    return found


def finetune(
    name: str,
    settings: dict[str, Any],
    *,
    data: Path | None,
    run: Path,
    resume: bool,
    small: bool,
    seeds: int,
    console: Console,
    columns: dict[str, str | None],
    **given: Any,
) -> None:
    """Carry out a finetuning recipe with what the command line says of it."""
    from longspan.recipes import FINETUNING
    from longspan.recipes.shrink import shrink_finetuning
    from longspan.tasks.finetune import finetune as carry_out
    from longspan.tasks.finetune import finetune_seeds, make_task
    from longspan.train import checkpoint
    from longspan.train.recipe import change

    asked = {
        "data.train": None if data is None else str(data),
        "data.valid": given["valid"],
        "data.test": given["test"],
        "model.source": given["model"],
        "too_long": given["too_long"],
        "data.several": given["several"] or None,
    }
    recipe = FINETUNING[name]()
    recipe = shrink_finetuning(recipe) if small else recipe
    for own, column in named_columns(recipe.task, **columns).items():
        asked[f"data.columns.{own}"] = column
    chosen = {key: value for key, value in asked.items() if value is not None}
    recipe = change(recipe, chosen | settings)
    folders = [run]
    if seeds > 1:
        folders = [run / f"seed-{seed}" for seed in range(recipe.seed, recipe.seed + seeds)]
    for folder in folders:
        if not resume:
            checkpoint.refuse_run(folder)  # `train` would say so once all is read
    if seeds > 1:
        found = finetune_seeds(make_task(recipe), run, seeds, resume=resume, console=console)
        _show_spread(found, console)
    else:
        _show(carry_out(make_task(recipe), run, resume=resume, console=console), console)


def count_rows(console: Console, status: Any) -> Callable[[int], None]:
    """Shows how many rows are done: in a terminal's status line, if there is one, or as a line of
    its own every half minute where nobody looks on."""
    told = monotonic()

    def tell(done: int) -> None:
        nonlocal told
        if console.is_terminal:
            if status is not None:
                status.update(f"{done:,} rows")
        elif monotonic() - told >= 30:
            told = monotonic()
            console.print(f"{done:,} rows", highlight=False)

    return tell


def _show(results: dict[str, Any], console: Console) -> None:
    for split in ("valid", "test"):
        shown = ", ".join(f"{name} {value:.4f}" for name, value in results[split].items())
        console.print(f"{split} ({results['checkpoint']}): {shown}", highlight=False)


def _show_spread(found: dict[str, Any], console: Console) -> None:
    for split in ("valid", "test"):
        shown = ", ".join(
            f"{name} {own['mean']:.4f} ± {own['deviation']:.4f}"
            for name, own in found[split].items()
        )
        console.print(f"{split}, {len(found['seeds'])} seeds: {shown}", highlight=False)


@commands.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    file: Annotated[
        str,
        typer.Argument(help="The rows to predict; columns as in training, unless you name yours."),
    ],
    output: Annotated[
        Path | None, typer.Option(help="JSON lines; RUN/predictions/FILE.jsonl by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an output that was cut short.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    too_long: Annotated[
        str | None, typer.Option(help="refuse, split or head; as the run has it by default.")
    ] = None,
    conll: Annotated[
        Path | None, typer.Option(help="The clusters of a coreference run as CoNLL-2012, too.")
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Show summaries word by word, as they are written; no beams."
        ),
    ] = False,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
    text: Annotated[str | None, _column("The column of the text.")] = None,
    question: Annotated[str | None, _column("The column of the question.")] = None,
    choices: Annotated[str | None, _column("The column of the answers to choose from.")] = None,
    sentences: Annotated[str | None, _column("The column of the words, for coreference.")] = None,
    speakers: Annotated[str | None, _column("The column of who says them.")] = None,
    id: Annotated[str | None, _column("The column of the id, if there is one.", "--id")] = None,
) -> None:
    """Predict every row of a table, in its order, as JSON lines; a killed one can be resumed.

    By a run of [bold]longspan train[/] on examples. The file may be whatever it takes as --data.

    [bold]longspan predict runs/stars new.csv[/]
    [bold]longspan predict runs/stars others.jsonl --text review[/]
    [bold]longspan predict runs/papers new.jsonl --stream[/]
    """
    from transformers.utils import logging

    from longspan.tasks.lines import name_of, remarks
    from longspan.tasks.predict import (
        Pipeline,
        check_file,
        find_run,
        predict_file,
        rename,
        write_clusters,
    )

    logging.disable_progress_bar()
    console = Console()
    for option, value, allowed in (
        ("--checkpoint", checkpoint, ("best", "last")),
        ("--too-long", too_long, (None, "refuse", "split", "head")),
    ):
        if value not in allowed:
            known = ", ".join(name for name in allowed if name)
            raise typer.BadParameter(f"{option} {value}: choose from {known}")
    target = output or run / "predictions" / f"{name_of(file)}.jsonl"
    policy: Any = too_long
    columns = {"text": text, "question": question, "choices": choices}
    columns |= {"sentences": sentences, "speakers": speakers, "id": id}
    try:
        recipe, _ = find_run(run, checkpoint)
        if conll is not None and recipe.task != "coref":
            raise ValueError(f"--conll: {run} finds no clusters, its task is {recipe.task}")
        named = named_columns(recipe.task, **columns)
        check_file(rename(recipe, named), file, named)
        use = Pipeline(run, which=checkpoint, too_long=policy, columns=named)
        with nullcontext() if stream else console.status("predicting ...") as status:
            tell = count_rows(console, status)
            count = predict_file(
                use,
                file,
                target,
                resume=resume,
                batch=1 if stream else batch,
                progress=tell,
                say=(lambda text: typer.echo(text, nl=False)) if stream else None,
            )
        if conll is not None:
            write_clusters(use, file, target, conll)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        console.print(f"stopped; the same command with --resume goes on with {target}")
        raise typer.Exit(130) from None
    said = ", ".join([f"{count:,} row{'s' * (count != 1)} in {target}", *remarks(target)])
    console.print(said, highlight=False, soft_wrap=True)


@commands.command()
def embed(
    model: Annotated[
        str, typer.Argument(help="An encoder of sentences: a folder, or a hub name; made long.")
    ],
    file: Annotated[str, typer.Argument(help="The texts: whatever predict takes.")],
    output: Annotated[
        Path | None, typer.Option(help="JSON lines; FILE.embeddings.jsonl here by default.")
    ] = None,
    text: Annotated[str, typer.Option(help="The column of the text.")] = "text",
    spans: Annotated[
        str,
        typer.Option(
            help="Passages to embed, besides the whole text: its paragraphs, none (document), or "
            "those in the column of this name, each as \\[start, end] in characters."
        ),
    ] = "paragraphs",
    id: Annotated[str, typer.Option("--id", help="The column of the id, if there is one.")] = "id",
    length: Annotated[
        int, typer.Option(min=16, help="Tokens to read at once; the rest in further passes.")
    ] = 4096,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an output that was cut short.")
    ] = False,
) -> None:
    """Embed every text of a table, and its passages in the context of the whole, as JSON lines.

    Each line has the text's vector and, with the characters they stand at, those of its passages,
    all of unit length: the mean of their tokens' states after the whole text was read (late
    chunking). A text of more than --length tokens is read in overlapping passes; none is cut.

    [bold]longspan embed sentence-transformers/all-MiniLM-L6-v2 articles.jsonl[/]
    [bold]longspan embed runs/long articles.csv --text body --spans sentences --length 16384[/]
    """
    from transformers.utils import logging

    from longspan.tasks.embedder import Embedder
    from longspan.tasks.lines import name_of, remarks, write_lines

    logging.disable_progress_bar()
    console = Console()
    target = output or Path(f"{name_of(file)}.embeddings.jsonl")
    try:
        use = Embedder(model, length=length, text=text, spans=spans)
        with console.status("embedding ...") as status:
            tell = count_rows(console, status)
            count = write_lines(
                file,
                target,
                use.rows,
                id_column=id,
                resume=resume,
                batch=1,
                progress=tell,
            )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        console.print(f"stopped; the same command with --resume goes on with {target}")
        raise typer.Exit(130) from None
    said = ", ".join([f"{count:,} row{'s' * (count != 1)} in {target}", *remarks(target)])
    console.print(said, highlight=False, soft_wrap=True)


@commands.command(cls=SettingCommand)
def compare(
    data: Annotated[Path, typer.Option(help="The examples: CSV, TSV, JSON lines or Parquet.")],
    model: Annotated[str, typer.Option(help="What to start from: a folder, or a hub name.")],
    task: Annotated[str, typer.Option(help="classify, spans or choice.")] = "classify",
    valid: Valid = None,
    test: Test = None,
    text: Text = None,
    label: Label = None,
    question: Question = None,
    answers: Answers = None,
    choices: Choices = None,
    id: Id = None,
    several: Several = False,
    length: Annotated[int, typer.Option(min=32, help="Tokens that count as long.")] = 4096,
    short: Annotated[int, typer.Option(min=16, help="Tokens that count as short.")] = 512,
    seeds: Seeds = 1,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value of the recipe, e.g. epochs=5; may be repeated."),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="A folder; what is in it already is not done again.")
    ] = Path("runs/compare"),
) -> None:
    """Does this data need long context?

    Finetunes one checkpoint with the same examples in four ways (first tokens only, chunk and pool,
    long with windows only, long with global tokens) and says which to take.

    [bold]longspan compare --data reviews.csv --text body --label stars --model roberta-base[/]
    """
    from transformers.utils import logging

    from longspan.analyze.comparison import draw, table
    from longspan.recipes import FINETUNING
    from longspan.tasks.compare import compare as carry_out
    from longspan.train.recipe import change, parse

    logging.disable_progress_bar()
    if task not in ("classify", "spans", "choice"):
        raise typer.BadParameter(f"--task {task}: choose from classify, spans, choice")
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    columns = {"text": text, "label": label, "question": question, "answers": answers}
    columns |= {"choices": choices, "id": id}
    asked = {
        "data.train": str(data),
        "data.valid": valid,
        "data.test": test,
        "data.several": several or None,
        "model.source": model,
        "model.length": length,
        "too_long": "split",
    }
    chosen = {key: value for key, value in asked.items() if value is not None}
    try:
        for own, column in named_columns(task, **columns).items():
            chosen[f"data.columns.{own}"] = column
        recipe = change(FINETUNING[task](), chosen | parse(setting or []))
        result = carry_out(recipe, output, short=short, seeds=seeds, console=console)
    except (ValueError, OSError, FloatingPointError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on with {output}")
        raise typer.Exit(130) from None
    written = draw(result, output / "compare")
    console.print(table(result))
    console.print(result.advice, highlight=False)
    console.print(f"wrote {output / 'compare.json'}, {written[0]}", highlight=False, soft_wrap=True)
