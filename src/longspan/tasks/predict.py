"""A finetuned run put to use: on values in Python, or on a file, row by row."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from longspan.data.conll import LINES, write_conll
from longspan.data.tables import Row, read_rows
from longspan.tasks.finetune import FIRST_STAGE, TASKS, half, load_model
from longspan.tasks.lines import write_lines
from longspan.tasks.mentions import read_speakers, read_words
from longspan.tasks.start import load_tokenizer
from longspan.train import checkpoint
from longspan.train.finetuning import Finetuning, TooLong, check_columns
from longspan.train.recipe import from_dict


class Pipeline:
    """A run's best checkpoint, called with what its task needs.

    >>> classify = longspan.pipeline("runs/hyperpartisan")
    >>> classify("The walls are closing in ...")["label"]
    >>> find = longspan.pipeline("runs/cuad")
    >>> find(contract, question="Governing Law")["answer"]
    >>> write = longspan.pipeline("runs/papers")
    >>> write(paper)["summary"]
    >>> resolve = longspan.pipeline("runs/litbank")
    >>> resolve(novel)["clusters"][0]
    >>> choose = longspan.pipeline("runs/race")
    >>> choose(passage, question="Who laughs?", choices=["The cat.", "The dog."])["answer"]
    >>> reason = longspan.pipeline("runs/hotpotqa")
    >>> reason([("Rome", ["Rome is old."]), ...], question="Is Rome old?")["evidence"]
    """

    def __init__(
        self,
        run: str | Path,
        *,
        which: str = "best",
        too_long: TooLong | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        run = Path(run)
        recipe, folder = find_run(run, which)
        self.recipe = rename(recipe, columns or {})
        if too_long is not None:
            self.recipe = replace(self.recipe, too_long=too_long)
        self.model = load_model(self.recipe, folder)
        self.task = TASKS[self.recipe.task][1](self.recipe, load_tokenizer(folder))
        if self.recipe.hops.stages == 2:
            first = Pipeline(run / FIRST_STAGE, which=which, too_long=too_long, columns=columns)
            self.task.first = first.task, first.model
        results = run / "results.json"
        if results.exists() and self.recipe.answers.threshold is None:
            # Where training found no answer to be the better one.
            self.task.threshold = checkpoint.read_json(results)["valid"].get("threshold", 0.0)

    def __call__(
        self,
        text: Any,
        question: str | None = None,
        choices: Sequence[str] | None = None,
        say: Callable[[str], object] | None = None,
    ) -> dict[str, Any]:
        """What is predicted of a text, or of what the task reads in its place. `say` is given a
        summary word by word, while it is written."""
        asked = {"question": question, "choices": choices}
        given = {"text": text} | {k: v for k, v in asked.items() if v is not None}
        columns = self.recipe.data.columns
        missing = [name for name in self.task.needs if name not in given]
        if missing:
            raise ValueError(f"{self.recipe.task} needs {' and '.join(missing)}")
        values = {columns.get(name, name): value for name, value in given.items()}
        return self.rows([Row("the input", values)], say)[0]

    def rows(
        self, rows: Iterable[Row | Mapping[str, Any]], say: Callable[[str], object] | None = None
    ) -> list[dict[str, Any]]:
        """What is predicted of each row, a dict of its columns or one that was read, all of them
        at once; texts are given to `say` while they are written."""
        if say is not None and self.recipe.task != "summarize":
            raise ValueError(f"{self.recipe.task} writes no texts that could be followed")
        told = {} if say is None else {"say": say}
        given = [
            row if isinstance(row, Row) else Row(f"row {number}", row)
            for number, row in enumerate(rows)
        ]
        with half(self.recipe, self.model):
            return self.task.predict(self.model, given, **told)


def pipeline(
    run: str | Path,
    *,
    which: str = "best",
    too_long: TooLong | None = None,
    columns: Mapping[str, str] | None = None,
) -> Pipeline:
    """A finetuned run, ready to be called; `which` of its checkpoints: "best" or "last".

    Rows of a table (`Pipeline.rows`, `predict_file`) have the columns they had in training, or
    those named here: {"text": "body"}.
    """
    return Pipeline(run, which=which, too_long=too_long, columns=columns)


def rename(recipe: Finetuning, columns: Mapping[str, str]) -> Finetuning:
    """The recipe for rows whose columns are called otherwise, some of them or all."""
    check_columns(recipe.task, columns)
    return replace(recipe, data=replace(recipe.data, columns={**recipe.data.columns, **columns}))


def check_file(recipe: Finetuning, source: str | Path, named: Collection[str] = ()) -> None:
    """Raise if the first row of a table lacks a column that predictions need, or one that was
    `named`: what else would be said once the model is loaded, or not at all."""
    reader, columns = TASKS[recipe.task][1], recipe.data.columns
    rows = (one for row in read_rows(source) for one in reader.unfold(row, columns))
    for first in islice(rows, 1):
        for name in dict.fromkeys((*reader.needs, *named)):
            try:
                first.get(columns.get(name, name))
            except ValueError as error:
                raise ValueError(f"{error}: --{name} names the one to take") from None


def find_run(run: Path, which: str) -> tuple[Finetuning, Path]:
    """A run's recipe, and the folder of its last or best checkpoint."""
    path = run / "recipe.json"
    if not path.exists():
        seeds = sorted(folder.name for folder in run.glob("seed-*"))
        hint = f"; there are {', '.join(seeds)} in it" if seeds else ""
        why = "there is no recipe.json" if run.exists() else "it does not exist"
        raise ValueError(f"{run} holds no run: {why}{hint}")
    values = checkpoint.read_json(path)
    if values.get("task") not in TASKS:
        raise ValueError(f"{run} holds a language model, which labels nothing: longspan generate")
    folder = checkpoint.find(run, which)
    if folder is None:
        raise ValueError(f"{run} has no checkpoint yet")
    return from_dict(values, Finetuning), folder


def predict_file(
    use: Pipeline,
    source: str | Path,
    output: Path,
    *,
    resume: bool = False,
    batch: int = 8,
    progress: Callable[[int], object] | None = None,
    say: Callable[[str], object] | None = None,
) -> int:
    """Predictions for every row of a table, see `write_lines`; returns how many. `say` is given
    the texts that are written, word by word."""
    return write_lines(
        source,
        output,
        lambda rows: use.rows(rows, say),
        unfold=lambda row: use.task.unfold(row, use.recipe.data.columns),
        id_column=use.recipe.data.columns.get("id", "id"),
        resume=resume,
        batch=batch,
        progress=progress,
    )


def write_clusters(use: Pipeline, source: str | Path, predictions: Path, output: Path) -> None:
    """The predictions of a coreference run, made of `source`, as a CoNLL-2012 file.

    Columns that the source has in that form are kept; else words and speakers alone are known.
    """
    columns = use.recipe.data.columns
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = checkpoint.unfinished(output)
    with predictions.open(encoding="utf8") as lines, unfinished.open("w", encoding="utf8") as file:
        for row, line in zip(read_rows(source), lines, strict=True):
            document = row.values
            if LINES not in document:
                words = read_words(row, columns)
                if words is None:
                    continue
                document = {
                    "id": words.id,
                    "sentences": words.sentences(),
                    "speakers": read_speakers(row, columns),
                }
            found = json.loads(line).get("clusters", [])
            clusters = [[mention["words"] for mention in cluster] for cluster in found]
            file.writelines(write_conll(document, clusters))
    os.replace(unfinished, output)
