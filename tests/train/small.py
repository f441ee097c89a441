"""Text to train on, runs that stop in the middle, and what runs left behind."""

import json

import numpy as np
from rich.console import Console

from longspan.data.text import Corpus
from longspan.tasks.charlm import CharLM
from longspan.train import checkpoint

TEXT = np.frombuffer((b"the quick brown fox jumps over the lazy dog. " * 200), dtype=np.uint8)
CORPUS = Corpus(TEXT, TEXT[:400], TEXT[:400])
QUIET = Console(quiet=True)


def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {e["step"]: e["loss"] for e in entries if "split" not in e}


def weights(run):
    folder = checkpoint.find(run)
    assert folder is not None
    return checkpoint.load_tensors(folder / "model.safetensors")


class StoppedError(Exception):
    pass


class Interrupting(CharLM):
    """Stops the run in the middle of a step."""

    stop_at = 0

    def loss(self, model, batch, state):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == self.stop_at:
            raise StoppedError
        return super().loss(model, batch, state)
