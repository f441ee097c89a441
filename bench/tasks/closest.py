"""HotpotQA's paragraphs put in order: those closest to the question first, by a checkpoint's own
embeddings, and no more than so many of them.

    python bench/tasks/closest.py MODEL IN.jsonl.xz OUT.jsonl [KEEP]

A first stage that needs no training, for a checkpoint that was made to embed: questions and
paragraphs are read apart, their first tokens' last states compared. Right answers are not looked
at, so that what is left out counts as not found.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from longspan.data.tables import read_rows
from longspan.train.checkpoint import write_text

_AT_ONCE = 64


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


def main(source: str, path: str, target: str, keep: str = "5") -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModel.from_pretrained(source, dtype=torch.float32).eval().to(device)
    rows = [dict(row.values) for row in read_rows(path)]
    questions = embed(model, tokenizer, [row["question"] for row in rows])
    texts = [f"{title} {''.join(said)}" for row in rows for title, said in row["context"]]
    paragraphs = embed(model, tokenizer, texts).split([len(row["context"]) for row in rows])
    kept, relevant = 0, 0
    for row, question, own in zip(rows, questions, paragraphs, strict=True):
        facts = {title for title, _ in row["supporting_facts"]}
        relevant += sum(title in facts for title, _ in row["context"])
        order = (own @ question).argsort(descending=True)[: int(keep)].tolist()
        row["context"] = [row["context"][place] for place in order]
        kept += sum(title in facts for title, _ in row["context"])
    write_text(Path(target), "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{target}: {kept} of {relevant} paragraphs that matter are kept")


if __name__ == "__main__":
    main(*sys.argv[1:])
