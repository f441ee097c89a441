"""The `native` backend against the float64 oracle: every feature, dtype and instruction set."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.cases import FEATURES, Case, assert_within_budget, cases, run

from longspan.ops.window import native, window_attention
from longspan.ops.window.native import build

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"native: {native.unavailable()}"
)
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BUSY = Case(
    2, 330, 4, 2, 40, (70, 33), (1, 1, 2, 3), padding="holes", global_share=0.05, dropout_p=0.2
)


# `make fuzz` asks for many more examples, and for new ones each time.
FUZZ = int(os.environ.get("LONGSPAN_FUZZ", "0"))


@pytest.fixture(params=native.targets() or ["none"])
def target(request, monkeypatch):
    monkeypatch.setenv("LONGSPAN_NATIVE_TARGET", request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
@given(data=st.data())
@settings(max_examples=25)
def test_within_the_budget(feature, dtype, data):
    heads = (1, 16, 17, 24, 64)
    case = data.draw(cases(feature, most_tokens=200, head_dims=heads))
    assert_within_budget(case, "native", dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(target, dtype):
    for case in (BUSY, BUSY.with_(global_rows=False, strided=True, window=(5, 0), head_dim=64)):
        assert_within_budget(case, "native", dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_heads_at_a_time(dtype, monkeypatch):
    """As the backward pass takes them in half precision where there are many tokens."""
    monkeypatch.setattr(native, "_SLICE", 500)
    assert len(native._slices(2, 330 * 2)) == 2
    assert_within_budget(BUSY, "native", dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [3, 64, 80, 256, 300])
def test_head_sizes(dim, dtype):
    case = Case(1, 200, 2, 1, dim, (64, 64), (1, 1), global_share=0.02)
    assert_within_budget(case, "native", dtype, CPU)


@pytest.mark.parametrize("window", [(700, 700), (1500, 0), (0, 650)])
def test_windows_of_many_tiles(window):
    """Scores of more than one group of tiles, and chunks that all reach the same keys."""
    for share in (None, 0.3, 1.0):
        case = Case(1, 1400, 2, 2, 8, window, (1, 1), global_share=share, padding="right")
        assert_within_budget(case, "native", torch.float32, CPU)


def test_documents_with_a_global_token_each():
    case = Case(1, 900, 2, 2, 16, (8, 8), (1, 2), documents=40, global_share=0.1)
    assert_within_budget(case, "native", torch.float32, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_any_number_of_threads(dtype):
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            long = BUSY.with_(batch=1, tokens=1100, heads=2, key_heads=1, dilation=(1, 2))
            results.append([run(case, "native", dtype, CPU) for case in (BUSY, long)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def relaid(tensor, order, gaps):
    """The same numbers as a view of NaN: dimensions in another order, with gaps behind each."""
    shape = [tensor.shape[i] + gap for i, gap in zip((*order, 3), gaps, strict=True)]
    room = torch.full(shape, torch.nan, dtype=tensor.dtype)
    room = room.permute([*(order.index(i) for i in range(3)), 3])
    view = room[tuple(slice(size) for size in tensor.shape)]
    return view.copy_(tensor).detach().requires_grad_()


@given(data=st.data())
@settings(max_examples=FUZZ or 40, derandomize=not FUZZ)
def test_fuzz_shapes_and_strides(data):
    """Any shape is within the budget, and any layout in memory gives the same bits."""
    dtype = data.draw(st.sampled_from(DTYPES))
    dims = (1, 2, 7, 16, 31, 48, 64, 65, 130)
    case = data.draw(cases(most_tokens=500, head_dims=dims)).with_(strided=False)
    assert_within_budget(case, "native", dtype, CPU)
    inputs = case.inputs(dtype, CPU)
    layout = st.tuples(
        st.permutations([0, 1, 2]), st.lists(st.integers(0, 3), min_size=4, max_size=4)
    )
    tensors = [relaid(t, *data.draw(layout)) for t in inputs["tensors"]]
    grad = relaid(inputs["grad"], *data.draw(layout))
    torch.manual_seed(case.seed)
    out = window_attention(*tensors, **inputs["masks"], **case.options(), backend="native")
    theirs = [out.detach(), *torch.autograd.grad(out, tensors, grad)]
    for a, b in zip(run(case, "native", dtype, CPU), theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_stay_finite(dtype):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64, generator=draw).to(dtype) for _ in range(3))
    tensors = [t.requires_grad_() for t in (q * 100, k, v)]
    mask = torch.rand(1, 300, generator=draw) < 0.5
    out = window_attention(
        *tensors, window=32, attention_mask=mask, global_mask=mask, backend="native"
    )
    for result in (out, *torch.autograd.grad(out.sum(), tensors)):
        assert result.isfinite().all()


def test_what_is_not_a_number_shows_where_it_is_seen():
    q, k, v = (torch.randn(1, 200, 1, 16) for _ in range(3))
    k[0, 100] = torch.nan
    out = window_attention(q, k, v, window=20, backend="native")
    bad = out.isnan().any(-1)[0, :, 0].nonzero().flatten()
    assert bad.tolist() == list(range(90, 111))


def test_numbers_of_half_precision_survive():
    """Every float16 and bfloat16 goes through the kernel unchanged when it is the only value."""
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
        value = bits.view(dtype)
        value = value[value.isfinite() & ((value == 0) | (value.abs() >= 2.0**-126))]
        value = value[: value.numel() // 16 * 16].view(1, -1, 1, 16)
        zero = torch.zeros_like(value)
        out = window_attention(zero, zero, value, window=0, backend="native")
        assert torch.equal(out, value)


def test_auto_prefers_it():
    q = torch.randn(1, 50, 2, 16)
    auto = window_attention(q, q, q, window=8)
    assert torch.equal(auto, window_attention(q, q, q, window=8, backend="native"))
    with pytest.raises(ValueError, match=r"native.*not torch.float64"):
        window_attention(q.double(), q.double(), q.double(), window=8, backend="native")


def test_an_unknown_instruction_set_is_named(monkeypatch):
    monkeypatch.setenv("LONGSPAN_NATIVE_TARGET", "mmx")
    q = torch.randn(1, 5, 1, 16)
    with pytest.raises(ValueError, match=r"'mmx' cannot run here; choose from .*plain"):
        window_attention(q, q, q, window=2, backend="native")


def test_a_library_from_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(build, "source_hash", lambda: "something else")
    native._load.cache_clear()
    try:
        reason = native.unavailable()
        assert reason is not None
        assert "built from other sources" in reason
    finally:
        native._load.cache_clear()
