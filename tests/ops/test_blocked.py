"""The `blocked` backend against the dense reference: outputs and all gradients."""

import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.ops.window import blocked, window_attention


def run(inputs: list[Tensor], grad: Tensor, backend: str, **options) -> list[Tensor]:
    """Output and the gradients of query, key and value."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    torch.manual_seed(7)  # the seed of dropout: the same entries are dropped by every backend
    out = window_attention(*inputs, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def agree(inputs: list[Tensor], grad: Tensor, rtol: float = 1e-9, **options) -> list[Tensor]:
    ours = run(inputs, grad, "blocked", **options)
    theirs = run(inputs, grad, "reference", **options)
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    return ours


def tensors(batch, tokens, heads, key_heads, dim, *, dtype=torch.float64, strided=False, seed=0):
    make = torch.Generator().manual_seed(seed)

    def one(heads: int) -> Tensor:
        if strided:  # [batch, heads, dim, tokens] in memory, and only every second token of it
            x = torch.randn(batch, heads, dim, 2 * tokens, generator=make, dtype=torch.float64)
            return x.permute(0, 3, 1, 2)[:, ::2].to(dtype)
        return torch.randn(batch, tokens, heads, dim, generator=make, dtype=torch.float64).to(dtype)

    return [one(heads), one(key_heads), one(key_heads)], one(heads)


@st.composite
def problems(draw):
    """Inputs, a gradient, and options: small, but in every combination."""
    tokens = draw(st.one_of(st.integers(1, 20), st.integers(60, 260)))
    side = st.one_of(st.integers(0, 6), st.sampled_from([32, 64, 100, 1000]))
    key_heads, share = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 1)]))
    heads = key_heads * share
    step = st.sampled_from([1, 1, 1, 2, 3, 5, 40, 300])
    options: dict = {
        "window": (draw(side), draw(side)),
        "dilation": draw(st.one_of(step, st.lists(step, min_size=heads, max_size=heads))),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.0, 0.3])),
        "global_rows": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    if draw(st.booleans()):
        batch = 1
        cuts = draw(st.lists(st.integers(0, tokens), max_size=5))
        options["cu_seqlens"] = torch.tensor([0, *sorted(cuts), tokens])
    else:
        batch = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 1000))
    make = torch.Generator().manual_seed(seed)
    padding = draw(st.sampled_from(["none", "ends", "holes"]))
    if padding == "ends":
        bounds = (torch.rand(batch, 2, generator=make) * tokens * 0.5).long()
        where = torch.arange(tokens)
        mask = (where >= bounds[:, :1]) & (where < tokens - bounds[:, 1:])
        options["attention_mask"] = mask.long()
    elif padding == "holes":
        keep = draw(st.sampled_from([0.0, 0.5, 0.9]))
        options["attention_mask"] = torch.rand(batch, tokens, generator=make) < keep
    rate = draw(st.sampled_from([None, 0.0, 0.03, 0.3, 1.0]))
    if rate is not None:  # a different number of global tokens in each row
        options["global_mask"] = (torch.rand(batch, tokens, generator=make) < rate).long()
    inputs, grad = tensors(
        *(batch, tokens, heads, key_heads, draw(st.sampled_from([1, 4, 17]))),
        strided=draw(st.booleans()),
        seed=seed,
    )
    return inputs, grad, options


@settings(max_examples=200)
@given(problems())
def test_equals_the_reference(problem):
    inputs, grad, options = problem
    ours = agree(inputs, grad, **options)
    if "attention_mask" in options:
        padded = options["attention_mask"] == 0
        for result in ours:
            assert not result[padded].any(), "padding must be exactly zero, gradients included"


@settings(max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_without_the_fused_kernel(monkeypatch, problem):
    """What other devices run, here on the CPU, with uninitialised memory full of NaN."""
    monkeypatch.setattr(blocked, "_fused", lambda query, seed: False)
    monkeypatch.setattr(blocked, "_SCORES", 4000)  # many small pieces
    inputs, grad, options = problem
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what `empty` returns with NaN
    try:
        agree(inputs, grad, **options)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("padding", [0, 300])
@pytest.mark.parametrize("window", [(700, 700), (900, 0), (0, 650)])
def test_windows_longer_than_a_tile_of_the_fused_kernel(window, padding):
    """The kernel reads keys 512 at a time: some rows see nothing at first, others in the end."""
    inputs, grad = tensors(1, 1500, 2, 1, 8)
    mask = torch.ones(1, 1500, dtype=torch.long)
    mask[:, :padding] = 0
    chosen = torch.zeros_like(mask)
    chosen[:, ::333] = 1
    agree(inputs, grad, window=window, attention_mask=mask, global_mask=chosen)


@pytest.mark.parametrize("dim", [16, 24, 80, 256])
def test_head_sizes(dim):
    inputs, grad = tensors(1, 200, 2, 2, dim)
    agree(inputs, grad, window=64, global_mask=torch.arange(200)[None] % 50 == 0)


def test_many_small_documents_with_a_global_token_each():
    tokens, length = 1200, 6
    inputs, grad = tensors(1, tokens, 2, 2, 8)
    bounds = torch.arange(0, tokens + 1, length)
    chosen = torch.zeros(1, tokens, dtype=torch.long)
    chosen[0, bounds[:-1]] = 1
    agree(inputs, grad, window=4, cu_seqlens=bounds, global_mask=chosen)


def test_documents_do_not_pay_for_the_global_tokens_of_others(monkeypatch):
    """Pairs computed for global tokens grow with the tokens, not with documents x tokens."""

    def pairs(documents: int) -> int:
        seen = []
        forward = blocked._Tile.forward

        def count(tile, query, key, value):
            seen.append(query.shape[0] * query.shape[2] * key.shape[2])
            return forward(tile, query, key, value)

        tokens = documents * 32
        inputs, _ = tensors(1, tokens, 1, 1, 4, dtype=torch.float32)
        bounds = torch.arange(0, tokens + 1, 32)
        chosen = torch.zeros(1, tokens, dtype=torch.long)
        chosen[0, bounds[:-1]] = 1
        with monkeypatch.context() as patch:
            patch.setattr(blocked._Tile, "forward", count)
            window_attention(
                *inputs, window=2, cu_seqlens=bounds, global_mask=chosen, backend="blocked"
            )
        return sum(seen)

    assert pairs(512) < 4.5 * pairs(128)


@pytest.mark.parametrize("backend", ["auto", "blocked"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf, 3e38])
def test_nothing_in_padding_matters_to_short_rows(backend, what):
    inputs, grad = tensors(2, 40, 2, 2, 8, dtype=torch.float32)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 30:], mask[1, :7] = 0, 0
    clean = [t.masked_fill(mask[..., None, None] == 0, 0.0) for t in inputs]
    spoiled = [t.masked_fill(mask[..., None, None] == 0, what) for t in inputs]
    options = {"window": 128, "attention_mask": mask}
    for one, other in zip(
        run(clean, grad, backend, **options), run(spoiled, grad, backend, **options), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert not one[mask == 0].any()


def test_log_sum_exp_is_that_of_the_scores():
    from longspan.ops.window.pattern import Pattern, visibility

    (query, key, value), _ = tensors(2, 50, 2, 2, 8)
    chosen = torch.zeros(2, 50, dtype=torch.long)
    chosen[0, [0, 30]] = 1
    pattern = Pattern(50, 50, (1, 1), 0.5)
    seen = visibility(query, global_mask=chosen)
    _, lse = blocked.forward(query, key, value, seen, pattern, None)
    expected = (torch.einsum("bihd,bjhd->bhij", query, key) * 0.5).logsumexp(-1)
    torch.testing.assert_close(lse, expected, rtol=1e-12, atol=1e-12)
    assert lse.is_contiguous()


BUDGET_CASES = {
    "window": {"window": 128},
    "causal": {"window": (200, 0)},
    "dilated": {"window": 32, "dilation": (1, 3)},
    "global": {"window": 64, "global_mask": torch.arange(500)[None] % 40 == 0},
    "padded": {"window": 64, "attention_mask": torch.arange(500)[None] < 400},
    "dropout": {"window": 64, "dropout_p": 0.2},
}


@pytest.mark.parametrize("case", BUDGET_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_budget(dtype, case):
    """At most twice as far from float64 as the reference in the same dtype."""
    options = BUDGET_CASES[case]
    inputs, grad = tensors(1, 500, 2, 2, 64, dtype=dtype)
    oracle = run([t.double() for t in inputs], grad.double(), "reference", **options)
    theirs = run(inputs, grad, "reference", **options)
    ours = run(inputs, grad, "blocked", **options)
    for name, a, b, exact in zip(("out", "dq", "dk", "dv"), ours, theirs, oracle, strict=True):
        assert a.dtype == dtype
        error, allowed = (a - exact).abs().max(), (b - exact).abs().max()
        assert error <= 2 * allowed + 1e-7, f"{name}: {error:.2e} against {allowed:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_stay_finite(dtype):
    inputs, grad = tensors(1, 300, 2, 2, 64, dtype=dtype)
    inputs[0] = inputs[0] * 100
    mask = torch.rand(1, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    for result in run(inputs, grad, "blocked", window=32, attention_mask=mask, global_mask=mask):
        assert result.isfinite().all()


def test_autocast_changes_nothing():
    """With dropout, that is while training, products are those of matmul, which autocast rounds."""
    inputs, grad = tensors(1, 300, 2, 2, 16, dtype=torch.bfloat16)
    options = {"window": 32, "dropout_p": 0.1, "global_mask": torch.arange(300)[None] < 5}
    plain = run(inputs, grad, "blocked", **options)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(inputs, grad, "blocked", **options)
    for a, b in zip(plain, cast, strict=True):
        assert torch.equal(a, b)


def test_a_gradient_without_memory_of_its_own():
    """`out.sum()` hands back one number expanded to the whole shape."""
    inputs, _ = tensors(1, 100, 2, 1, 8)
    grad = torch.ones((), dtype=torch.float64).expand(1, 100, 2, 8)
    agree(inputs, grad, window=10)


MEMORY = """
import sys, torch
from pathlib import Path
from longspan.ops.window import window_attention

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

def step(tokens):
    q, k, v = (torch.randn(1, tokens, 4, 32, requires_grad=True) for _ in range(3))
    chosen = torch.zeros(1, tokens, dtype=torch.long)
    chosen[:, :: tokens // 16] = 1
    before = status("VmRSS")
    window_attention(q, k, v, window=64, global_mask=chosen, backend="blocked").sum().backward()
    return status("VmHWM") - before

torch.set_num_threads(1)
step(256)
print(step(int(sys.argv[1])))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_linear():
    tokens = 65536
    command = [sys.executable, "-c", MEMORY, str(tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    tensor = tokens * 4 * 32 * 4 / 1024  # KiB of one query, key or value
    # Output, its expanded gradient and three gradients, and the pieces at hand. One mask of all
    # pairs, a byte each, would be 128 tensors.
    assert int(done.stdout) < 10 * tensor


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_on_cuda(dropout_p):
    inputs, grad = tensors(2, 300, 4, 2, 16)
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) < 0.8
    agree(
        [t.cuda() for t in inputs],
        grad.cuda(),
        window=(20, 9),
        dilation=(1, 1, 2, 7),
        attention_mask=mask.cuda(),
        global_mask=(torch.arange(300) % 40 == 0).expand(2, 300).cuda(),
        dropout_p=dropout_p,
    )
