"""`window_attention` as a citizen of PyTorch: compile, export, autocast, checkpointing, opcheck."""

import shutil

import pytest
import torch
from ops.cases import NATIVE, Case
from torch.utils.checkpoint import checkpoint

from longspan import window_attention
from longspan.ops.window import Pattern, autograd, visibility

ON_GPU = torch.cuda.is_available()
BACKEND = "triton" if ON_GPU else "blocked"
CASE = Case(2, 24, 2, 2, 16, (9, 4), (1, 2), padding="holes", global_share=0.1)


@pytest.mark.parametrize("backend", ["blocked", "triton", NATIVE])
def test_opcheck(backend, device):
    given = CASE.inputs(torch.float32, device)
    tensors = [t.requires_grad_() for t in given["tensors"]]
    seen = visibility(tensors[0], **given["masks"])
    numbers = (9, 4, [1, 2], 0.25, 0.0)
    torch.library.opcheck(
        autograd.forward_op, (*tensors, *seen, None, None, None, *numbers, True, backend)
    )
    rows = torch.randn(2, 3, 2, 16, device=device, requires_grad=True)
    at = torch.tensor([[4, 9, -1], [3, -1, -1]], device=device)
    torch.library.opcheck(
        autograd.forward_op, (*tensors, *seen, None, rows, at, *numbers, False, backend)
    )


@pytest.mark.parametrize("backend", ["blocked", "triton", NATIVE])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic, backend, device):
    def loss(q, k, v, mask, chosen):
        masks = {"attention_mask": mask, "global_mask": chosen}
        out = window_attention(q * 2, k, v, window=8, dilation=(1, 2), backend=backend, **masks)
        return (out * out).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (24, 17, 40):
        given = CASE.with_(tokens=tokens).inputs(torch.float32, device)
        masks = given["masks"]
        results = []
        for function in (loss, compiled):
            q, k, v = (t.clone().requires_grad_() for t in given["tensors"])
            value = function(q, k, v, masks["attention_mask"], masks["global_mask"])
            results.append([value, *torch.autograd.grad(value, (q, k, v))])
        for eager, fast in zip(*results, strict=True):
            torch.testing.assert_close(eager, fast)


def test_numbers_that_change_compile_without_a_graph_break(device):
    """From the second value on they are symbols, which not all of Python's functions take."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, scale, dropout_p):
        return window_attention(q, q, q, window=8, scale=scale, dropout_p=dropout_p)

    q = torch.randn(2, 24, 2, 16, device=device)
    for scale, dropout_p in ((0.2, 0.1), (0.3, 0.2), (0.4, 0.3)):
        torch.manual_seed(0)
        compiled = call(q, scale, dropout_p)
        torch.manual_seed(0)
        eager = window_attention(q, q, q, window=8, scale=scale, dropout_p=dropout_p)
        torch.testing.assert_close(compiled, eager)


@pytest.mark.skipif(
    not ON_GPU and shutil.which("g++") is None, reason="for a CPU, inductor writes C++; no g++ here"
)
def test_compiles_with_inductor(device):
    given = CASE.inputs(torch.float32, device)

    @torch.compile(fullgraph=True)
    def call(q, k, v):
        return window_attention(q, k, v, window=8, **given["masks"]).relu()

    eager = window_attention(*given["tensors"], window=8, **given["masks"]).relu()
    torch.testing.assert_close(call(*given["tensors"]), eager)


def test_exports_with_dynamic_length(device):
    class Module(torch.nn.Module):
        def forward(self, q, mask):
            return window_attention(q, q, q, window=8, attention_mask=mask)

    q = torch.randn(2, 40, 2, 16, device=device)
    mask = torch.ones(2, 40, dtype=torch.int64, device=device)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        Module(), (q, mask), dynamic_shapes={"q": {1: tokens}, "mask": {1: tokens}}
    )
    q = torch.randn(2, 93, 2, 16, device=device)
    mask = torch.ones(2, 93, dtype=torch.int64, device=device)
    mask[0, 50:] = 0
    torch.testing.assert_close(program.module()(q, mask), Module()(q, mask))


def test_autocast_decides_the_dtype(device):
    q = torch.randn(1, 40, 2, 16, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = window_attention(q, q.to(torch.bfloat16), q, window=8, backend="auto")
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_checkpointing_replays_dropout(device):
    given = CASE.with_(padding="none", global_share=None).inputs(torch.float32, device)

    def call(q, k, v):
        return window_attention(q, k, v, window=8, dropout_p=0.4, backend=BACKEND)

    grads = []
    for function in (call, lambda *t: checkpoint(call, *t, use_reentrant=False)):
        tensors = [t.clone().requires_grad_() for t in given["tensors"]]
        torch.manual_seed(3)
        out = function(*tensors)
        grads.append([out, *torch.autograd.grad(out, tensors, given["grad"])])
    for plain, replayed in zip(*grads, strict=True):
        assert torch.equal(plain, replayed)


def test_gradients_against_finite_differences():
    case = CASE.with_(tokens=8, heads=2, head_dim=2, window=(2, 1))
    given = case.inputs(torch.float64, torch.device("cpu"))
    tensors = [t.requires_grad_() for t in given["tensors"]]
    torch.autograd.gradcheck(
        lambda *t: window_attention(*t, **given["masks"], **case.options(), backend="blocked"),
        tensors,
    )


def test_pattern_groups_neighbouring_heads():
    pattern = Pattern(1, 1, (1, 1, 2, 2, 1), 1.0)
    assert pattern.head_groups() == [(0, 2, 1), (2, 4, 2), (4, 5, 1)]


@pytest.mark.parametrize("backend", ["reference", "blocked", "triton", NATIVE])
@pytest.mark.parametrize("share", [None, 0.1])
def test_one_tensor_instead_of_three(backend, share, device):
    """The same numbers, and one gradient in the place of three."""
    case = CASE.with_(global_share=share, tokens=40, dropout_p=0.1)
    given = case.inputs(torch.float32, device)
    options = {**given["masks"], **case.options(), "backend": backend}
    stacked = torch.stack(given["tensors"], dim=2).requires_grad_()
    results = []
    for tensors in (stacked.unbind(2), (stacked,)):
        torch.manual_seed(0)
        out = window_attention(*tensors, **options)
        results.append([out, *torch.autograd.grad(out, stacked, given["grad"])])
    for apart, together in zip(*results, strict=True):
        assert torch.equal(apart, together)


@pytest.mark.parametrize("backend", ["blocked", "triton", NATIVE])
def test_one_tensor_in_a_graph(backend, device):
    given = CASE.inputs(torch.float32, device)
    stacked = torch.stack(given["tensors"], dim=2).requires_grad_()
    seen = visibility(stacked[:, :, 0], **given["masks"])
    numbers = (9, 4, [1, 2], 0.25, 0.0, True, backend)
    tensors = (stacked, None, None, *seen, None, None, None)
    torch.library.opcheck(autograd.forward_op, (*tensors, *numbers))

    def loss(stacked):
        out = window_attention(stacked * 2, window=8, visibility=seen, backend=backend)
        return out.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(function(stacked), stacked)[0] for function in (loss, compiled)]
    torch.testing.assert_close(*grads)


def test_one_tensor_of_another_shape_is_named(device):
    with pytest.raises(ValueError, match=r"query must be all three.*got \(1, 9, 2, 16\)"):
        window_attention(torch.randn(1, 9, 2, 16, device=device), window=4)
    with pytest.raises(TypeError, match="value must be a torch"):
        window_attention(*torch.randn(2, 1, 9, 2, 16, device=device).unbind(), window=4)
