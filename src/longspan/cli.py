"""The `longspan` command. Everything slow is imported by the command that needs it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import longspan

if TYPE_CHECKING:
    from longspan.models import LongspanForCausalLM
    from longspan.train.recipe import Recipe

app = typer.Typer(
    name="longspan",
    help="Transformers that read whole documents.\n\n"
    "Start with [bold]longspan doctor[/]: it says what can run here. "
    "Then [bold]longspan bench attention --quick[/] measures it.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
)
bench_app = typer.Typer(
    help="Measure time and memory; tables, targets and figures come with it.",
    rich_markup_mode="rich",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"longspan {longspan.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print plain JSON, for scripts.")] = False,
) -> None:
    """Say what is installed, which devices there are and which backends can run on each.

    A backend that cannot run gives its reason. "auto" marks the one that
    [bold]window_attention(..., backend="auto")[/] takes.
    """
    from longspan.doctor import examine, show

    findings = examine()
    if json:
        from json import dumps

        typer.echo(dumps(findings, indent=2))
    else:
        show(findings, Console())


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="A folder, or the name of a model on the Hugging Face hub.")
    ],
    destination: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Positions of the result; 8 times the trained ones by default."),
    ] = None,
    window: Annotated[
        int, typer.Option(min=2, help="Tokens each token sees around it, half on each side.")
    ] = 512,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help="A text file to compare the two models on, as well."
        ),
    ] = None,
) -> None:
    """Make a pretrained encoder long: BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, ELECTRA.

    A Longformer comes over as it is. Weights, head, labels and tokenizer are kept, learned
    positions are repeated. The report says how far the outputs of the two models are apart on
    input that fits the window; there they should be equal but for rounding.

    [bold]longspan convert roberta-base roberta-long --max-length 4096[/]
    """
    from transformers.utils import logging

    from longspan.hub.checkpoint import convert_checkpoint
    from longspan.hub.report import show

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what is missing or left over is reported by us
    console = _console()
    try:
        texts = [path.read_text(encoding="utf8") for path in text or []]
        with console.status(f"converting {source} ..."):
            made = convert_checkpoint(
                source, destination, max_length=max_length, window=window, texts=texts
            )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    show(made, console)
    console.print(f"wrote {destination}", soft_wrap=True, highlight=False)


@app.command()
def recipes() -> None:
    """List the recipes that [bold]longspan train[/] knows."""
    from rich.table import Table

    from longspan.recipes import RECIPES, summary

    table = Table("recipe", "what it is", box=None, pad_edge=False)
    for name in RECIPES:
        table.add_row(name, summary(name))
    _console().print(table)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A name from [bold]longspan recipes[/].")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, e.g. phases.0.steps=100; may be repeated."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The text: a file, or a folder of documents.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The run's folder; runs/RECIPE by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in that folder.")
    ] = False,
    small: Annotated[
        bool, typer.Option("--shrink", help="Toy size, two steps per phase: does it run here?")
    ] = False,
) -> None:
    """Train a language model. Stop it at any time; [bold]--resume[/] goes on where it was.

    [bold]longspan train tiny[/] takes two minutes on a CPU and needs no data. Several GPUs:
    [bold]accelerate launch -m longspan.cli train RECIPE ...[/]
    """
    from os import environ

    from transformers.utils import logging

    from longspan.recipes import find
    from longspan.recipes.shrink import shrink
    from longspan.tasks.charlm import CharLM
    from longspan.train.loop import train as carry_out
    from longspan.train.recipe import change, parse

    logging.disable_progress_bar()
    main = environ.get("RANK", "0") == "0"  # of several processes, one speaks
    console = _console() if main else Console(quiet=True)
    run = output or Path("runs") / recipe
    try:
        settings = parse(setting or [])
        if data is not None:
            settings["data.path"] = str(data)
        chosen = find(recipe)
        chosen = change(shrink(chosen) if small else chosen, settings)
        task = CharLM(chosen)
        model = task.build().num_parameters()
        console.print(
            f"{chosen.name}: {model / 1e6:.1f}M parameters, {len(task.corpus.train):,} bytes to "
            f"train on, {chosen.steps:,} steps, into {run}",
            soft_wrap=True,
            highlight=False,
        )
        carry_out(chosen, task, run, resume=resume, console=console)
    except (ValueError, OSError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        console.print(f"stopped; the same command with --resume goes on from {run}")
        raise typer.Exit(130) from None
    console.print(f"wrote {run}; next: longspan eval {run}, longspan generate {run}")


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    split: Annotated[str, typer.Option(help="valid or test.")] = "test",
    data: Annotated[Path | None, typer.Option(help="The text, if it has moved.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, e.g. evaluation.length=4096.")
    ] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="Each document by itself, from its beginning.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Bytes to score; 0 = all.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
) -> None:
    """Bits per character of a run, measured as its recipe says, with much before every byte."""
    from torch import autocast, bfloat16

    from longspan.tasks.bits import by_document
    from longspan.tasks.charlm import CharLM
    from longspan.train.recipe import change, parse

    _check_choice("--split", split, ["valid", "test", "train"])
    console = _console()
    try:
        recipe, folder = _find_run(run, checkpoint)
        settings = parse(setting or [])
        if data is not None:
            settings["data.path"] = str(data)
        recipe = change(recipe, settings)
        task = CharLM(recipe)
        model = _load_model(folder)
        half = autocast(model.device.type, bfloat16, enabled=recipe.precision == "bf16")
        with console.status(f"reading {split} ..."), half:
            if documents:
                text = getattr(task.corpus, split)[: limit or None]
                found = by_document(model, text, length=recipe.evaluation.length)
                value = sum(size * value for size, value in found) / sum(size for size, _ in found)
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


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one with a model.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Bytes to write at most.")] = 500,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest byte every time.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only among the k likeliest.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Only among the likeliest that reach this probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
) -> None:
    """Write on from a prompt; the text appears as it is made."""
    from longspan.models.sampling import Sampler
    from longspan.tasks.writing import write

    try:
        folder = run if (run / "config.json").exists() else _find_run(run, checkpoint)[1]
        model = _load_model(folder)
        sampler = Sampler(temperature, top_k, top_p, seed)
        typer.echo(prompt, nl=False)
        for piece in write(model, prompt, tokens, sampler):
            typer.echo(piece, nl=False)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        pass
    typer.echo()


def _find_run(run: Path, which: str) -> "tuple[Recipe, Path]":
    """A run's recipe, and the folder of its last or best checkpoint."""
    from json import loads

    from longspan.train.checkpoint import find
    from longspan.train.recipe import from_dict

    _check_choice("--checkpoint", which, ["best", "last"])
    if not (run / "recipe.json").exists():
        raise ValueError(f"{run} holds no run: there is no recipe.json; `longspan train` makes one")
    folder = find(run, which)
    if folder is None:
        raise ValueError(f"{run} has no checkpoint yet")
    return from_dict(loads((run / "recipe.json").read_text(encoding="utf8"))), folder


def _load_model(folder: Path) -> "LongspanForCausalLM":
    import torch
    from transformers.utils import logging

    from longspan.models import LongspanForCausalLM

    logging.disable_progress_bar()
    model = LongspanForCausalLM.from_pretrained(folder).eval()
    if torch.cuda.is_available():
        torch.nn.Module.cuda(model)
    return model


@bench_app.command()
def attention(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few short lengths: under a minute, also on a CPU.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; the best one there is by default.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 (default on cuda), float32 (on cpu) or float16.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    lengths: Annotated[
        str | None, typer.Option(help="Sequence lengths, e.g. 4096,16384; multiples of 512.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this contender; may be given several times.")
    ] = None,
    output: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the JSON file and the figures.")
    ] = Path("build/bench"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure everything again, do not resume.")
    ] = False,
) -> None:
    """Time and memory of window attention against its alternatives, forward and backward.

    Writes [bold]attention-<device>.json[/] after every point, so an interrupted run goes on where
    it stopped when started again the same way, then prints tables and draws figures from it.

    [bold]longspan bench attention --quick[/] takes less than a minute;
    [bold]longspan bench attention --only longspan --only sdpa[/] narrows the field.
    """
    import torch

    from longspan.bench.cases import suite
    from longspan.bench.contenders import CONTENDERS
    from longspan.bench.measure import Settings
    from longspan.bench.run import run

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    _check_choice("--dtype", dtype, ["bfloat16", "float16", "float32"])
    jobs = suite(
        device=device,
        dtype=dtype,
        quick=quick,
        lengths=_parse_lengths(lengths),
        only=_check_only(only or []),
    )
    if not any(device in CONTENDERS[name].devices for job in jobs for name in job.contenders):
        there = sorted(
            {
                name
                for job in suite(device=device, dtype=dtype, quick=quick)
                for name in job.contenders
                if device in CONTENDERS[name].devices
            }
        )
        raise typer.BadParameter(
            f"--only {', '.join(only or [])}: nothing to measure; this suite on {device} has "
            f"{', '.join(there)}"
        )
    if quick:
        settings = Settings(device, threads, rounds=3, seconds=1.5, rep_ms=30)
    else:
        settings = Settings(device, threads)
    console = _console()
    path = output / f"attention-{device}.json"
    try:
        run(jobs, settings, path, console, fresh=fresh)
    except KeyboardInterrupt:
        console.print(f"interrupted; what was measured is in {path}, the same command goes on")
        raise typer.Exit(130) from None
    _report(path, console)


@bench_app.command()
def report(
    file: Annotated[Path, typer.Argument(help="An attention-<device>.json of an earlier run.")],
) -> None:
    """Print the tables of a results file again and redraw its figures beside it."""
    _report(file, _console())


def _console() -> Console:
    """The terminal; or, for logs and files, a page wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _report(path: Path, console: Console) -> None:
    from longspan.bench.claims import claims
    from longspan.bench.figure import draw
    from longspan.bench.report import show
    from longspan.bench.store import load

    try:
        results = load(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not results.points:
        raise typer.BadParameter(f"{path} holds no points yet")
    show(results, claims(results), console)
    console.print(f"from {path}", soft_wrap=True, highlight=False)
    for figure in draw(results, path.with_suffix("")):
        console.print(f"wrote {figure}", soft_wrap=True, highlight=False)


def _check_choice(option: str, given: str, allowed: list[str]) -> None:
    if given not in allowed:
        raise typer.BadParameter(f"{option} {given}: choose from {', '.join(allowed)}")


def _check_device(device: str) -> None:
    import torch

    _check_choice("--device", device, ["cpu", "cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch sees no CUDA device; see `longspan doctor`")


def _check_only(only: list[str]) -> list[str]:
    from longspan.bench.contenders import CONTENDERS

    for name in only:
        _check_choice("--only", name, list(CONTENDERS))
    return only


def _parse_lengths(lengths: str | None) -> list[int] | None:
    if lengths is None:
        return None
    try:
        parsed = [int(part) for part in lengths.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--lengths {lengths}: give numbers, e.g. 4096,16384") from None
    wrong = [n for n in parsed if n < 512 or n % 512]
    if wrong:
        # transformers' Longformer takes nothing else; ours has no such rule.
        raise typer.BadParameter(f"--lengths: {wrong} are not multiples of the window, 512")
    return parsed


if __name__ == "__main__":
    app()
