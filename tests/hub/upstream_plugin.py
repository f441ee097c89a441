"""A pytest plugin for transformers' own tests.

Their inputs are drawn anew in every run, some of them unlucky: here each test has its own seed, so
that two runs can be compared. With LONGSPAN_PATCH set, every Longformer and LED is patched when it
is built, whether from a config or from a checkpoint.
"""

import os
import random
import sys
import zlib
from typing import Any

import numpy as np
import torch

_patched = 0


def pytest_runtest_setup(item: Any) -> None:
    seed = zlib.crc32(item.nodeid.encode())
    common = sys.modules["tests.test_modeling_common"]
    for seeded in (random.seed, np.random.seed, torch.manual_seed, common.global_rng.seed):
        seeded(seed)


def pytest_configure() -> None:
    if "LONGSPAN_PATCH" not in os.environ:
        return
    from transformers.models.led import modeling_led
    from transformers.models.longformer import modeling_longformer

    _patch_when_built(
        modeling_longformer.LongformerPreTrainedModel, modeling_longformer.LongformerSelfAttention
    )
    _patch_when_built(modeling_led.LEDPreTrainedModel, modeling_led.LEDEncoderSelfAttention)


def _patch_when_built(base: Any, attention: type) -> None:
    from longspan import patch

    finish = base.post_init

    def post_init(self: Any) -> None:
        global _patched
        finish(self)
        if any(isinstance(module, attention) for module in self.modules()):  # not in a decoder
            patch(self)
            _patched += 1

    base.post_init = post_init


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"longspan patched {_patched} models")
