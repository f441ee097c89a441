"""Small data for tasks, and recipes that learn it in seconds."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tasks.tiny import tiny_checkpoint, tiny_writer

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


def offered(path: Path, count: int = 30, words: int = 16) -> Path:
    """JSON lines: which of two animals is in the text."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(count):
            made, animals = sentence(random, words), ["cat", "dog"]
            random.shuffle(animals)
            made[random.integers(words)] = animals[index % 2]
            row = {"id": f"d{index}", "text": " ".join(made), "question": "when?"}
            row |= {"choices": [f"the {one}" for one in animals], "answer": f"the {animals[0]}"}
            if index % 2:
                row["answer"] = "B"
            file.write(json.dumps(row) + "\n")
    return path


def hopping(path: Path, count: int = 30) -> Path:
    """JSON lines: a cat and a dog are in two of four paragraphs; who sleeps, or does anybody?"""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(count):
            titles = ["garden", "floods", "opens", "sleeps"]
            random.shuffle(titles)
            context = [(title, [sentence(random, 4), sentence(random, 4)]) for title in titles]
            facts = []
            for animal, place in enumerate(random.choice(4, 2, replace=False)):
                number = int(random.integers(2))
                context[place][1][number][random.integers(4)] = ["cat", "dog"][animal]
                facts.append((titles[place], number))
            joined = [(t, [" ".join(own) + " ." for own in sentences]) for t, sentences in context]
            asked = [("when?", "dog"), ("why?", "yes")][index % 3 == 0]
            row = {"id": f"h{index}", "question": asked[0], "answer": asked[1], "text": joined}
            file.write(json.dumps(row | {"evidence": facts}) + "\n")
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


def summed(path: Path, count: int = 40, words: int = 12) -> Path:
    """JSON lines: a cat or a dog is in the text; asked when, say which, asked why, say it twice."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(count):
            animal, made = ["cat", "dog"][index % 2], sentence(random, words)
            made[random.integers(words)] = animal
            queries = [
                {"query": "when?", "answer": f"the {animal} is in the house ."},
                {"query": "why?", "answer": f"the {animal} and the {animal} ."},
            ]
            line = {"id": f"d{index}", "text": " ".join(made), "queries": queries}
            file.write(json.dumps(line) + "\n")
    return path


_DATA = {
    "classify": (labelled, "animals.csv", {"text": "body", "label": "animal"}),
    "spans": (asked, "asked.jsonl", {}),
    "choice": (offered, "offered.jsonl", {"answers": "answer"}),
    "coref": (told, "told.jsonl", {}),
    "mlm": (documents, "documents.jsonl", {}),
    "multihop": (hopping, "hopping.jsonl", {"answers": "answer"}),
    "summarize": (summed, "summed.jsonl", {}),
}


def recipe(name: str, folder: Path, **changes: Any) -> Finetuning:
    """A recipe at toy size, from a tiny checkpoint; names may have __ for a dot."""
    task = FINETUNING[name]().task
    masked = task == "mlm"
    if task == "summarize":
        source = tiny_writer(folder / "source")
    else:
        source = tiny_checkpoint(folder / "source", masked=masked)
    write, file, columns = _DATA[task]
    data = write(folder / file)
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
        "packed": True,
        "precision": "no",
    }
    if masked:
        settings |= {"updates": 4, "warmup": 0.0, "evaluation.every": 0, "evaluation.limit": 0}
        settings |= {"model.length": 32, "model.window": 8, "save_every": 0}
    if task == "summarize":
        settings |= {"writing.longest": 12, "writing.beams": 2}
    made = {key.replace("__", "."): value for key, value in changes.items()}
    return change(FINETUNING[name](), settings | made)


def all_splits(path: Path) -> dict[str, str]:
    """Settings by which the same examples are in every split: of few texts none could be drawn."""
    return dict.fromkeys(("data__train", "data__valid", "data__test"), str(path))


def by_heart(path: Path) -> dict[str, Any]:
    """Settings by which a few examples are learned, and asked for, by heart."""
    return {**all_splits(path), "epochs": 60.0, "evaluation__every": 0, "model__length": 80}
