"""The fused kernels for global rows against the oracle: interpreted, or for real on a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from longspan.ops import global_attention, global_positions, global_rows, visibility
from longspan.ops.rows import autograd, take_rows

triton = pytest.importorskip("longspan.ops.rows.triton", reason="Triton is not installed")

ON_GPU = torch.cuda.is_available()
# The interpreter's bfloat16 products are wrong.
DTYPES = (
    [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
)


@dataclass(frozen=True)
class Case:
    """Everything that defines a call but the tensors, which follow from the seed."""

    batch: int
    tokens: int
    slots: int
    heads: int
    head_dim: int
    dim: int
    causal: bool = False
    padding: str = "none"  # none, right, holes, all
    documents: int | None = None
    dropout_p: float = 0.0
    bias: bool = True
    given: bool = False  # the query comes from outside
    empty: int = 0  # slots of the last batch row without a token
    strided: bool = False
    seed: int = 0

    def inputs(self) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        inner = self.heads * self.head_dim
        order = torch.rand(self.batch, self.tokens, generator=draw).argsort(dim=1)
        positions = torch.full((self.batch, self.slots), -1)
        found = min(self.slots, self.tokens)
        positions[:, :found] = order[:, :found]
        if self.empty:
            positions[-1, -self.empty :] = -1
        masks = {}
        length = torch.randint(0, self.tokens + 1, (self.batch, 1), generator=draw)
        if self.padding == "right":
            masks["attention_mask"] = (torch.arange(self.tokens) < length).long()
        elif self.padding == "holes":
            share = torch.rand(self.batch, self.tokens, generator=draw)
            masks["attention_mask"] = (share < 0.6).long()
        elif self.padding == "all":
            masks["attention_mask"] = torch.zeros(self.batch, self.tokens).long()
        if self.documents is not None:
            cuts = torch.randint(0, self.tokens + 1, (self.documents - 1,), generator=draw)
            masks["cu_seqlens"] = torch.cat([torch.tensor([0, self.tokens]), cuts]).sort().values
        hidden = normal(self.batch, self.tokens, self.dim)
        if self.strided:
            hidden = normal(self.batch, self.dim, self.tokens).transpose(1, 2)
        return {
            "leaves": [hidden, normal(3 * inner, self.dim) / self.dim**0.5]
            + ([normal(3 * inner)] if self.bias else []),
            "grad": normal(self.batch, self.slots, self.heads, self.head_dim),
            "positions": positions,
            "masks": masks,
        }


def run(case: Case, backend: str, dtype: torch.dtype, via: torch.dtype, device) -> list[Tensor]:
    """Output and all gradients, computed in `dtype` on numbers that `via` can hold."""
    made = case.inputs()
    leaves = [t.to(via).to(device, dtype).requires_grad_() for t in made["leaves"]]
    hidden, weight = leaves[:2]
    bias = leaves[2] if case.bias else None
    positions = made["positions"].to(device)
    masks = {k: v.to(device) for k, v in made["masks"].items()}
    options = {
        "positions": positions,
        "seen": visibility(hidden, **masks),
        "causal": case.causal,
        "dropout_p": case.dropout_p,
        "backend": backend,
    }
    torch.manual_seed(case.seed)  # all draw the same seed for dropout
    if case.given:
        inner = case.heads * case.head_dim
        query_weight, key_weight, value_weight = weight.split(inner)
        query_bias, _, value_bias = (None,) * 3 if bias is None else bias.split(inner)
        query = linear(take_rows(hidden, positions), query_weight, query_bias)
        query = query.unflatten(-1, (case.heads, -1))
        out = global_attention(query, hidden, key_weight, value_weight, value_bias, **options)
    else:
        out = global_rows(hidden, weight, bias, heads=case.heads, **options)
    assert (out.shape, out.dtype) == (made["grad"].shape, dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, made["grad"].to(device, dtype))]


def assert_within_budget(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """At most twice as far from the float64 oracle as plain PyTorch in the same dtype."""
    exact = run(case, "plain", torch.float64, dtype, device)
    plain = run(case, "plain", dtype, dtype, device)
    ours = run(case, "triton", dtype, dtype, device)
    tiny = torch.finfo(dtype).eps
    largest = max(t.abs().max() for t in exact)
    for name, truth, baseline, got in zip(
        ("out", "dhidden", "dweight", "dbias"), exact, plain, ours, strict=False
    ):
        assert torch.isfinite(got).all(), f"{name} is not finite: {case}"
        allowed = 2 * (baseline.double() - truth).abs().max() + tiny * truth.abs().max() + 1e-5
        if name != "out":
            # The softmax gradient is a difference of numbers that were rounded, see ops.cases.
            allowed = allowed + 2 * tiny * largest
        error = (got.double() - truth).abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}: {case}"
    blank = (exact[0] == 0).all(dim=-1)
    assert (ours[0][blank] == 0).all(), f"rows that must be exactly zero: {case}"
    mask = case.inputs()["masks"].get("attention_mask")
    if mask is not None:
        assert (ours[1][(mask == 0).to(device)] == 0).all(), (
            f"gradients of padding are not zero: {case}"
        )


PLAIN = Case(2, 70, 3, 2, 16, 48)
EXAMPLES = [
    PLAIN,
    Case(1, 1, 1, 1, 4, 12),
    replace(PLAIN, dim=96, causal=True, padding="holes", empty=2),
    replace(PLAIN, padding="all"),
    replace(PLAIN, batch=1, documents=4, slots=9, dropout_p=0.3),
    replace(PLAIN, tokens=133, given=True, dropout_p=0.2, padding="right", bias=False),
    replace(PLAIN, given=True, strided=True, slots=20),
    # More global tokens than a program takes, and wider heads.
    replace(PLAIN, tokens=40, slots=21, head_dim=80, heads=1, dim=64, empty=3),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EXAMPLES, ids=range(len(EXAMPLES)))
def test_chosen_cases(case, dtype, device):
    assert_within_budget(case, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@settings(max_examples=40 if ON_GPU else 12, phases=(Phase.explicit, Phase.generate))
def test_within_the_error_budget(dtype, device, data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    packed = draw(False, True)
    case = Case(
        batch=1 if packed else draw(1, 2, 3),
        tokens=data.draw(st.integers(1, 90)),
        slots=draw(1, 2, 5),
        heads=draw(1, 2, 3),
        head_dim=draw(4, 10, 16),
        dim=draw(12, 16, 48, 80),
        causal=draw(False, True),
        padding=draw("none", "right", "holes"),
        documents=data.draw(st.integers(1, 5)) if packed else None,
        dropout_p=draw(0.0, 0.3),
        bias=draw(False, True),
        given=draw(False, True),
        empty=draw(0, 1),
        seed=data.draw(st.integers(0, 2**20)),
    )
    assert_within_budget(case, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "dim"), [(2, 48), (3, 96), (6, 384), (12, 768), (16, 1024)], ids=str
)
def test_every_width(heads, dim, dtype, device):
    if ON_GPU and dtype == torch.float32 and dim > 256:
        pytest.skip("exact float32 of this width is refused on a GPU")
    if not ON_GPU and (dim > 768 or (dim > 96 and dtype == torch.float32)):
        pytest.skip("takes the interpreter too long")
    case = Case(1, 300 if ON_GPU else 36, 1, heads, dim // heads, dim, padding="right", seed=dim)
    assert_within_budget(case, dtype, device)


@pytest.mark.parametrize("few", [0, 4], ids=["merged", "joined by their reader"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_pieces_of_a_long_sequence(few, dropout_p, device, monkeypatch):
    """Some of which hold nothing that may be seen."""
    monkeypatch.setattr(triton, "FEW_PARTS", few)
    case = Case(1, 700, 3, 2, 8, 24, documents=5, dropout_p=dropout_p, causal=True, seed=1)
    assert_within_budget(case, torch.float32, device)


@pytest.mark.skipif(not ON_GPU, reason="needs the parallel hardware to be a test")
@pytest.mark.parametrize("tokens", [512, 5000])
def test_results_do_not_depend_on_the_run(tokens, device):
    case = Case(3, tokens, 2, 12, 64, 768, padding="right", dropout_p=0.1)
    first = run(case, "triton", torch.bfloat16, torch.bfloat16, device)
    for _ in range(3):
        again = run(case, "triton", torch.bfloat16, torch.bfloat16, device)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_captured_in_a_cuda_graph(device):
    hidden = torch.randn(2, 700, 768, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3 * 768, 768, device=device, dtype=torch.bfloat16) / 28
    positions = torch.tensor([[0, 5], [0, -1]], device=device)

    def call():
        out = global_rows(hidden, weight, heads=12, positions=positions)
        return out, torch.autograd.grad(out.float().square().sum(), hidden)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    with torch.no_grad():
        hidden.normal_()
    positions[1, 1] = 600  # nothing was baked in
    graph.replay()
    torch.cuda.synchronize()
    for captured, fresh in zip(made, call(), strict=True):
        assert torch.equal(captured, fresh)


def arguments(device, given):
    case = replace(PLAIN, padding="right", empty=1)
    made = case.inputs()
    hidden, weight, bias = (t.to(device, torch.float32).requires_grad_() for t in made["leaves"])
    seen = visibility(hidden, attention_mask=made["masks"]["attention_mask"].to(device))
    query = None
    if given:
        query = torch.randn(2, 3, 2, 16, device=device, requires_grad=True)
        weight, bias = weight[32:].detach().requires_grad_(), None
    numbers = (2, False, 0.25, 0.0)
    tensors = (query, hidden, weight, bias, made["positions"].to(device))
    return (*tensors, seen.start, seen.stop, None, *numbers)


@pytest.mark.parametrize("query", [False, True], ids=["made", "given"])
def test_opcheck(query, device):
    torch.library.opcheck(autograd.forward_op, arguments(device, query))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic, device):
    weight = torch.randn(96, 48, device=device)

    def loss(hidden, mask, chosen):
        seen = visibility(hidden, attention_mask=mask)
        positions = global_positions(chosen, 4)
        about = {"heads": 2, "positions": positions, "seen": seen, "backend": "triton"}
        return global_rows(hidden * 2, weight, **about).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (70, 33):
        hidden = torch.randn(2, tokens, 48, device=device, requires_grad=True)
        mask = torch.ones(2, tokens, dtype=torch.int64, device=device)
        mask[1, 20:] = 0
        chosen = torch.zeros_like(mask)
        chosen[:, 3] = 1
        results = []
        for function in (loss, compiled):
            value = function(hidden, mask, chosen)
            results.append([value, *torch.autograd.grad(value, hidden)])
        for eager, fast in zip(*results, strict=True):
            torch.testing.assert_close(eager, fast)


def test_exports_with_dynamic_length(device):
    weight = torch.randn(96, 48, device=device)

    class Module(torch.nn.Module):
        def forward(self, hidden, positions):
            return global_rows(hidden, weight, heads=2, positions=positions, backend="triton")

    def inputs(tokens):
        positions = torch.tensor([[0, 7], [3, -1]], device=device)
        return torch.randn(2, tokens, 48, device=device), positions

    length = torch.export.Dim("length", min=8, max=4096)
    program = torch.export.export(
        Module(), inputs(40), dynamic_shapes={"hidden": {1: length}, "positions": None}
    )
    given = inputs(93)
    torch.testing.assert_close(program.module()(*given), Module()(*given))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_checkpointing(compiled, device):
    """Which hands out what was saved once only."""
    weight = torch.randn(96, 48, device=device)
    positions = torch.tensor([[0], [3]], device=device)
    hidden = torch.randn(2, 20, 48, device=device, requires_grad=True)

    def loss(hidden):
        out = global_rows(hidden, weight, heads=2, positions=positions, backend="triton")
        return out.square().sum()

    function = torch.compile(loss, backend="aot_eager") if compiled else loss
    truth = torch.autograd.grad(loss(hidden), hidden)
    again = checkpoint(function, hidden, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, hidden), truth)


def test_autocast_decides_the_dtype(device):
    """With float32 weights, as mixed precision has them."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    hidden = torch.randn(2, 20, 48, device=device, requires_grad=True)
    weight = torch.randn(96, 48, device=device, requires_grad=True)
    positions = torch.tensor([[0], [3]], device=device)
    with torch.autocast(device.type, dtype=dtype):
        out = global_rows(hidden, weight, heads=2, positions=positions, backend="triton")
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().sum(), (hidden, weight))
    assert all(grad.dtype == torch.float32 and grad.abs().sum() > 0 for grad in grads)


def test_backends_by_name(device):
    hidden, weight = torch.randn(1, 9, 16, device=device), torch.randn(48, 16, device=device)
    about = {"heads": 4, "positions": torch.zeros(1, 1, dtype=torch.int64, device=device)}
    ours, plain = (global_rows(hidden, weight, backend=b, **about) for b in ("triton", "plain"))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="'blocked' is unknown; choose from auto, triton, early"):
        global_rows(hidden, weight, backend="blocked", **about)
    with pytest.raises(ValueError, match="cannot serve this call: the kernels compute in float16"):
        global_rows(hidden.double(), weight.double(), backend="triton", **about)
    query = torch.randn(1, 1, 4, 4, device=device)
    with pytest.raises(ValueError, match="it projects late"):
        global_attention(
            query, hidden, weight[:16], weight[16:32], positions=about["positions"],
            late=False, backend="triton",
        )  # fmt: skip
    wide = torch.randn(1, 2, 4096, device=device)
    with pytest.raises(ValueError, match=r"4096 numbers in torch\.float32 is above"):
        global_rows(wide, torch.randn(48, 4096, device=device), backend="triton", **about)
    everyone = torch.ones(2, 9, dtype=torch.int64, device=device)
    seen = visibility(hidden.expand(2, -1, -1), attention_mask=everyone)
    with pytest.raises(ValueError, match="visibility describes a batch of 2 x 9 tokens"):
        global_rows(hidden, weight, seen=seen, **about)


def test_nothing_to_attend_to(device):
    hidden, weight = torch.randn(2, 9, 16, device=device), torch.randn(48, 16, device=device)
    positions = torch.empty(2, 0, dtype=torch.int64, device=device)
    out = global_rows(hidden, weight, heads=4, positions=positions, backend="triton")
    assert out.shape == (2, 0, 4, 4)
