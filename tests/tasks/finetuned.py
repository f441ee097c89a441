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


def told(path: Path, count: int = 30, sentences: int = 4) -> Path:
    """JSON lines: a cat and a dog, each a cluster of all words for it; rivers are no mentions."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(count):
            made, clusters = [], {"cat": [], "dog": []}
            words = 0
            for _ in range(sentences):
                animal, place = ["cat", "dog"][random.integers(2)], FILLER[random.integers(6, 8)]
                article = ["the", "a"][random.integers(2)]
                made.append([article, animal, "is", "in", "the", place, "."])
                clusters[animal].append([words, words + 1])
                words += 7
            kept = [one for one in clusters.values() if one]
            line = {"id": f"d{index}", "sentences": made, "clusters": kept}
            file.write(json.dumps(line) + "\n")
    return path


def recipe(name: str, folder: Path, **changes: Any) -> Finetuning:
    """A recipe at toy size, from a tiny checkpoint; names may have __ for a dot."""
    source = tiny_checkpoint(folder / "source")
    if name == "classify":
        data = labelled(folder / "animals.csv")
        columns = {"text": "body", "label": "animal"}
    elif name == "coref":
        data, columns = told(folder / "told.jsonl"), {}
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
    made = {key.replace("__", "."): value for key, value in changes.items()}
    return change(FINETUNING[name](), settings | made)
