"""The commands that put models side by side: study, plot, scores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from longspan.cli_settings import SettingCommand
from longspan.cli_train import console_for_logs

if TYPE_CHECKING:
    from longspan.analyze.runs import Probe
    from longspan.tasks.charlm import CharLM

commands = typer.Typer()

# How much is measured of every run.
_Limit = Annotated[int, typer.Option(min=0, help="Bytes of valid and test to score; 0 = all.")]
_Scored = Annotated[
    int, typer.Option(min=0, help="Bytes of valid and test to score, or test texts; 0 = all.")
]
_Rows = Annotated[int, typer.Option(min=1, help="Rows for the loss by position.")]
_Longest = Annotated[int, typer.Option(min=1, help="The longest context looked at, in bytes.")]
_Tokens = Annotated[int, typer.Option(min=0, help="Bytes that RECL looks at; 0 = no RECL.")]
_Shared = Annotated[
    bool, typer.Option("--shared", help="The runs shared a device: tell no times and speeds.")
]
_Step = Annotated[int, typer.Option(min=1, help="RECL's first context and its growth, in bytes.")]


@commands.command(cls=SettingCommand)
def study(
    name: Annotated[
        str,
        typer.Argument(
            help="rivals, windows, causal, positions, summaries, lra-listops or lra-text."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder for all its runs; runs/NAME by default.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The text: a file, or a folder of documents.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Of training for each run; 2 for rivals, windows and causal, else by steps.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this recipe (causal-bp), of positions this arm, of lra this kind (bp); may "
            "be repeated."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for every run; may be repeated.")
    ] = None,
    small: Annotated[
        bool,
        typer.Option(
            "--shrink", help="Toy size, two steps per phase, little text: does it run here?"
        ),
    ] = False,
    limit: _Scored = 0,
    rows: _Rows = 64,
    longest: _Longest = 4096,
    tokens: _Tokens = 500,
    step: _Step = 256,
    model: Annotated[
        str | None,
        typer.Option(help="positions: the short checkpoint; summaries: what to start from."),
    ] = None,
    valid: Annotated[
        str | None,
        typer.Option(help="positions, summaries, lra: validation documents; else from the data."),
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="summaries, lra: test documents; else from the data.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="positions, summaries, lra: the column of the text.")
    ] = None,
    answers: Annotated[
        str | None, typer.Option(help="summaries: the column of what was written.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="summaries: tokens to read; 1024,4096,16384 by default.")
    ] = None,
    practice: Annotated[
        int, typer.Option(min=0, help="summaries: updates of copying passages, before all else.")
    ] = 0,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="summaries: make what the models start from, only.")
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="lra: so many kinds at a time on one device; implies --shared."),
    ] = 1,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="lra: the runs shared a device: tell no times and speeds."),
    ] = False,
) -> None:
    """Train several models for the same time, one after the other, and put them side by side.

    [bold]rivals[/]: Longformer at once and staged, Transformer-XL, Compressive Transformer, dense
    attention of 1,024; 40M parameters each.
    [bold]windows[/]: the paper's Table 4 at 9M.
    [bold]causal[/]: every kind of attention that decoders have, otherwise like rivals.
    [bold]positions[/]: its Table 5, what copying a short checkpoint's positions is worth.
    [bold]summaries[/]: its Figure 3, what reading more of a document is worth, by a small model
    trained from scratch unless --model names another.
    [bold]lra-listops[/], [bold]lra-text[/]: Long Range Arena with every kind that encoders have, as
    many steps for each or, with --minutes, as much time; the published table beside ours.

    Interrupted, the same command goes on; what failed is named, and tried again by it. Each run is
    measured when it is done; [bold]longspan plot[/] joins runs of several studies.

    [bold]longspan study rivals --data FOLDER --minutes 2[/]
    [bold]longspan study positions --data FILE --model FOLDER --set updates=2000[/]
    [bold]longspan study lra-listops --only performer --only window --minutes 10[/]
    [bold]longspan study lra-listops --jobs 4[/] trains four kinds at a time, each with a log of its
    own: small models leave most of a GPU idle.
    [bold]longspan study summaries --data FILE --text sections --answers abstract[/]
    [bold]longspan study summaries --output FOLDER[/] scores what was written without rouge-score.
    With --prepare first, and the same options, processes of --lengths 1024, 4096 and 16384 may then
    run side by side; without --lengths the command puts them together.
    """
    from transformers.utils import logging

    from longspan.analyze.runs import Probe, measure_run
    from longspan.recipes import ARENA, find_study
    from longspan.recipes.shrink import shrink
    from longspan.tasks.runs import carry_out
    from longspan.train.recipe import change, parse

    logging.disable_progress_bar()
    console = console_for_logs()
    folder = output or Path("runs") / name
    try:
        if name in ("positions", "summaries", *ARENA):
            asked = {
                "data.train": None if data is None else str(data),
                "data.valid": valid,
                # No test documents are needed for positions, and none shall be taken from the data.
                "data.test": valid if name == "positions" else test,
                "data.columns.text": text,
                "data.columns.answers": answers,
                "model.source": model,
                "minutes": minutes,
            }
            chosen = {key: value for key, value in asked.items() if value is not None}
            chosen |= parse(setting or [])
            own = answers is not None or lengths is not None or practice or prepare
            if (shared or jobs > 1) and name not in ARENA:
                raise ValueError("--jobs and --shared are for the studies of lra")
            if name != "summaries" and own:
                raise ValueError(
                    "--answers, --lengths, --practice and --prepare are for the study of summaries"
                )
            if name == "positions":
                _positions(chosen, folder, only, small)
            elif name == "summaries":
                how = {"limit": limit, "practised": practice}
                _summaries(chosen, folder, only, small, lengths, how, prepare)
            else:
                _arena(name, chosen, folder, only, small, jobs, shared or jobs > 1)
            return
        given = any(one is not None for one in (model, valid, test, text, answers, lengths))
        if given or practice or prepare or shared or jobs > 1:
            raise ValueError(
                "--model, --valid, --test, --text, --answers, --lengths, --practice, --prepare, "
                "--jobs and --shared are for studies of positions, summaries or lra"
            )
        probe = Probe(limit, rows, longest, tokens, step, step)
        if small:
            probe = Probe(limit=1000, rows=4, longest=64, tokens=20, start=16, step=16)
        settings = parse(setting or [])
        if data is not None:
            settings["data.path"] = str(data)
        recipes = [shrink(recipe) if small else recipe for recipe in find_study(name)]
        for wanted in only or []:
            if wanted not in [recipe.name for recipe in recipes]:
                known = ", ".join(recipe.name for recipe in recipes)
                raise ValueError(f"--only {wanted}: choose from {known}")
        if minutes is not None:
            settings["minutes"] = minutes
        recipes = [change(r, settings) for r in recipes if not only or r.name in only]

        def measured(run: Path, task: "CharLM") -> None:
            with _telling(console) as say:
                measure_run(run, task, probe, say)

        failed = carry_out(recipes, folder, console, after=measured)
        done = [folder / recipe.name for recipe in recipes if recipe.name not in failed]
        if done:
            _plot(done, probe, data, folder)
    except (ValueError, OSError, FloatingPointError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on")
        raise typer.Exit(130) from None
    for own, reason in failed.items():
        console.print(f"failed: {own}: {reason}", markup=False, highlight=False)
    if failed:
        raise typer.Exit(1)


def _positions(settings: dict[str, Any], folder: Path, only: list[str] | None, small: bool) -> None:
    from longspan.analyze.positions import describe, draw, markdown, table
    from longspan.recipes import FINETUNING
    from longspan.recipes.shrink import shrink_finetuning
    from longspan.tasks.positions import study as carry_out
    from longspan.train.checkpoint import write_json, write_text
    from longspan.train.recipe import change

    console = console_for_logs()
    recipe = change(FINETUNING["mlm"](), {"updates": 2000, "evaluation.every": 250})
    if small:
        recipe = change(shrink_finetuning(recipe), {"batch": 1, "data.limit": 4})  # seven times
    result = carry_out(change(recipe, settings), folder, console, only or ())
    if result is None:
        return
    found = describe(result)
    write_json(folder / "positions.json", found)
    write_text(folder / "positions.md", markdown(found))
    console.print(table(found))
    for claim in found["claims"]:
        console.print(f"{'yes' if claim['holds'] else 'no '}  {claim['text']}", highlight=False)
    for path in draw(found, folder / "positions"):
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def _summaries(
    settings: dict[str, Any],
    folder: Path,
    only: list[str] | None,
    small: bool,
    lengths: str | None,
    how: dict[str, int],
    prepare: bool,
) -> None:
    from longspan.analyze.lengths import describe, draw, markdown, table
    from longspan.recipes.summaries import scratch
    from longspan.tasks.lengths import LENGTHS, score
    from longspan.tasks.lengths import prepare as make_start
    from longspan.tasks.lengths import study as carry_out
    from longspan.train.checkpoint import read_json, write_json, write_text
    from longspan.train.recipe import change

    if only:
        raise ValueError("--only: choose with --lengths what is read")
    try:
        read = LENGTHS if lengths is None else [int(one) for one in lengths.split(",")]
    except ValueError:
        raise ValueError(f"--lengths {lengths}: give numbers, e.g. 1024,16384") from None
    if min(read) < 1:
        raise ValueError(f"--lengths {lengths}: at least one token has to be read")
    console = console_for_logs()
    recipe, sizes = scratch(), {}
    if small:
        toy = {"updates": 2, "batch": 2, "data.limit": 4, "precision": "no", "writing.beams": 2}
        recipe = change(recipe, {**toy, "evaluation.every": 0, "writing.longest": 16})
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "words": 500}
    known = folder / "summaries.json"
    if "data.train" in settings:
        recipe = change(recipe, settings)
        if prepare:
            make_start(recipe, folder, practised=how["practised"], sizes=sizes, console=console)
            return
        result = carry_out(recipe, folder, lengths=read, sizes=sizes, console=console, **how)
        found = describe(result)  # the file may be that of a process beside this one by now
        write_json(known, found)
    elif not known.exists():
        raise ValueError(f"give --data FILE; {known}, what could be scored without, is not there")
    else:
        found = read_json(known)
    try:
        found = score(found, folder)
    except ValueError as error:  # rouge-score is missing
        console.print(
            f"not scored: {error}. Texts are written; where it is installed, longspan study "
            f"summaries --output {folder} scores them",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    write_json(known, found)
    write_text(folder / "summaries.md", markdown(found))
    console.print(table(found))
    for path in draw(found, folder / "summaries"):
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def _arena(
    name: str,
    settings: dict[str, Any],
    folder: Path,
    only: list[str] | None,
    small: bool,
    jobs: int,
    shared: bool,
) -> None:
    from longspan.analyze.arena import describe, markdown
    from longspan.recipes import FINETUNING
    from longspan.recipes.shrink import shrink_finetuning
    from longspan.tasks.kinds import study as carry_out
    from longspan.train.checkpoint import write_json, write_text
    from longspan.train.recipe import change

    console = console_for_logs()
    recipe = FINETUNING[name]()
    recipe = change(shrink_finetuning(recipe) if small else recipe, settings)
    found = describe(carry_out(recipe, folder, only, console, jobs), shared)
    folder.mkdir(parents=True, exist_ok=True)  # where nothing came as far as a run
    write_json(folder / f"{name}.json", found)
    if found["arms"]:
        write_text(folder / f"{name}.md", markdown(found))
        _show_arena(found, folder / name)
    for kind, reason in found["failed"].items():
        console.print(f"failed: {kind}: {reason}", markup=False, highlight=False)
    if found["failed"]:
        raise typer.Exit(1)


def _show_arena(found: dict[str, Any], stem: Path) -> None:
    from longspan.analyze.arena import draw, table

    console = console_for_logs()
    console.print(table(found))
    for path in draw(found, stem):
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


@commands.command()
def plot(
    context: typer.Context,
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs on the same text, or the JSON file of an earlier plot or a study "
            "of lra."
        ),
    ],
    output: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the JSON file and the figures.")
    ] = Path("build/plot"),
    data: Annotated[Path | None, typer.Option(help="The text, if it has moved.")] = None,
    limit: _Limit = 0,
    rows: _Rows = 64,
    longest: _Longest = 4096,
    tokens: _Tokens = 500,
    step: _Step = 256,
    shared: _Shared = False,
) -> None:
    """One table of language models' runs, and figures: how they learned, how far they look.

    Bits per character on valid and test, RECL, characters per second, memory; curves against time,
    characters and steps; loss by position, and by distance from a document's beginning. The best
    checkpoint of each run counts. Writes [bold]runs.json[/] first and draws from it. A run that was
    measured alike before is not measured again, and needs no more than its measured.json.

    [bold]longspan plot runs/books runs/other[/]
    [bold]longspan plot bench/results/books.json[/] draws that file's figures again, beside it.
    """
    from transformers.utils import logging

    from longspan.analyze.arena import read_study
    from longspan.analyze.runs import Probe, read_results

    logging.disable_progress_bar()
    try:
        for one in runs:
            if one.suffix == ".json":
                options = [name for name in context.params if _given(context, name)]
                if options != ["runs"] or len(runs) > 1:
                    raise ValueError(f"{one} is drawn as it is: give no other runs nor options")
                found = read_study(one)
                if found is not None:
                    _show_arena(found, one.with_suffix(""))
                else:
                    _show(read_results(one), one.with_suffix(""))
                return
        _plot(runs, Probe(limit, rows, longest, tokens, step, step), data, output, shared=shared)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@contextmanager
def _telling(console: Console) -> Iterator[Callable[[str], None]]:
    """What is being done: on a terminal a line that changes, in logs one after the other."""
    if not console.is_terminal:
        yield lambda text: console.print(text, highlight=False)
        return
    with console.status("") as status:
        yield status.update


def _plot(
    runs: list[Path], probe: "Probe", data: Path | None, output: Path, *, shared: bool = False
) -> None:
    from longspan.analyze.run_figures import markdown
    from longspan.analyze.runs import measure
    from longspan.train.checkpoint import write_json, write_text

    console = console_for_logs()
    with _telling(console) as say:
        found = measure(runs, probe, data=data, say=say)
    found["shared"] = shared
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "runs.json", found)
    write_text(output / "runs.md", markdown(found))
    _show(found, output / "runs")


def _show(found: dict[str, Any], stem: Path) -> None:
    from longspan.analyze.run_figures import draw, table

    console = console_for_logs()
    console.print(table(found))
    for path in draw(found, stem):
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


@commands.command()
def scores(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of finetuned runs, or of runs by seed.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Where to write NAME.json, .md, .png and .svg.")
    ] = None,
    shared: _Shared = False,
) -> None:
    """One table of finetuned runs: test and validation scores, mean and deviation over seeds.

    A run of [bold]longspan train TASK --seeds 5[/] counts as one row. With --output the same as
    JSON, with every seed's scores and the settings, and a figure with a dot for each seed.

    [bold]longspan scores runs/hyperpartisan-* --output hyperpartisan[/]
    """
    from longspan.analyze.scores import collect, draw, markdown, table
    from longspan.train.checkpoint import write_json, write_text

    console = console_for_logs()
    try:
        arms = collect(runs)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(table(arms, shared))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(f"{output}.json"), {"arms": arms})
        write_text(Path(f"{output}.md"), markdown(arms, shared))
        for path in draw(arms, output):
            console.print(f"wrote {path}", soft_wrap=True, highlight=False)
