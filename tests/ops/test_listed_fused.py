"""The fused kernels of listed attention, beside the same in PyTorch's operations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

pytest.importorskip("triton", reason="Triton is not installed")

from longspan.layers.registry import build_attention, build_causal_attention
from longspan.ops import listed as module
from longspan.ops import listed_fused, tree, visibility
from longspan.ops.listed import listed_attention
from longspan.ops.window import dropout

pytestmark = pytest.mark.usefixtures("on_device")

# The interpreter's products of bfloat16 are garbage.
HALVES = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
SERVES = listed_fused.serves


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Also interpreted, where there is no GPU."""
    monkeypatch.setattr(module, "serves", lambda query: query.dtype != torch.float64)


def problem(
    queries: int,
    keys: int,
    count: int,
    size: int,
    *,
    width: int = 1,
    lists: tuple[int, int] = (1, 1),
    names: str = "",
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Tensors that learn, spans among them where they are asked for, and the rest of a call."""
    torch.manual_seed(queries)
    tensors = [torch.randn(2, n, 2, head_dim, dtype=torch.float64) for n in (queries, keys, keys)]
    listed = torch.randint(-1, -(-keys // width), (*lists, -(-queries // size), count))
    listed[..., 0, :] = -1
    asked: dict[str, Any] = {"listed": listed, "size": size, "width": width}
    if "between" in names:
        first = torch.randint(-3, queries + 2, listed.shape[2:])
        last = first + torch.randint(-1, queries + 2, listed.shape[2:])
        asked |= {"first": first, "last": last}
    if "valid" in names:
        asked["valid"] = torch.rand(2, keys) < 0.7
    if "spans" in names:
        tensors.append(torch.tensor([0.3, queries / 2 + 0.1], dtype=torch.float64))
        asked["ramp"] = 3
    if "causal" in names:
        asked["at"] = keys // 3
    return [t.to(dtype).requires_grad_() for t in tensors], asked


def exact(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def results(tensors: list[torch.Tensor], asked: dict[str, Any]) -> list[torch.Tensor]:
    """The output and all gradients."""
    query, key, value, *spans = tensors
    if spans:
        asked = asked | {"spans": spans[0]}
    out = listed_attention(query, key, value, **asked)
    torch.manual_seed(1)
    gradient = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, gradient)]


@settings(max_examples=12)
@given(
    queries=some.integers(1, 30),
    keys=some.integers(1, 50),
    count=some.integers(1, 70),
    size=some.integers(4, 40),
    lists=some.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    names=some.sampled_from(
        ["", "between", "valid", "between valid", "between spans", "causal", "causal valid"]
    ),
    head_dim=some.sampled_from([4, 8, 20]),
)
def test_single_keys(queries, keys, count, size, lists, names, head_dim):
    tensors, asked = problem(
        queries, keys, count, size, lists=lists, names=names, head_dim=head_dim
    )
    found, wanted = results(tensors, asked), results(exact(tensors), asked)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert not found[0][:, :size].any()
    assert not found[1][:, :size].any()


@settings(max_examples=8)
@given(
    queries=some.integers(1, 30),
    keys=some.integers(1, 90),
    count=some.integers(1, 4),
    size=some.integers(4, 40),
    width=some.integers(2, 70),
    lists=some.sampled_from([(1, 1), (2, 2)]),
    names=some.sampled_from(["", "valid", "between", "between spans", "causal", "causal valid"]),
)
def test_runs_of_keys(queries, keys, count, size, width, lists, names):
    tensors, asked = problem(queries, keys, count, size, width=width, lists=lists, names=names)
    for one, other in zip(results(tensors, asked), results(exact(tensors), asked), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "names"),
    [(1, "between"), (1, "between spans"), (40, "valid"), (1, "causal"), (40, "causal")],
)
def test_blocks_of_several_programs(width, names):
    tensors, asked = problem(150, 90, 3 if width > 1 else 70, 100, width=width, names=names)
    for one, other in zip(results(tensors, asked), results(exact(tensors), asked), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("names", ["", "between spans"])
def test_it_is_no_less_precise(dtype, names, monkeypatch):
    tensors, asked = problem(70, 90, 50, 40, names=names, head_dim=16, dtype=dtype)
    wanted = results(exact(tensors), asked)
    found = results(tensors, asked)
    monkeypatch.setattr(module, "serves", lambda query: False)
    plain = results(tensors, asked)
    for one, other, right in zip(found, plain, wanted, strict=True):
        off, allowed = ((t.double() - right).norm() for t in (one, other))
        assert off <= 2 * allowed


def test_tensors_are_taken_as_they_lie():
    """Of one projection, as a layer has them, and of a larger tensor."""
    torch.manual_seed(0)
    stacked = torch.randn(2, 20, 3, 2, 8)
    wide = torch.randn(2, 20, 2, 24)[..., ::3]
    _, asked = problem(20, 20, 9, 8)
    for tensors in ([*stacked.unbind(2)], [wide, *stacked.unbind(2)[1:]]):
        tensors = [t.requires_grad_() for t in tensors]
        for one, other in zip(results(tensors, asked), results(exact(tensors), asked), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "width"), [(16, 5), (36, 1), (16, 33)])
def test_what_was_dropped(size, width, monkeypatch):
    """By the seed, and the same backward, whose tiles may be smaller: the output is linear in the
    values."""
    forward = listed_fused._Tile(16, 32, 4, 1)
    tiles = {"forward": forward, "backward_query": forward._replace(slots=16)}
    tiles["backward_key"] = tiles["backward_query"]
    monkeypatch.setattr(listed_fused, "_tile", lambda kernel, *rest: tiles[kernel])
    monkeypatch.setattr(dropout, "new_seed", lambda device: torch.tensor([11]))
    tensors, asked = problem(40, 40, 5, size, width=width, names="valid")
    query, key, value = tensors
    out = listed_attention(query, key, value, **asked, dropout_p=0.4)
    assert not torch.equal(out, listed_attention(query, key, value, **asked))
    other = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, other)
    torch.testing.assert_close((grads[2] * value).sum(), (out * other).sum())
    # Against the weights written out.
    plain = module._key_by_key(module.Asked(**_filled(asked)), key)
    listed = plain.listed.expand(2, 2, -1, -1)
    slot = torch.arange(listed.shape[3])
    q, k, v = exact(tensors)
    at = listed.clamp(min=0)
    row = torch.arange(40)
    at = at[:, :, row // size]  # [batch, heads, queries, count]
    batch, head = torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(1, 2, 1, 1)
    scores = (q.transpose(1, 2)[:, :, :, None] * k[batch, at, head]).sum(-1) / 8**0.5
    there = listed[:, :, row // size] >= 0
    weights = scores.masked_fill(~there, -torch.inf).softmax(-1).nan_to_num(0.0)
    keep = dropout.kept(torch.tensor(11), batch * 2 + head, row.view(1, 1, -1, 1), slot, 0.4)
    wanted = ((weights * keep / 0.6)[..., None] * v[batch, at, head]).sum(3).transpose(1, 2)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    exact_grads = torch.autograd.grad(wanted, (q, k, v), other.double())
    for one, right in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-5)


def test_all_weights_may_be_dropped():
    tensors, asked = problem(20, 30, 9, 8)
    for one in results(tensors, asked | {"dropout_p": 1.0}):
        assert not one.any()


def _filled(asked: dict[str, Any]) -> dict[str, Any]:
    nothing = dict.fromkeys(("first", "last", "valid", "spans", "seed", "at"))
    filled: dict[str, Any] = {**nothing, "ramp": 1, "scale": 1.0, "dropout_p": 0.0, **asked}
    return filled


@pytest.mark.parametrize("names", ["valid", "between spans", "causal"])
def test_it_is_a_proper_operator(names):
    tensors, asked = problem(20, 30, 9, 8, names=names)
    spans = tensors[3] if len(tensors) > 3 else None
    call = module.Asked(**_filled({**asked, "spans": spans}))
    torch.library.opcheck(listed_fused.forward_op, (*tensors[:3], *call))


def test_it_compiles_whole():
    tensors, asked = problem(20, 30, 9, 8, names="between spans")

    def attend(query, key, value, spans):
        return listed_attention(query, key, value, **asked, spans=spans)

    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(found, attend(*tensors))


def test_who_serves_can_be_asked_while_compiling():
    about = {"dtype": torch.float16, "device": torch.device("cpu"), "shape": (1, 1, 1, 64)}
    like: Any = SimpleNamespace(is_cuda=True, **about)

    def ask(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if SERVES(like) else x

    compiled: Any = torch.compile(ask, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.zeros(1)), ask(torch.zeros(1)))


def test_nothing_to_attend():
    tensors, asked = problem(20, 30, 9, 8)
    query, key, value = (t[:0] for t in tensors)
    assert listed_attention(query, key, value, **asked).shape == (0, 20, 2, 8)


ENCODERS = [
    {"kind": "bigbird", "block": 4, "random": 2, "global_blocks": 1},
    {"kind": "blockwise", "block": 8},
    {"kind": "bp", "near": 2},
    {"kind": "poolingformer", "window": 4, "pooled_window": 16},
]
DECODERS = [
    {"kind": "sparse", "pattern": "fixed", "stride": 6, "summary": 2},
    {"kind": "bigbird", "block": 4, "random": 2, "global_blocks": 1},
    {"kind": "blockwise", "block": 8},
    {"kind": "poolingformer", "left": 4, "pooled_left": 8},
    {"kind": "adaptive_span", "longest": 9, "start": 0.5, "ramp": 3},
    {"kind": "bp", "near": 2},
]


@pytest.mark.parametrize(
    ("setting", "causal"), [*((one, False) for one in ENCODERS), *((one, True) for one in DECODERS)]
)
def test_layers_learn_the_same(setting, causal, monkeypatch):
    torch.manual_seed(0)
    hidden = torch.randn(2, 21, 16)
    layer: Any = (build_causal_attention if causal else build_attention)(16, 2, setting)
    about = {}
    if not causal:
        mask = torch.ones(2, 21, dtype=torch.long)
        mask[1, 15:] = 0
        about["seen"] = visibility(hidden, attention_mask=mask)
    found = []
    for fused in (True, False):
        for one in (module, tree):
            monkeypatch.setattr(one, "serves", lambda tensor, fused=fused: fused)
        done = layer(hidden, **about)
        out = done.out if causal else done
        grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
        found.append((out, *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
