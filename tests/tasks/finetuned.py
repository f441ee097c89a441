"""Small data for tasks, and recipes that learn it in seconds."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tasks.tiny import tiny_checkpoint

from longspan.recipes import FINETUNING
from longspan.train.finetuning import Finetuning
from longspan.train.recipe import change

QUIET = Console(quiet=True)
FILLER = ["the", "a", "is", "was", "in", "and", "river", "house"]


def sentence(random: np.random.Generator, words: int) -> list[str]:
    return [FILLER[i] for i in random.integers(len(FILLER), size=words)]


def labelled(path: Path, count: int = 60, words: int = 12) -> Path:
    """A table whose texts hold "cat" or "dog" at a random place: that is the label."""
    random = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["body", "animal"])
        for index in range(count):
            animal, made = ["cat", "dog"][index % 2], sentence(random, words)
            made[random.integers(words)] = animal
            table.writerow([" ".join(made), animal])
    return path


def asked(path: Path, count: int = 30, words: int = 40) -> Path:
    """JSON lines: where the cat is, which is not in every text."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(count):
            made = sentence(random, words)
            if index % 3:
                made[random.integers(words)] = "cat"
            text = " ".join(made)
            start = text.find("cat")
            answers = [{"text": "cat", "start": start}] if start >= 0 else []
            qas = [{"question": "when cat?", "answers": answers}]
            file.write(json.dumps({"id": f"d{index}", "text": text, "qas": qas}) + "\n")
    return path


def documents(path: Path, count: int = 40, words: int = 30) -> Path:
    """JSON lines: texts of up to twice so many words, which always follow in the same order."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(count):
            first, more = random.integers((len(FILLER), 2 * words))
            made = [FILLER[(first + place) % len(FILLER)] for place in range(more + 1)]
            file.write(json.dumps({"text": " ".join(made)}) + "\n")
    return path


def recipe(name: str, folder: Path, **changes: Any) -> Finetuning:
    """A recipe at toy size, from a tiny checkpoint; names may have __ for a dot."""
    masked = FINETUNING[name]().task == "mlm"
    source = tiny_checkpoint(folder / "source", masked=masked)
    if masked:
        data, columns = documents(folder / "documents.jsonl"), {}
    elif name == "classify":
        data = labelled(folder / "animals.csv")
        columns = {"text": "body", "label": "animal"}
    else:
        data, columns = asked(folder / "asked.jsonl"), {}
    settings = {
        "model.source": str(source),
        "model.length": 24,
        "model.window": 16,
        "data.train": str(data),
        "data.columns": columns,
        "batch": 8,
        "accumulate": 1,
        "epochs": 2.0,
        "learning_rate": 5e-3,
        "overlap": 0,
        "precision": "no",
    }
    if masked:
        settings |= {"updates": 4, "warmup": 0.0, "evaluation.every": 0, "evaluation.limit": 0}
        settings |= {"model.length": 32, "model.window": 8, "save_every": 0}
    made = {key.replace("__", "."): value for key, value in changes.items()}
    return change(FINETUNING[name](), settings | made)
