"""The fused kernels of relative positions, beside the same in PyTorch's operations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

pytest.importorskip("triton", reason="Triton is not installed")

from longspan.layers.registry import build_causal_attention
from longspan.ops import relative as module
from longspan.ops import relative_fused
from longspan.ops.relative import Relative, banded_attention
from longspan.ops.window import dropout

pytestmark = pytest.mark.usefixtures("on_device")

# The interpreter's products of bfloat16 are garbage.
HALVES = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
SERVES = relative_fused.serves


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Also interpreted, where there is no GPU."""
    monkeypatch.setattr(module, "serves", lambda query: query.dtype != torch.float64)


@pytest.fixture
def small_chunks(monkeypatch):
    """Several of them in a small problem: along queries and batch rows."""
    monkeypatch.setattr(relative_fused, "_CHUNK", 1 << 11)
    monkeypatch.setattr(relative_fused, "_FEWEST", 16)


def problem(
    queries: int,
    memory: int,
    *,
    batch: int = 2,
    heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Query, key, value, table, content bias, position bias: they all learn."""
    torch.manual_seed(queries)
    tokens = queries + memory
    shapes = [(batch, n, heads, head_dim) for n in (queries, tokens, tokens)]
    shapes += [(tokens, heads, head_dim), (heads, head_dim), (heads, head_dim)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


def exact(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def results(tensors: list[torch.Tensor], **asked: Any) -> list[torch.Tensor]:
    """The output and all gradients."""
    out = banded_attention(*tensors[:3], relative=Relative(*tensors[3:]), **asked)
    torch.manual_seed(1)
    gradient = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, gradient)]


def compare(tensors: list[torch.Tensor], **asked: Any) -> None:
    for one, other in zip(results(tensors, **asked), results(exact(tensors), **asked), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=3e-5)


@settings(max_examples=8)
@given(
    queries=some.integers(1, 70),
    memory=some.sampled_from([0, 1, 30, 70]),
    left=some.one_of(some.none(), some.integers(0, 90)),
    dilation=some.sampled_from([1, 2, [1, 3], [3, 1]]),
    head_dim=some.sampled_from([4, 20, 64]),
)
def test_the_same_comes_out(queries, memory, left, dilation, head_dim):
    compare(problem(queries, memory, head_dim=head_dim), left=left, dilation=dilation)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("left", "dilation", "memory"),
    [(None, 1, 19), (7, 1, 0), (7, 1, 19), (30, 1, 0), (11, [1, 3], 19), (None, [4, 1], 0)],
)
def test_chunks_join_without_a_seam(left, dilation, memory):
    compare(problem(40, memory, batch=3), left=left, dilation=dilation)


def test_large_gradients_do_not_overflow():
    """As a scaled loss has them; the plain path allows as much."""
    tensors = problem(96, 0, head_dim=64, dtype=torch.float16)
    out = banded_attention(*tensors[:3], relative=Relative(*tensors[3:]), left=40)
    torch.manual_seed(1)
    for found in torch.autograd.grad(out, tensors, 4096 * torch.randn_like(out)):
        assert found.isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_scales_are_checked(scale):
    tensors = problem(5, 0)
    with pytest.raises(ValueError, match="scale must be a positive number"):
        banded_attention(*tensors[:3], relative=Relative(*tensors[3:]), left=3, scale=scale)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("left", "dilation"), [(None, 1), (30, 1), (20, [1, 3])])
def test_it_is_no_less_precise(dtype, left, dilation, monkeypatch):
    """A norm of each, since single entries of few are a matter of luck."""
    tensors = problem(150, 40, head_dim=32, dtype=dtype)
    asked = {"left": left, "dilation": dilation}
    wanted = results(exact(tensors), **asked)
    found = results(tensors, **asked)
    monkeypatch.setattr(module, "serves", lambda query: False)
    plain = results(tensors, **asked)
    for one, other, right in zip(found, plain, wanted, strict=True):
        assert one.dtype == dtype
        off, allowed = ((t.double() - right).norm() for t in (one, other))
        assert off <= 2 * allowed


def test_tensors_are_taken_as_they_lie():
    """Of one projection, as a layer has them, of a larger tensor, and with a longer table."""
    torch.manual_seed(0)
    stacked = torch.randn(2, 20, 3, 2, 8)
    wide = torch.randn(2, 20, 2, 24)[..., ::3]
    table, biases = torch.randn(50, 4, 8)[:, ::2], torch.randn(2, 2, 8)
    for tensors in ([*stacked.unbind(2)], [wide, *stacked.unbind(2)[1:]]):
        tensors = [t.requires_grad_() for t in (*tensors, table, *biases)]
        compare(tensors, left=6)
        dtable = results(tensors, left=6)[4]
        assert dtable[:7].any(-1).all()
        assert not dtable[7:].any()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("left", "step"), [(None, 1), (9, 1), (9, 2)])
def test_dropout(left, step, monkeypatch):
    """What is dropped follows from the seed, in the backward pass, too, and in any chunk."""
    seed = torch.tensor([11])
    monkeypatch.setattr(dropout, "new_seed", lambda device: seed)
    tensors = problem(26, 10)
    asked: dict[str, Any] = {"left": left, "dilation": step, "dropout_p": 0.4}
    found = results(tensors, **asked)
    assert not torch.equal(found[0], results(tensors, **asked | {"dropout_p": 0.0})[0])
    # Against the weights written out. Batch rows are residue classes of positions.
    q, k, v, table, content, place = exact(tensors)
    position = torch.arange(36)
    distance = position[10:, None] - position
    seen = (distance >= 0) & (distance % step == 0)
    if left is not None:
        seen &= distance <= left * step
    by_distance = torch.einsum("bihd,jhd->bhij", q + place, table)
    at = distance.clamp(min=0).expand(*by_distance.shape[:2], -1, -1)
    scores = torch.einsum("bihd,bjhd->bhij", q + content, k) + by_distance.gather(3, at)
    weights = (scores / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    batch, head = torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(1, 2, 1, 1)
    stream = (batch * step + position[10:, None] % step) * 2 + head
    keep = dropout.kept(seed, stream, (position[10:, None] - 10) // step, position // step, p=0.4)
    wanted = torch.einsum("bhij,bjhd->bihd", weights * keep / 0.6, v)
    torch.manual_seed(1)
    gradient = torch.randn(wanted.shape, dtype=torch.float64)
    grads = torch.autograd.grad(wanted, (q, k, v, table, content, place), gradient)
    for one, right in zip(found, (wanted, *grads), strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=3e-5)
    for one in results(tensors, **asked | {"dropout_p": 1.0}):
        assert not one.any()


def test_it_is_a_proper_operator():
    query, key, value, table, content, place = problem(20, 10)
    asked = relative_fused.Asked(None, 7, 1, 0, 0.3, 0.0)
    tensors = (query + content, query + place, key, value, table)
    tensors = tuple(t.detach().requires_grad_() for t in tensors)
    torch.library.opcheck(relative_fused.forward_op, (*tensors, *asked))


def test_it_compiles_whole():
    tensors = problem(20, 10)

    def attend(query, key, value, *positions):
        relative = Relative(*positions)
        return banded_attention(query, key, value, left=9, dilation=[1, 2], relative=relative)

    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(found, attend(*tensors))


def test_who_serves_can_be_asked_while_compiling():
    about = {"dtype": torch.float16, "device": torch.device("cpu"), "shape": (1, 1, 1, 64)}
    like: Any = SimpleNamespace(is_cuda=True, **about)

    def ask(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if SERVES(like) else x

    compiled: Any = torch.compile(ask, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.zeros(1)), ask(torch.zeros(1)))


def test_memory_is_that_of_a_chunk(monkeypatch):
    """However long the text: no tensor is larger than a chunk, or than what was given."""
    monkeypatch.setattr(relative_fused, "_CHUNK", 1 << 12)
    monkeypatch.setattr(relative_fused, "_FEWEST", 16)
    made = []
    product = relative_fused._placed

    def note(*arguments):
        made.append(product(*arguments))
        return made[-1]

    monkeypatch.setattr(relative_fused, "_placed", note)
    results(problem(150, 0, head_dim=4), left=20)
    assert len(made) > 4
    assert max(one.numel() for one in made) <= 1 << 12
    assert sum(one.numel() for one in made) >= 2 * 2 * 2 * 150 * 21  # forward and backward


def test_autocast_changes_nothing_inside(device):
    tensors = problem(20, 10)
    wanted = results(tensors, left=9)
    with torch.autocast(device.type, torch.bfloat16):
        found = results(tensors, left=9)
    torch.testing.assert_close(found, wanted)


def test_nothing_to_attend():
    query, key, value, *positions = problem(20, 10)
    relative = Relative(*positions)
    for batch, queries in ((0, 20), (2, 0)):
        asked = (t[:batch] for t in (query[:, :queries], key, value))
        out = banded_attention(*asked, left=9, relative=relative)
        assert out.shape == (batch, queries, 2, 8)


@pytest.mark.parametrize(
    "setting",
    [
        {"kind": "window", "left": 6, "position": "relative", "dilation": [1, 2]},
        {"kind": "xl", "memory": 9},
        {"kind": "xl", "memory": 9, "same_length": True, "clamp": 5},
        {"kind": "compressive", "memory": 6, "compressed": 4, "rate": 2},
    ],
    ids=str,
)
def test_layers_learn_the_same(setting, monkeypatch):
    torch.manual_seed(0)
    layer: Any = build_causal_attention(16, 2, setting)
    before, hidden = torch.randn(2, 17, 16), torch.randn(2, 21, 16)
    state = layer(before, keep_state=True).state
    found, calls = [], []
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *a: calls.append(1) or attend(*a))
    for fused in (True, False):
        monkeypatch.setattr(module, "serves", lambda tensor, fused=fused: fused)
        out = layer(hidden, 17, state).out
        grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()), allow_unused=True)
        found.append([out, *(t for t in grads if t is not None)])
    assert calls
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
