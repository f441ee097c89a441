"""Model contenders do what they stand for, on the same batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.bench.benchmark import Settings
from longspan.bench.measure import measure
from longspan.bench.models import contenders
from longspan.bench.models.cases import ModelCase
from longspan.bench.models.contenders import CONTENDERS

CPU = torch.device("cpu")
CASE = ModelCase(
    tokens=64, batch=2, layers=2, hidden=32, heads=2, vocab=50, window=16, dtype="float32"
)
UNEVEN = replace(CASE, batch=3, shortest=5)
EVERYONE = [name for name in CONTENDERS if name != "longspan-int8"]  # which has no gradients


def states(name: str, case: ModelCase) -> Tensor:
    output = CONTENDERS[name].build(case, CPU).ready("forward")()
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("case", [CASE, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", EVERYONE)
def test_each_gives_states_and_gradients(name: str, case: ModelCase) -> None:
    workload = CONTENDERS[name].build(case, CPU)
    output = workload.ready("forward")()
    assert isinstance(output, Tensor)
    assert output.shape == workload.output.shape == (case.batch, case.tokens, case.hidden)
    workload.ready("forward+backward")()
    assert any(leaf.grad is not None and bool(leaf.grad.any()) for leaf in workload.leaves)
    workload.clear()
    assert all(leaf.grad is None for leaf in workload.leaves)
    # What is resident before the pass: its weights.
    size = 2 if name == "longspan-bfloat16" else 4
    assert workload.resident == size * sum(leaf.numel() for leaf in workload.leaves)


@pytest.mark.parametrize("name", ["longspan-bfloat16", "longspan-int8"])
def test_rounded_weights_are_those_of_the_same_model(name: str) -> None:
    exact, rounded = states("longspan", CASE), states(name, CASE).float()
    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()
    wide = replace(CASE, hidden=256)
    plain, small = (CONTENDERS[n].build(wide, CPU).resident for n in ("longspan", name))
    assert small < 0.6 * plain


@pytest.mark.parametrize("case", [CASE, UNEVEN], ids=["even", "uneven"])
def test_patched_equals_stock(case: ModelCase) -> None:
    stock, patched = states("longformer", case), states("longspan-patch", case)
    real = torch.arange(case.tokens) < torch.tensor(case.lengths)[:, None]
    torch.testing.assert_close(patched[real], stock[real], atol=2e-5, rtol=0)


def test_unpadded_equals_padded() -> None:
    padded, unpadded = states("longspan", UNEVEN), states("longspan-unpadded", UNEVEN)
    real = torch.arange(UNEVEN.tokens) < torch.tensor(UNEVEN.lengths)[:, None]
    torch.testing.assert_close(unpadded[real], padded[real], atol=2e-5, rtol=0)
    assert not unpadded[~real].any()


@pytest.mark.parametrize("name", ["longspan", "roberta", "modernbert"])
def test_compiled_layers_share_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, without a break, from one graph for all layers that are alike."""
    from torch._dynamo.utils import counters

    deep = replace(CASE, layers=4)
    plain = states(name, deep)
    # Compiling is for GPUs only, and inductor would take minutes on a CPU.
    eager = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: eager(self, backend="aot_eager", **how)
    )
    on_gpu = contenders._compile

    def compile_anyway(parts: Any, device: torch.device, **how: Any) -> None:
        on_gpu(parts, torch.device("cuda"), **how)

    monkeypatch.setattr(contenders, "_compile", compile_anyway)
    counters.clear()
    torch.testing.assert_close(states(name, deep), plain, atol=2e-5, rtol=0)
    assert not counters["graph_break"]
    # The embeddings and a layer; ModernBERT's first layer, its narrow and wide ones differ.
    graphs = {"longspan": 2, "roberta": 2, "modernbert": 4}
    assert counters["stats"]["unique_graphs"] == graphs[name]
    torch.compiler.reset()


def test_checkpointing_is_switched_on() -> None:
    model: Any = contenders._ours(replace(CASE, checkpointing=True), CPU)
    assert model.gradient_checkpointing
    assert model.training
    workload = CONTENDERS["longspan"].build(replace(CASE, checkpointing=True), CPU)
    plain = CONTENDERS["longspan"].build(CASE, CPU)
    for one in (workload, plain):
        torch.manual_seed(1)  # the same gradient arrives at both
        one.ready("forward+backward")()
    for mine, theirs in zip(workload.leaves, plain.leaves, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.slow
def test_weights_count_as_memory() -> None:
    settings = Settings("cpu", threads=1, rounds=1, seconds=0.1)
    wide = replace(CASE, vocab=200_000)
    (point,) = measure(wide, "forward", [CONTENDERS["longspan"]], settings)
    assert point.mib is not None
    assert point.mib > 200_000 * 32 * 4 / 2**20


def test_uneven_lengths_are_drawn_once_and_for_all() -> None:
    assert UNEVEN.lengths == replace(UNEVEN).lengths
    assert all(5 <= n <= 64 for n in UNEVEN.lengths)
    assert UNEVEN.real_tokens == sum(UNEVEN.lengths) < UNEVEN.places
    assert CASE.real_tokens == CASE.places == 128
    assert CASE.tokens_per_second(ms=1.0) == 128_000
