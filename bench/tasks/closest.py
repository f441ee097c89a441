"""HotpotQA's paragraphs put in order: those closest to the question first, by a checkpoint's own
embeddings, and no more than so many of them.

    python bench/tasks/closest.py MODEL IN.jsonl.xz OUT.jsonl [--keep 5]

A first stage that needs no training, for a checkpoint that was made to embed: questions and
paragraphs are read apart, their first tokens' last states compared. Right answers are not looked
at, so that what is left out counts as not found. Where rows have answers it also says what joint F1
lies between: that of the closest paragraph's title with the first sentences of the two closest,
which takes no training, and that of all that is right and stands in the paragraphs at all.
"""

import argparse
import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from longspan.data.tables import Row, read_rows
from longspan.tasks.hops import KINDS, read_hop
from longspan.tasks.measures import joint_scores
from longspan.tasks.start import find_source
from longspan.train.checkpoint import write_text

_AT_ONCE = 64
_COLUMNS = ("question", "context", "supporting_facts")
_NAMES = {"text": "context", "answers": "answer", "evidence": "supporting_facts"}


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """[texts, dim], of length 1; texts of like length are read together."""
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    found = torch.empty(len(texts), model.config.hidden_size)
    for first in range(0, len(order), _AT_ONCE):
        own = order[first : first + _AT_ONCE]
        given = tokenizer(
            [texts[place] for place in own],
            truncation=True,
            max_length=512,
            padding=True,
            return_tensors="pt",
        ).to(model.device)
        found[own] = model(**given).last_hidden_state[:, 0].float().cpu()
    return found / found.norm(dim=1, keepdim=True)


def read(path: str) -> list[dict[str, Any]]:
    rows = [dict(row.values) for row in read_rows(path)]
    if not rows:
        raise ValueError(f"{path} has no rows")
    for number, row in enumerate(rows, 1):
        missing = [name for name in _COLUMNS if name not in row]
        if missing:
            raise ValueError(f"{path}, row {number}: there is no {missing[0]!r}, as HotpotQA has")
    return rows


def bounds(row: dict[str, Any], order: list[int]) -> tuple[float, float]:
    """Joint F1 without training, and with everything found that is there."""
    hop = read_hop(Row("the input", row), _NAMES, answered=True)
    closest = [hop.paragraphs[place] for place in order[:2]]
    guess = [(one.title, 0) for one in closest if one.sentences]
    there = {(one.title, n) for one in hop.paragraphs for n in range(len(one.sentences))}
    stands = hop.kind != KINDS[0] or hop.places()
    return (
        joint_scores(closest[0].title, hop.answer, guess, hop.facts)["joint_f1"],
        joint_scores(hop.answer if stands else "", hop.answer, there & set(hop.facts), hop.facts)[
            "joint_f1"
        ],
    )


def main(source: str, path: str, target: Path, keep: int = 5) -> None:
    if keep < 1:
        raise ValueError(f"--keep {keep}: at least one paragraph has to be kept")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is no folder: make it first")
    rows = read(path)
    source = find_source(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModel.from_pretrained(source, dtype=torch.float32).eval().to(device)
    questions = embed(model, tokenizer, [row["question"] for row in rows])
    texts = [[f"{title} {''.join(said)}" for title, said in row["context"]] for row in rows]
    # Made questions share their paragraphs: each is read once.
    places = {text: place for place, text in enumerate(dict.fromkeys(chain(*texts)))}
    embedded = embed(model, tokenizer, list(places))
    paragraphs = [embedded[[places[text] for text in own]] for own in texts]
    kept, relevant = 0, 0
    found: list[tuple[float, float]] = []
    for row, question, own in zip(rows, questions, paragraphs, strict=True):
        facts = {title for title, _ in row["supporting_facts"]}
        relevant += sum(title in facts for title, _ in row["context"])
        order = (own @ question).argsort(descending=True)[:keep].tolist()
        if order and row.get("answer"):
            found.append(bounds(row, order))
        row["context"] = [row["context"][place] for place in order]
        kept += sum(title in facts for title, _ in row["context"])
    write_text(target, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{target}: {kept} of {relevant} paragraphs that matter are kept")
    if found:
        guessed, best = (sum(one) / len(found) for one in zip(*found, strict=True))
        print(f"joint F1 without training {guessed:.3f}, of all that is there {best:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the checkpoint: a folder or a hub name")
    parser.add_argument("rows", help="HotpotQA's questions, as JSON lines")
    parser.add_argument("target", type=Path, help="where to write them, as JSON lines")
    parser.add_argument("--keep", type=int, default=5, help="paragraphs of each question, 5")
    given = parser.parse_args()
    try:
        main(given.model, given.rows, given.target, given.keep)
    except (OSError, ValueError) as error:
        parser.error(str(error))
