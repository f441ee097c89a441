"""Runs before anything imports Triton: without a GPU its kernels are interpreted, and everywhere
uninitialised memory is NaN, so that an element nobody wrote cannot pass for a result."""

import os
import sys

# Tests run side by side and on tiny tensors: more threads than cores would slow them tenfold. What
# they start inherits it, and Inductor compiles without processes of its own.
os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings
from interpreter import quicken

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    quicken()

torch.set_num_threads(1)

# Examples are derived from the test, not drawn anew: a red build stays red.
settings.register_profile(
    "longspan",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("longspan")


@pytest.fixture(autouse=True, scope="session")
def _poisoned_memory():
    """`torch.empty` returns NaN; operations without a deterministic form only warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _forgotten_graphs():
    """Graphs are counted by function, and the forwards of all models share transformers' wrapper:
    without forgetting, the ninth model compiled in a session would be refused."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run in this session."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def on_device(device):
    """For tests that compare with formulas: what they make without saying where is made there."""
    if device.type == "cpu":
        yield  # as it is anyway, and faster
    else:
        with device:
            yield
