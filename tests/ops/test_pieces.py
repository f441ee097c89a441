"""Attention piece by piece, as the operations that are made of it have it."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from longspan.ops import fading, listed, relative
from longspan.ops.fading import fading_attention
from longspan.ops.listed import listed_attention
from longspan.ops.relative import Relative, banded_attention

DTYPE = torch.float64


def by_fading(query, key, value, dropout_p=0.0):
    spans = torch.tensor([3.3, 9.0], dtype=DTYPE)
    return fading_attention(query, key, value, spans, ramp=4, reach=12, dropout_p=dropout_p)


def by_positions(query, key, value, dropout_p=0.0):
    torch.manual_seed(2)
    table = Relative(*(torch.randn(*shape, dtype=DTYPE) for shape in ((13, 2, 4), (2, 4), (2, 4))))
    return banded_attention(query, key, value, left=12, relative=table, dropout_p=dropout_p)


def by_lists(query, key, value, dropout_p=0.0):
    blocks = torch.arange(10)[:, None] * 4 + torch.arange(-8, 4)
    blocks = torch.where((blocks >= 0) & (blocks < key.shape[1]), blocks, -1)
    return listed_attention(query, key, value, blocks[None, None], size=4, dropout_p=dropout_p)


OPERATIONS = pytest.mark.parametrize("operation", [by_fading, by_positions, by_lists])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(fading, "_BLOCK", 8)
    monkeypatch.setattr(relative, "_BLOCK", 8)
    monkeypatch.setattr(relative, "_LARGEST_BLOCK", 8)
    for name in ("_CPU_SCORES", "_SCORES"):
        monkeypatch.setattr(listed, name, 100)
    monkeypatch.setattr(listed, "_TIMES", 10**9)


def problem(batch=1):
    torch.manual_seed(0)
    return (torch.randn(batch, 40, 2, 4, dtype=DTYPE, requires_grad=True) for _ in range(3))


@OPERATIONS
def test_what_was_dropped_is_dropped_again(operation):
    """An output is linear in the values: the same weights have to be in both passes. Whoever draws
    numbers next finds them where they were."""
    query, key, value = problem()
    out = operation(query, key, value, dropout_p=0.4)
    weight = torch.randn_like(out)
    forward, before = (out * weight).sum(), torch.get_rng_state()
    (gradient,) = torch.autograd.grad(forward, value)
    torch.testing.assert_close((gradient * value).sum(), forward)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(out, operation(query, key, value))


@OPERATIONS
def test_what_is_not_asked_for_may_be_left_out(operation):
    """Values alone learn, or nobody does."""
    query, key, value = problem()
    wanted = torch.autograd.grad(operation(query, key, value).square().sum(), value)
    query, key = query.detach(), key.detach()
    out = operation(query, key, value)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), value), wanted)
    with torch.no_grad():
        assert torch.equal(operation(query, key, value), out)


@OPERATIONS
def test_the_backward_pass_has_the_precision_of_the_forward_pass(operation):
    """It runs outside of the autocast that the forward pass ran in."""
    found = []
    for inside in (True, False):
        query, key, value = problem()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = operation(query.float(), key.float(), value.float())
            if inside:
                found.append(torch.autograd.grad(out.float().square().sum(), value))
        if not inside:
            found.append(torch.autograd.grad(out.float().square().sum(), value))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@OPERATIONS
def test_second_derivatives_are_refused(operation):
    """Not left out, as they would be of a sum of which another part has them."""
    query, key, value = problem()
    out = operation(query, key, value)
    with pytest.raises(RuntimeError, match="gradients can be taken once"):
        torch.autograd.grad(out.sum(), query, create_graph=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scores", [800, 10**9])
def test_what_many_blocks_add_to_a_key_is_added_up_precisely(scores, compiled, monkeypatch):
    """Blocks that all list the same keys are dense attention to these."""
    monkeypatch.setattr(listed, "_CPU_SCORES", scores)
    torch.manual_seed(0)
    tensors = [torch.randn(1, n, 2, 8).bfloat16() for n in (400, 4, 4)]
    weight = torch.randn_like(tensors[0]) + 0.5
    blocks = torch.arange(4).expand(1, 1, 100, 4)

    def by_blocks(query, key, value):
        return listed_attention(query, key, value, blocks, size=4)

    def plain(*tensors):
        return scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors)).transpose(1, 2)

    def gradients(operation, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        return torch.autograd.grad(operation(*leaves), leaves, weight.to(dtype))

    if compiled:
        by_blocks = torch.compile(by_blocks, backend="aot_eager", fullgraph=True)
    exact = gradients(plain, DTYPE)
    found, allowed = gradients(by_blocks, torch.bfloat16), gradients(plain, torch.bfloat16)
    for one, other, right in zip(found, allowed, exact, strict=True):
        assert (one - right).norm() <= 2 * (other - right).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [5, 24])
def test_pieces_that_know_their_gradients_are_as_exact(dtype, head_dim, monkeypatch):
    """With lists for each head, keys that nobody may see, and queries that see nothing."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 43, 3, head_dim).to(dtype) for _ in range(3)]
    weight = torch.randn_like(tensors[0])
    listed_keys = torch.randint(-1, 43, (1, 3, 11, 9))
    listed_keys[:, 1, 4] = -1
    valid = torch.arange(43) % 5 != torch.tensor([[1], [7]])

    def gradients(scores, dtype):
        monkeypatch.setattr(listed, "_CPU_SCORES", scores)
        leaves = query, key, value = [t.to(dtype).requires_grad_() for t in tensors]
        out = listed_attention(query, key, value, listed_keys, size=4, valid=valid)
        return [out, *torch.autograd.grad(out, leaves, weight.to(dtype))]

    found, exact = gradients(1, dtype), gradients(10**9, DTYPE)
    assert not found[0][:, 16:20, 1].any()
    assert not found[1][:, 16:20, 1].any()
    for one, other, right in zip(found, gradients(10**9, dtype), exact, strict=True):
        assert (one - right).norm() <= 2 * (other - right).norm() + 1e-7 * right.norm()
