"""FSDP: the weights of a run in shards, and all else as without it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from train.small import CORPUS, QUIET, losses

from longspan.models import LongspanForCausalLM
from longspan.recipes import find
from longspan.recipes.shrink import shrink
from longspan.tasks.charlm import CharLM
from longspan.train import checkpoint
from longspan.train.loop import train
from longspan.train.recipe import Recipe, change

# As `accelerate launch` sets them by a configuration with FSDP.
ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "OMP_NUM_THREADS": "1",
}


def recipe(name: str, **more: Any) -> Recipe:
    settings = {
        "model.hidden_dropout_prob": 0.0,
        "model.attention_probs_dropout_prob": 0.0,
        "data.kind": "python",
        "phases.0.batch": 4,
        "phases.0.steps": 6,
        "accumulate": 2,
        "save_every": 3,
        "sample_every": 4,
        **more,
    }
    made = change(shrink(find(name)), settings)
    return change(made, {"phases": made.to_dict()["phases"][:1]})


def launch(
    asked: dict[Path, Recipe], processes: int = 2, **environment: str
) -> subprocess.CompletedProcess:
    """Runs in folders, one after the other."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        processes = min(processes, torch.cuda.device_count())
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    own = {"PYTHONPATH": os.pathsep.join(sys.path)}
    if not on_gpu:
        own["ACCELERATE_USE_CPU"] = "true"
    given = [part for path, made in asked.items() for part in (path, json.dumps(made.to_dict()))]
    return subprocess.run(
        [sys.executable, *start, "-m", "train.sharded", *map(str, given)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **ENVIRONMENT, **own, **environment},
    )


REVERSIBLE = {"model.reversible": True, "model.half_residual": False}
NEAR = {
    "compressive-enwik8": {"rtol": 1e-4, "atol": 1e-6},  # AdamW, memories
    # Muon, which computes in bfloat16; evaluated with longer memories than trained with.
    "rival-xl": {"rtol": 0.02, "atol": 0.001},
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, by name."""
    folder = tmp_path_factory.mktemp("sharded")
    done = launch({folder / name: recipe(name) for name in NEAR})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "near"), NEAR.items())
def test_sharded_and_interrupted_a_run_is_the_same(name, near, sharded, tmp_path):
    made, one, two = recipe(name), tmp_path / "one", sharded / name
    train(made, CharLM(made, CORPUS), one, console=QUIET)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ends = [checkpoint.folder_of(run, made.steps) / name for run in (two, one)]
        torch.testing.assert_close(*(checkpoint.load_tensors(end) for end in ends), **near)
    model = LongspanForCausalLM.from_pretrained(checkpoint.find(two))
    assert model.config.architectures == ["LongspanForCausalLM"]
    assert "quick brown fox" in (two / "samples.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "environment", "message"),
    [
        ("rival-dense", {}, {"FSDP_VERSION": "1"}, "set fsdp_version to 2"),
        ("causal-routing", {}, {}, "layers that keep centroids"),
        ("causal-reformer", REVERSIBLE, {}, "reversible layers are called half by half"),
    ],
)
def test_what_cannot_be_sharded_is_named(name, settings, environment, message, tmp_path):
    done = launch({tmp_path: recipe(name, **settings)}, processes=1, **environment)
    assert done.returncode != 0
    assert message in done.stderr
