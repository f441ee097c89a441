"""Contenders solve the same problem: only then is comparing their times fair."""

import pytest
import torch
from torch import Tensor

from longspan.bench.attention import contenders
from longspan.bench.attention.cases import AttentionCase
from longspan.bench.attention.contenders import CONTENDERS
from longspan.bench.benchmark import PASSES

CPU = torch.device("cpu")


def solve(name: str, case: AttentionCase) -> Tensor:
    """The output of a contender, always [batch, tokens, heads, head_dim]."""
    torch.manual_seed(0)
    output = CONTENDERS[name].build(case, CPU).ready("forward")()
    assert isinstance(output, Tensor)
    heads_first = name in ("flex", "sdpa", "eager")
    return output.transpose(1, 2) if heads_first else output


def small_case(window: int = 32, count: int = 0) -> AttentionCase:
    return AttentionCase(256, heads=2, head_dim=16, window=window, globals=count, dtype="float32")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("count", [0, 3])
def test_flex_sees_what_we_see(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Uncompiled, FlexAttention computes the same, densely and without minutes of compiling.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    contenders._compiled_flex.cache_clear()
    case = small_case(count=count)
    try:
        torch.testing.assert_close(solve("flex", case), solve("longspan", case))
    finally:
        contenders._compiled_flex.cache_clear()


def test_unprepared_is_the_same() -> None:
    case = small_case(count=3)
    torch.testing.assert_close(solve("longspan-unprepared", case), solve("longspan", case))


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_dense_attention_is_the_widest_window(name: str) -> None:
    case = small_case(window=512)
    torch.testing.assert_close(solve(name, case), solve("longspan", case))


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("name", ["longspan-layer", "longformer-layer"])
def test_layers_give_gradients(name: str, count: int) -> None:
    case = AttentionCase(
        tokens=64, level="layer", heads=2, head_dim=16, window=32, globals=count, dtype="float32"
    )
    workload = CONTENDERS[name].build(case, CPU)
    for kind in PASSES:
        workload.ready(kind)()
    hidden = workload.leaves[0]
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape
    workload.clear()
    assert all(leaf.grad is None for leaf in workload.leaves)
