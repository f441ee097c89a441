"""The `longspan` command. Everything slow is imported by the command that needs it."""

from inspect import cleandoc, getdoc
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import longspan
from longspan import cli_study, cli_tasks, cli_train

app = typer.Typer(
    name="longspan",
    help="Transformers that read whole documents.\n\n"
    "Start with [bold]longspan doctor[/]: it says what can run here. "
    "Then [bold]longspan demo[/] shows what it is for. "
    "[bold]longspan COMMAND --help[/] has examples.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
)
bench_app = typer.Typer(
    help="Measure time and memory; tables, targets and figures come with it.\n\n"
    "[bold]longspan bench attention --quick[/] takes a minute or two, also on a CPU.",
    rich_markup_mode="rich",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")
app.add_typer(cli_train.commands)
app.add_typer(cli_tasks.commands)
app.add_typer(cli_study.commands)


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
        str, typer.Argument(help="A folder, a run's folder, or the name of a model on the hub.")
    ],
    destination: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Positions of the result; 8 times the trained ones by default, 16 times BART's.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens each token sees around it, half on each side; 512 by default, BART 1024.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A text file to compare the two models on, as well; may be repeated.",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="int8: weights of the layers as int8, for a CPU; not by default."),
    ] = None,
) -> None:
    """Make a pretrained model long.

    BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, ELECTRA or ModernBERT, or the encoder of BART or
    mBART; a Longformer or LED comes over as it is. Weights, head, labels and tokenizer are kept,
    learned positions are repeated. The report says how far the outputs of the two models are apart
    on input that fits the window; there they should be equal but for rounding. With int8 weights
    a second one says how far these move hidden states and embeddings. A model that longspan has
    made, or a run's best one, is copied with its tokenizer, longer or int8 if you ask for it.

    [bold]longspan convert roberta-base roberta-long --max-length 4096[/]
    [bold]longspan convert runs/stars stars-int8 --quantize int8 --text review.txt[/]
    """
    from transformers.utils import logging

    from longspan.demo.source import read_document
    from longspan.hub.checkpoint import convert_checkpoint
    from longspan.hub.report import show
    from longspan.tasks.start import find_source

    logging.disable_progress_bar()
    console = _console()
    if quantize is not None:
        _check_choice("--quantize", quantize, ["int8"])
    try:
        texts = [read_document(path) for path in text or []]
        with console.status(f"converting {source} ..."):
            made = convert_checkpoint(
                find_source(source),
                destination,
                max_length=max_length,
                window=window,
                texts=texts,
                int8=quantize is not None,
            )
    except (TypeError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    show(made, console)
    console.print(f"wrote {destination}", soft_wrap=True, highlight=False)


@app.command()
def demo(
    document: Annotated[
        Path | None,
        typer.Option(help="A text file in UTF-8; Python's language reference by default."),
    ] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option(help="A question about it; may be repeated."),
    ] = None,
    length: Annotated[
        int, typer.Option(min=512, help="Tokens read at a time: positions of the long model.")
    ] = 16_384,
    window: Annotated[
        int, typer.Option(min=2, help="Tokens each token sees around it, half on each side.")
    ] = 512,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder or hub name of another BERT for sentences; "
            "all-MiniLM-L6-v2 from its package by default."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the page, demo.html.")
    ] = Path("build/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure time and memory up to 2,048 tokens only.")
    ] = False,
) -> None:
    """Make a short model long, read a whole document with it and answer questions about it.

    Answers are passages of the document, found by embedding each in its context; beside them
    stands what reading in 512-token pieces finds. Then time and memory against transformers.
    Prints it all and writes one page with the figures. Runs on the CPU, in a few minutes.

    [bold]longspan demo[/] reads Python's language reference and asks built-in questions;
    [bold]longspan demo --document contract.txt --ask "Who may terminate it?"[/] reads yours.
    """
    from transformers.utils import logging

    from longspan.demo import report
    from longspan.demo.questions import BUILT_IN, Question
    from longspan.demo.run import run
    from longspan.demo.source import language_reference, packaged_checkpoint, read_document
    from longspan.machine import cpu_count

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console = _console()
    if document is not None and not ask:
        raise typer.BadParameter('--document needs a question about it: --ask "..."')
    try:
        output.mkdir(parents=True, exist_ok=True)
        text = language_reference() if document is None else read_document(document)
        found = run(
            model or packaged_checkpoint(),
            text,
            [Question(one) for one in ask] if ask else BUILT_IN,
            title="Python's language reference" if document is None else document.name,
            model_name=model or "all-MiniLM-L6-v2",
            length=length,
            window=window,
            lengths=(512, 1024, 2048) if quick else sorted({1024, min(4096, length), length}),
            threads=cpu_count(),
            console=console,
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    report.show(found, console)
    report.write_page(found, output / "demo.html")
    console.print(f"wrote {output / 'demo.html'}", soft_wrap=True, highlight=False)


# The options that the benchmarks share.
_Quick = Annotated[
    bool, typer.Option("--quick", help="A few small cases: a minute or two, also on a CPU.")
]
_Device = Annotated[str | None, typer.Option(help="cpu or cuda; the best one there is by default.")]
_Dtype = Annotated[
    str | None, typer.Option(help="bfloat16 (default on cuda), float32 (on cpu) or float16.")
]
_Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
_Only = Annotated[
    list[str] | None,
    typer.Option(help="Only this contender, a wrong name lists them; may be repeated."),
]
_Output = Annotated[
    Path, typer.Option(file_okay=False, help="Folder for the JSON file and the figures.")
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Measure everything again, do not resume.")]


@bench_app.command()
def attention(
    quick: _Quick = False,
    device: _Device = None,
    dtype: _Dtype = None,
    threads: _Threads = 1,
    lengths: Annotated[
        str | None, typer.Option(help="Sequence lengths, e.g. 4096,16384; multiples of 512.")
    ] = None,
    only: _Only = None,
    output: _Output = Path("build/bench"),
    fresh: _Fresh = False,
) -> None:
    """Time and memory of window attention against its alternatives, forward and backward.

    On a CPU a run in float32 also measures what is targeted in bfloat16 and on two threads.

    Writes [bold]attention-<device>.json[/] after every point, so an interrupted run goes on where
    it stopped when started again the same way, then prints tables and draws figures from it.

    [bold]longspan bench attention --quick[/] takes a minute or two;
    [bold]longspan bench attention --only longspan --only sdpa[/] narrows the field.
    """
    _bench("attention", quick, device, dtype, threads, lengths, only or [], output, fresh)


@bench_app.command()
def models(
    model: Annotated[str, typer.Option(help="encoder, or led: encoder-decoders.")] = "encoder",
    quick: _Quick = False,
    device: _Device = None,
    dtype: _Dtype = None,
    threads: _Threads = 1,
    lengths: Annotated[
        str | None, typer.Option(help="Only cases of these lengths, e.g. 4096,65536.")
    ] = None,
    only: _Only = None,
    output: _Output = Path("build/bench"),
    fresh: _Fresh = False,
) -> None:
    """Tokens per second and memory of whole models, forward and training.

    longspan, a transformers Longformer before and after [bold]longspan.patch[/], RoBERTa and
    ModernBERT with PyTorch's dense attention: base size, random weights, one global token where
    there are any, compiled on a GPU where that works. A step is forward and backward to all
    weights; the optimiser, which costs the same for every length, is no part of it.

    [bold]--model led[/]: our encoder-decoder against transformers' LED, as it is and patched; a
    training step, generation with beams, and what the memory of a step follows.

    Writes [bold]models-<device>.json[/], or [bold]led-<device>.json[/], after every point, so an
    interrupted run goes on where it stopped when started again the same way, then prints tables
    and draws figures from it.

    [bold]longspan bench models --quick[/] tries it on a small model in a minute or two;
    [bold]longspan bench models --only longspan --only roberta[/] narrows the field.
    """
    _check_choice("--model", model, ["encoder", "led"])
    name = "models" if model == "encoder" else model
    _bench(name, quick, device, dtype, threads, lengths, only or [], output, fresh)


@bench_app.command()
def lm(
    quick: _Quick = False,
    device: _Device = None,
    dtype: _Dtype = None,
    threads: _Threads = 1,
    lengths: Annotated[
        str | None, typer.Option(help="Only cases of these lengths, e.g. 8192,32768.")
    ] = None,
    only: _Only = None,
    output: _Output = Path("build/bench"),
    fresh: _Fresh = False,
) -> None:
    """Characters per second and memory of a language model's training step.

    One decoder of bytes, 12 layers of 512 and 40M parameters on a GPU, with our windows, with the
    same windows by FlexAttention, and with dense attention. A step is all that the training loop
    does: forward, backward, clipping, Muon and AdamW; bfloat16 on weights in float32, compiled.

    Writes [bold]lm-<device>.json[/] after every point, so an interrupted run goes on where
    it stopped when started again the same way, then prints tables and draws figures from it.

    [bold]longspan bench lm --quick[/] tries it on a small model in a minute or two;
    [bold]longspan bench lm --only longspan --lengths 8192[/] is the shortest look at a GPU.
    """
    _bench("lm", quick, device, dtype, threads, lengths, only or [], output, fresh)


@bench_app.command()
def finetuning(
    quick: _Quick = False,
    device: _Device = None,
    dtype: _Dtype = None,
    threads: _Threads = 1,
    only: _Only = None,
    output: _Output = Path("build/bench"),
    fresh: _Fresh = False,
) -> None:
    """Tokens per second of finetuning against the bare training step, and of tokenising.

    An encoder of base size with random weights learns to classify documents of some 4,096 tokens,
    made of Python's own sources, by what [bold]longspan train classify[/] does: batches, dropout,
    forward, backward, clipping, AdamW, logging. Beside it stands the training step that
    [bold]longspan bench models[/] measures, and how long a million characters take to become
    tokens. Writes [bold]finetuning-<device>.json[/].

    [bold]longspan bench finetuning --quick[/] tries it on a small model in a minute or two.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    _bench("finetuning", quick, device, dtype, threads, None, only or [], output, fresh)


@bench_app.command()
def family(
    quick: _Quick = False,
    device: _Device = None,
    dtype: _Dtype = None,
    threads: _Threads = 1,
    lengths: Annotated[
        str | None, typer.Option(help="Only cases of these lengths, e.g. 4096,16384.")
    ] = None,
    only: _Only = None,
    output: _Output = Path("build/bench"),
    fresh: _Fresh = False,
) -> None:
    """Time and memory of every kind of attention, in one layer, as documents get longer.

    Beside them the best public implementations of some, where they are installed
    (pip install '.\\[bench-rivals]'), and the error of those that approximate softmax attention.
    Writes [bold]family-<device>.json[/] after every point and goes on where it stopped.

    [bold]longspan bench family --quick[/] takes two or three minutes, all of it half an hour on a
    CPU; [bold]longspan bench family --only window --only performer[/] narrows the field.
    """
    _bench("family", quick, device, dtype, threads, lengths, only or [], output, fresh)


def _bench(
    name: str,
    quick: bool,
    device: str | None,
    dtype: str | None,
    threads: int,
    lengths: str | None,
    only: list[str],
    output: Path,
    fresh: bool,
) -> None:
    import torch

    from longspan.bench.benchmark import Settings, find
    from longspan.bench.run import run

    benchmark = find(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    _check_choice("--dtype", dtype, ["bfloat16", "float16", "float32"])
    for contender in only:
        _check_choice("--only", contender, list(benchmark.contenders))
    jobs = benchmark.jobs(
        device=device, dtype=dtype, quick=quick, lengths=_parse_lengths(lengths), only=only
    )
    if not jobs:
        everything = benchmark.jobs(device=device, dtype=dtype, quick=quick)
        there = sorted({name for job in everything for name in job.contenders})
        measured = sorted({job.case.tokens for job in everything})
        raise typer.BadParameter(
            f"nothing to measure: this suite on {device} has {', '.join(there)}, "
            f"at lengths {', '.join(map(str, measured))}"
        )
    changed = benchmark.quick_settings if quick else benchmark.settings
    settings = Settings(device, threads, **changed)
    console = _console()
    path = output / f"{name}-{device}.json"
    for contender in benchmark.contenders.values():
        if not contender.installed:
            console.print(
                f"skipped: {contender.name}, as {contender.package} is not installed; "
                "pip install '.[bench-rivals]' brings it",
                markup=False,
                soft_wrap=True,
            )
    try:
        run(benchmark, jobs, settings, path, console, fresh=fresh, quick=quick)
    except KeyboardInterrupt:
        console.print(f"interrupted; what was measured is in {path}, the same command goes on")
        raise typer.Exit(130) from None
    _report(path, console)


@bench_app.command()
def report(
    file: Annotated[Path, typer.Argument(help="The JSON file of an earlier run.")],
) -> None:
    """Print the tables of a results file again and redraw its figures beside it.

    [bold]longspan bench report bench/results/attention-cpu.json[/]; for the files of
    [bold]longspan plot[/], which hold runs, it is [bold]longspan plot FILE[/].
    """
    _report(file, _console())


def _console() -> Console:
    """The terminal; or, for logs and files, a page wide enough for the tables. Texts of users are
    shown in them: what stands in brackets there is no markup."""
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=120, markup=False)


def _report(path: Path, console: Console) -> None:
    from longspan.bench.report import show
    from longspan.bench.store import load

    try:
        results = load(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not results.points:
        raise typer.BadParameter(f"{path} holds no points yet")
    show(results, console)
    console.print(f"from {path}", soft_wrap=True, highlight=False)
    for figure in results.benchmark.draw(results, path.with_suffix("")):
        console.print(f"wrote {figure}", soft_wrap=True, highlight=False)


def _check_choice(option: str, given: str, allowed: list[str]) -> None:
    if given not in allowed:
        raise typer.BadParameter(f"{option} {given}: choose from {', '.join(allowed)}")


def _check_device(device: str) -> None:
    import torch

    _check_choice("--device", device, ["cpu", "cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch sees no CUDA device; see `longspan doctor`")


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


def _flowing(text: str) -> str:
    """A docstring whose paragraphs may be broken anew, to the width of a terminal; only examples,
    and what stands beside them, keep their lines."""
    lines = cleandoc(text).split("\n")
    flowing = lines[0]
    for before, line in pairwise(lines):
        example = before.endswith("[/]") or (before.endswith((".", ";")) and line[:6] == "[bold]")
        flowing += "\n" + line if example or not (before and line) else " " + line
    return flowing


for _commands in (app, bench_app, cli_train.commands, cli_tasks.commands, cli_study.commands):
    for _command in _commands.registered_commands:
        _command.help = _flowing(getdoc(_command.callback) or "")
