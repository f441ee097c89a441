"""The fused kernels against the oracle: interpreted on the CPU, for real where there is a GPU."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ops.cases import FEATURES, Case, assert_within_budget, cases, run

pytest.importorskip("triton", reason="Triton is not installed")

from torch._dynamo.testing import CompileCounter

from longspan import visibility, window_attention
from longspan.ops.rows import global_positions
from longspan.ops.window import triton

ON_GPU = torch.cuda.is_available()
# The interpreter's bfloat16 products are wrong, and it needs seconds for a GPU's microseconds.
DTYPES = (
    [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
)
PLAIN = Case(2, 70, 2, 2, 16, (9, 4), (1, 1))


EXAMPLES = [
    PLAIN,
    PLAIN.with_(dilation=(1, 3), window=(20, 0), global_share=0.1, padding="holes"),
    PLAIN.with_(batch=1, documents=4, global_share=0.2, dropout_p=0.3, key_heads=1),
    PLAIN.with_(tokens=1, window=(0, 0), global_share=1.0),
    PLAIN.with_(tokens=100, window=(300, 300), global_share=0.9, batch=1),
    # Head sizes that newer GPUs fetch by their copy engine.
    PLAIN.with_(tokens=150, head_dim=64, window=(70, 20), global_share=0.03, padding="right"),
    PLAIN.with_(tokens=150, head_dim=32, batch=1, documents=3, dropout_p=0.2, dilation=(1, 2)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EXAMPLES, ids=range(len(EXAMPLES)))
def test_chosen_cases(case, dtype, device):
    assert_within_budget(case, "triton", dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@given(data=st.data())
@settings(max_examples=25 if ON_GPU else 3, phases=(Phase.explicit, Phase.generate))
def test_within_the_error_budget(feature, dtype, device, data):
    case = data.draw(cases(feature, *((300, 4) if ON_GPU else (60, 2))))
    assert_within_budget(case, "triton", dtype, device)


LARGE = PLAIN.with_(batch=5, tokens=40, global_share=0.1, padding="right", dropout_p=0.3)


@pytest.mark.parametrize("case", [LARGE, LARGE.with_(key_heads=1, dilation=(1, 2)), PLAIN])
def test_large_batches_are_cut(case, device, monkeypatch):
    """Into as many rows as a GPU's grid has room for; dropout drops what it drops uncut."""
    whole = run(case, "triton", torch.float32, device)
    calls = _launches(monkeypatch, 2 * case.heads)
    cut = run(case, "triton", torch.float32, device)
    assert calls == [2, 2, 1] * 2 if case.batch == 5 else [2] * 2  # forward, backward
    for one, other in zip(cut, whole, strict=True):
        assert torch.equal(one, other)


def test_large_batches_are_cut_with_rows_from_elsewhere(device, monkeypatch):
    """And with queries, keys and values in one tensor."""
    given = LARGE.inputs(torch.float32, device)
    at = global_positions(given["masks"]["global_mask"] * given["masks"]["attention_mask"])
    rows = torch.randn(5, at.shape[1], 2, 16, device=device)
    leaves = [torch.stack(given["tensors"], dim=2).requires_grad_(), rows.requires_grad_()]
    seen = visibility(leaves[0], **given["masks"])
    options = {"window": (9, 4), "visibility": seen, "global_rows": (rows, at), "dropout_p": 0.3}

    def call():
        torch.manual_seed(0)
        out = window_attention(leaves[0], **options, backend="triton")
        return [out, *torch.autograd.grad(out, leaves, given["grad"])]

    whole = call()
    _launches(monkeypatch, 4)
    for one, other in zip(call(), whole, strict=True):
        assert torch.equal(one, other)


def test_large_batches_are_no_graphs_of_their_own(device, monkeypatch):
    calls = _launches(monkeypatch, 4)
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def call(query):
        return window_attention(query, query, query, window=8, backend="triton")

    for batch in (5, 6, 7, 8):
        query = torch.randn(batch, 20, 2, 16, device=device)
        calls.clear()
        out = call(query)
        assert sum(calls) == batch
        assert max(calls) == 2
        reference = window_attention(query, query, query, window=8, backend="reference")
        torch.testing.assert_close(out, reference)
    assert counter.frame_count == 1


def _launches(monkeypatch, most: int) -> list[int]:
    """The batch rows of each launch from here on, with so much room in the grid."""
    calls = []
    heavy = triton._heavy  # asked once in each launch, forward and backward
    monkeypatch.setattr(triton, "MOST_STREAMS", most)
    monkeypatch.setattr(triton, "_heavy", lambda q, *a: calls.append(q.shape[0]) or heavy(q, *a))
    return calls


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torchs_float32_setting_is_followed(precision, device):
    """Set through the newer of torch's two interfaces, after which reading the older one fails."""
    exact = run(PLAIN, "reference", torch.float64, device)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        ours = run(PLAIN, "triton", torch.float32, device)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    loose = precision == "tf32" and ON_GPU
    for truth, got in zip(exact, ours, strict=True):
        error = (got.double() - truth).abs().max()
        assert error < (2e-2 if loose else 2e-5)


# Each kind of call on a GPU; interpreted, the one that uses most, on fewer tokens.
KINDS = [
    ((100, 0), (1, 2), "right", 0.05, None),
    ((40, 40), (1, 1), "none", None, None),
    ((17, 64), (3, 1), "none", 0.02, 5),
]
SIZES = [
    Case(1, 333 if ON_GPU else 40, 2, 2, head_dim, *kind, seed=head_dim)
    for head_dim in (16, 32, 48, 64, 80, 96, 128, 160, 256)
    for kind in (KINDS if ON_GPU else KINDS[:1])
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SIZES, ids=lambda c: f"{c.head_dim}-{c.window}-{c.padding}")
def test_every_head_size(case, dtype, device):
    assert_within_budget(case, "triton", dtype, device)


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t.itemsize == 2], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "dilation"),
    [(32, (1, 1)), (64, (1, 1)), (128, (1, 1)), (64, (2, 3)), (128, (3, 3))],
)
def test_the_copy_engine_fetches_the_same(head_dim, dilation, dtype, device, monkeypatch):
    """Small calls do not use it on a GPU, so here it is switched on and off by hand."""
    from longspan.ops.window import triton

    batch, tokens = (2, 150) if ON_GPU else (1, 90)
    case = Case(batch, tokens, 2, 1, head_dim, (70, 20), dilation, "right", global_share=0.03)
    given = []
    for heavy in (False, True):
        monkeypatch.setattr(triton, "_heavy", lambda *call, heavy=heavy: heavy)
        given.append(run(case, "triton", dtype, device))
    for plain, bulk in zip(*given, strict=True):
        torch.testing.assert_close(bulk, plain, rtol=2e-2, atol=2e-2)
    assert_within_budget(case, "triton", dtype, device)


@pytest.mark.skipif(not ON_GPU, reason="interpreted calls are all treated as heavy ones")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("feature", FEATURES)
@given(data=st.data())
@settings(max_examples=8, phases=(Phase.explicit, Phase.generate))
def test_heavy_calls_are_within_the_error_budget(feature, head_dim, dtype, device, data):
    """What large calls use on a GPU (the copy engine, `hopper.forward`), on small ones."""
    from longspan.ops.window import triton

    case = data.draw(cases(feature, 300, 4)).with_(head_dim=head_dim)
    if data.draw(st.booleans()):  # the copy engine wants residue classes of one length
        step = math.lcm(*case.dilation)
        case = case.with_(tokens=max(1, case.tokens // step) * step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_heavy", lambda *call: True)
        assert_within_budget(case, "triton", dtype, device)


@pytest.mark.skipif(not ON_GPU, reason="needs the parallel hardware to be a test")
@pytest.mark.parametrize("share", [None, 0.01, 0.5])
def test_results_do_not_depend_on_the_run(share, device):
    case = Case(2, 3000, 4, 4, 64, (256, 256), (1, 1, 2, 2), "right", share, dropout_p=0.1)
    first = run(case, "triton", torch.bfloat16, device)
    for _ in range(3):
        for a, b in zip(first, run(case, "triton", torch.bfloat16, device), strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_captured_in_a_cuda_graph(device, monkeypatch):
    from longspan import window_attention
    from longspan.ops.window import triton

    monkeypatch.setattr(
        triton, "_heavy", lambda *call: True
    )  # what is captured takes heavy kernels
    shape = (2, 700, 4, 64)
    static = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
    mask = torch.ones(2, 700, dtype=torch.int64, device=device)
    chosen = torch.zeros_like(mask)
    chosen[:, :3] = 1

    def call():
        return window_attention(
            *static, window=128, dilation=(1, 1, 2, 2), attention_mask=mask, global_mask=chosen
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    # New numbers, another padding and more global tokens: nothing was baked in.
    for tensor in static:
        tensor.normal_()
    mask[1, 400:] = 0
    chosen[:, ::50] = 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call())


def test_far_offsets_do_not_overflow(device):
    """A row longer than 2^31 elements from its start: addresses must be 64 bits wide."""
    if not ON_GPU or torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs a GPU with 20 GB free")
    wide = torch.randn(1, 1_400_000, 3, 8, 64, device=device, dtype=torch.bfloat16)
    query, key, value = wide.unbind(2)  # token stride 1,536: the last row is 2.1e9 elements away
    from longspan import window_attention

    out = window_attention(query, key, value, window=64)
    tail = slice(-512, None)
    alone = window_attention(query[:, tail], key[:, tail], value[:, tail], window=64)
    torch.testing.assert_close(out[:, -400:], alone[:, -400:], rtol=1e-2, atol=1e-2)
