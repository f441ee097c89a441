"""Runs whose weights are sharded over processes, interrupted and gone on with.

To be started by torchrun with folders and recipes in turn, these as JSON. Accelerate shards where
there are GPUs only. On a CPU its state is told afterwards what it would have read from the
environment of a launch with FSDP; all that follows is its own and torch's.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from train.small import CORPUS, QUIET, Interrupting, StoppedError

from longspan.tasks.charlm import CharLM
from longspan.train import loop
from longspan.train.recipe import from_dict


class Sharding(Accelerator):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        plugin = FullyShardedDataParallelPlugin()
        if self.mixed_precision != "no":
            plugin.set_mixed_precision(self.mixed_precision)
        self.state.fsdp_plugin = plugin
        self.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


class Watching(Interrupting):
    """Sees before the first step that each process has its part of the weights."""

    seen = False

    def loss(self, model, batch, state):
        if not self.seen:
            whole = sum(parameter.numel() for parameter in model.parameters())
            own = sum(parameter.to_local().numel() for parameter in model.parameters())  # pyright: ignore
            assert own == pytest.approx(whole / torch.distributed.get_world_size(), rel=0.1)
            self.seen = True
        return super().loss(model, batch, state)


def main(folder: Path, settings: str) -> None:
    recipe = from_dict(json.loads(settings))
    broken = Watching(recipe, CORPUS)
    broken.stop_at = 10  # of two calls per step: in step 5, after the checkpoint of step 3
    with suppress(StoppedError):
        loop.train(recipe, broken, folder, console=QUIET)
    loop.train(recipe, CharLM(recipe, CORPUS), folder, console=QUIET, resume=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        loop.Accelerator = Sharding
    for folder, settings in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(Path(folder), settings)
