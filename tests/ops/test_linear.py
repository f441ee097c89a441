"""Linear attention: features that estimate without bias, and sums that equal the product formed."""

import math
from typing import Any

import pytest
import torch
from layers.family import compiles_anywhere

from longspan.layers.position import rotate
from longspan.ops import linear_sums as module
from longspan.ops.linear import (
    KERNELS,
    causal_linear_attention,
    draw_features,
    linear_attention,
    softmax_exponents,
)

pytestmark = pytest.mark.usefixtures("on_device")


def estimates(x, y, features, draws, seed=0, **how):
    """[draws] of the kernel exp(x . y / sqrt(d)) from as many sets of features."""
    how |= {"generator": torch.Generator().manual_seed(seed), "device": "cpu"}
    made = torch.stack([draw_features(features, x.shape[0], **how) for _ in range(draws)]).double()
    both = softmax_exponents(x, made) + softmax_exponents(y, made)
    return both.exp().mean(-1)


def pair(d=4):
    torch.manual_seed(5)
    return torch.randn(2, d, dtype=torch.float64, device="cpu")


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("features", [4, 6])
def test_the_kernel_is_right_in_the_mean(orthogonal, features):
    """Raw QR, with signs as the library has them, is off by many times what is allowed here."""
    x, y = pair()
    found = estimates(x, y, features, 6000, orthogonal=orthogonal)
    error = float(found.mean() - (x @ y / 2).exp())
    assert abs(error) < 4 * float(found.std()) / math.sqrt(len(found))


def test_features_at_right_angles_vary_less_and_more_of_them_less_still():
    x, y = pair()
    truth = (x @ y / 2).exp()

    def mean_square(features, orthogonal):
        found = estimates(x, y, features, 4000, orthogonal=orthogonal)
        return float((found - truth).square().mean())

    assert mean_square(4, True) < mean_square(4, False)
    few, many = mean_square(8, False), mean_square(64, False)
    assert 5 < few / many < 13  # 8 in the mean


def test_features_of_a_block_are_at_right_angles():
    drawn = draw_features(10, 4)
    assert drawn.shape == (10, 4)
    for block in drawn.split(4):
        across = block @ block.mT
        torch.testing.assert_close(across, across.diagonal().diag(), rtol=0, atol=1e-5)


def tensors(tokens, d=8, dtype=torch.float64, seed=0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, 2, tokens, 3, d, dtype=torch.float64)
    return [t.to(dtype) for t in (query, key, value)], draw_features(20, d).to(dtype)


def product(query, key, value, projection, kernel, causal, valid=None, eps=0.0):
    """The n x n matrix formed, with no stabiliser but what `eps` is relative to."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if kernel == "softmax":
        q, k = (softmax_exponents(t, projection) for t in (q, k))
        top = k if valid is None else k.masked_fill(~valid[:, None, :, None], -torch.inf)
        q = (q - q.amax(-1, keepdim=True)).exp() + eps
        k = (k - top.amax((-2, -1), keepdim=True)).exp() + eps
    elif kernel == "relu":
        q, k = ((t @ projection.mT).clamp(min=0) + 1e-3 for t in (q, k))
    else:
        q, k = (torch.where(t > 0, t + 1, t.exp()) for t in (q, k))
    scores = q @ k.mT
    if causal:
        scores = scores.tril()
    if valid is not None:
        scores = scores * valid[:, None, None]
    return ((scores / scores.sum(-1, keepdim=True)) @ v).transpose(1, 2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 50, 300])
@pytest.mark.parametrize("at_a_time", [1, 10**9])
def test_against_the_product_formed(kernel, tokens, at_a_time, monkeypatch):
    for name in ("_CPU_FEATURES", "_FEATURES"):
        monkeypatch.setattr(module, name, at_a_time)
    given, projection = tensors(tokens)
    given = [t.requires_grad_() for t in given]
    valid = torch.ones(2, tokens, dtype=torch.bool)
    valid[1, tokens // 2 + 1 :] = False
    for mask, eps in ((None, 1e-6), (valid, 1e-3)):
        found = linear_attention(*given, projection=projection, kernel=kernel, valid=mask, eps=eps)
        wanted = product(
            *given, projection=projection, kernel=kernel, causal=False, valid=mask, eps=eps
        )
        torch.testing.assert_close(found, wanted)
    out = torch.randn_like(given[0])
    both = (
        linear_attention(*given, projection=projection, kernel=kernel, valid=valid, eps=0.0),
        product(*given, projection=projection, kernel=kernel, causal=False, valid=valid),
    )
    for one, other in zip(*(torch.autograd.grad(t, given, out) for t in both), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 128, 129, 300, 700])
@pytest.mark.parametrize("at_a_time", [1, 2**15, 10**9])  # the second: two chunks
def test_the_scan_against_the_product_formed(kernel, tokens, at_a_time, monkeypatch):
    for name in ("_CPU_FEATURES", "_FEATURES"):
        monkeypatch.setattr(module, name, at_a_time)
    given, projection = tensors(tokens)
    given = [t.requires_grad_() for t in given]
    found, _ = causal_linear_attention(*given, projection=projection, kernel=kernel)
    wanted = product(*given, projection=projection, kernel=kernel, causal=True)
    torch.testing.assert_close(found, wanted)
    out = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, given, out), torch.autograd.grad(wanted, given, out), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_beside_what_was_before(kernel):
    given, projection = tensors(300)
    given = [t.requires_grad_() for t in given]
    first, second = ([t[:, own] for t in given] for own in (slice(0, 70), slice(70, 300)))
    _, before = causal_linear_attention(*first, projection=projection, kernel=kernel)
    found, _ = causal_linear_attention(*second, projection=projection, kernel=kernel, before=before)
    whole = product(*given, projection=projection, kernel=kernel, causal=True)[:, 70:]
    torch.testing.assert_close(found, whole)
    out = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, second, out), torch.autograd.grad(whole, given, out), strict=True
    ):
        torch.testing.assert_close(one, other[:, 70:])


def test_sums_do_not_fade_where_products_are_rounded(monkeypatch):
    """As by TF32, and coarser, so that it shows soon: what was summed up is rounded once, not with
    every token that follows."""
    given, projection = tensors(300, dtype=torch.float32)
    given[2] = given[2] + torch.arange(300)[:, None, None] / 100
    exact, _ = causal_linear_attention(*given, projection=projection)
    multiply = torch.bmm

    def coarse(tensor):
        return (tensor.view(torch.int32) + (1 << 16) & -(1 << 17)).view(torch.float32)

    def rounded(one, other):
        return multiply(coarse(one.contiguous()), coarse(other.contiguous()))

    monkeypatch.setattr(torch, "bmm", rounded)
    found, sums = [], None
    for token in range(300):
        own = [t[:, token : token + 1] for t in given]
        out, sums = causal_linear_attention(*own, projection=projection, before=sums)
        found.append(out)
    error = (torch.cat(found, 1) - exact)[:, -50:].norm() / exact[:, -50:].norm()
    assert 1e-4 < float(error) < 0.02


def test_sums_go_on_where_they_ended():
    given, projection = tensors(300)
    whole, last = causal_linear_attention(*given, projection=projection)
    out, sums = [], None
    for pieces in zip(*(t.split((1, 150, 149), dim=1) for t in given), strict=True):
        done, sums = causal_linear_attention(*pieces, projection=projection, before=sums)
        out.append(done)
    torch.testing.assert_close(torch.cat(out, 1), whole)
    assert sums is not None
    torch.testing.assert_close(sums.reference, last.reference)
    torch.testing.assert_close(sums.sums, last.sums)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_sum_to_one(causal):
    (query, key, _), projection = tensors(200)
    ones = torch.ones_like(query)
    out = (
        causal_linear_attention(query, key, ones, projection)[0]
        if causal
        else linear_attention(query, key, ones, projection)
    )
    torch.testing.assert_close(out, ones)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_positive(causal, kernel):
    """Of every key that is seen, however unlike the query: that is what the features are for."""
    (query, key, _), projection = tensors(8)
    one_hot = torch.eye(8, dtype=query.dtype)[None, :, None].expand_as(query)
    given = 3.0 * query, 3.0 * key, one_hot, projection
    attend = causal_linear_attention if causal else linear_attention
    weights: Any = attend(*given, kernel=kernel)
    weights = (weights[0] if causal else weights).transpose(1, 2)  # [..., query, key]
    seen = torch.ones(8, 8, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    assert bool((weights[..., seen] > 0).all())
    assert not weights[..., ~seen].any()


def test_later_keys_do_not_wipe_out_the_first():
    """Exponents of long keys are far below those of short ones: in float32 nothing would be left
    of the first 256 beside the others."""
    given, projection = tensors(400)
    key = torch.nn.functional.normalize(given[1], dim=-1)
    given[1] = torch.cat((key[:, :256] * 32.0, key[:, 256:]), 1)
    first = softmax_exponents(given[1][:, :256], projection).amax()
    assert float(first - softmax_exponents(given[1][:, 256:], projection).amax()) < -100
    wanted, _ = causal_linear_attention(*(t[:, :256] for t in given), projection=projection)
    narrow = [t.float() for t in given]
    found, _ = causal_linear_attention(*narrow, projection=projection.float())
    torch.testing.assert_close(found[:, :256].double(), wanted, rtol=0, atol=1e-3)
    assert float(wanted.abs().amin(-1).max()) > 0.1


@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_and_small_inputs_stay_finite(size, dtype):
    (query, key, value), projection = tensors(140, dtype=dtype)
    given = [t.detach().requires_grad_() for t in (query * size, key * size, value)]
    for out in (
        linear_attention(*given, projection=projection),
        causal_linear_attention(*given, projection=projection)[0],
    ):
        assert out.dtype == dtype
        assert out.isfinite().all()
        for grad in torch.autograd.grad(out.float().square().sum(), given):
            assert grad.isfinite().all()


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_long_queries_and_keys_cost_no_accuracy(size):
    """Most of what is left then is eps, relative to the largest exponent: so that has to be right
    to a fraction of 1 where it is the difference of numbers beyond 1e7."""
    (query, key, value), projection = tensors(300, d=64, dtype=torch.float32)
    given = query * size, key * size, value
    exact = linear_attention(*(t.double() for t in given), projection=projection.double())
    found = linear_attention(*given, projection=projection)
    assert float((found - exact).norm() / exact.norm()) < 1e-4


def test_many_features_come_close_to_softmax_attention():
    """Where scores are moderate: the estimate's variance grows exponentially with lengths."""
    (query, key, value), _ = tensors(40)
    query, key = query / 2, key / 2
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    exact = attention(*(t.transpose(1, 2) for t in (query, key, value))).transpose(1, 2)
    errors = []
    for features in (16, 4096):
        torch.manual_seed(0)
        projection = draw_features(features, 8).double()
        errors.append(float((linear_attention(query, key, value, projection) - exact).norm()))
    assert errors[1] < errors[0] / 4
    assert errors[1] < 0.1 * float(exact.norm())


def before_it(tokens, size, projection=None):
    """The weight that the token before a query gets, if both are turned so that it should have
    most: the mean over the later half of a text. By softmax attention, or by features."""
    place = torch.arange(tokens, dtype=torch.float64)[None]
    alike = torch.full((1, tokens, 1, 64), size, dtype=torch.float64)
    (query,) = rotate(alike, position=place - 1, base=10000.0)
    (key,) = rotate(alike, position=place, base=10000.0)
    if projection is None:
        scores = query[0, :, 0] @ key[0, :, 0].mT / 8
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    else:
        one_hot = torch.eye(tokens, dtype=torch.float64)[None, :, None]
        weights = causal_linear_attention(query, key, one_hot, projection)[0][0, :, 0]
    return float(weights.diagonal(-1)[tokens // 2 :].mean())


def test_the_token_before_gets_little_of_the_weight():
    """Which is why a language model of it learns late, the later the longer its rows are."""
    assert before_it(512, 4.0) > 0.95
    torch.manual_seed(0)
    projection = draw_features(256, 64).double()
    short, long = (max(before_it(n, s, projection) for s in (2.0, 3.0, 4.0)) for n in (128, 1024))
    assert long < short < 0.2


def test_half_precision_is_left_to_the_caller():
    """Under autocast sums and exponents are still those of float32."""
    given, projection = tensors(40, dtype=torch.float32)
    wanted = linear_attention(*given, projection=projection)
    with torch.autocast(projection.device.type, torch.bfloat16):
        torch.testing.assert_close(linear_attention(*given, projection=projection), wanted)


def test_an_unknown_kernel_is_named():
    given, projection = tensors(4)
    with pytest.raises(ValueError, match="kernel='tanh' is unknown; choose from softmax, relu"):
        linear_attention(*given, projection=projection, kernel="tanh")


def test_a_kernel_without_its_projection_is_named():
    given, _ = tensors(4)
    with pytest.raises(ValueError, match="kernel='relu' needs a projection: see draw_features"):
        causal_linear_attention(*given, kernel="relu")


def attended(given, projection, causal, **how):
    if causal:
        return causal_linear_attention(*given, projection=projection, **how)[0]
    return linear_attention(*given, projection=projection, eps=0.0, **how)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_a_projection_can_be_learned(kernel, causal):
    given, projection = tensors(200)
    projection.requires_grad_()
    found = attended(given, projection, causal, kernel=kernel)
    wanted = product(*given, projection=projection, kernel=kernel, causal=causal)
    out = torch.randn_like(found)
    grads = (torch.autograd.grad(t, projection, out)[0] for t in (found, wanted))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0.3, 1.0, 2.0])
def test_no_further_from_float64_than_the_product_formed(causal, size):
    (query, key, value), projection = tensors(300, d=16)
    wide = [size * query, size * key, value + 1.0]
    grad = torch.randn_like(query)

    def results(attend, dtype):
        given = [t.to(dtype).requires_grad_() for t in wide]
        out = attend(given, projection.to(dtype))
        return [out.detach(), *torch.autograd.grad(out, given, grad.to(dtype))]

    def formed(given, vectors):
        return product(*given, projection=vectors, kernel="softmax", causal=causal)

    exact = results(formed, torch.float64)
    narrow = results(formed, torch.float32)
    ours = results(lambda given, vectors: attended(given, vectors, causal), torch.float32)
    for truth, plain, found in zip(exact, narrow, ours, strict=True):
        allowed = 2 * float((plain - truth).norm()) + 1e-6 * float(truth.norm())
        assert float((found - truth).norm()) < allowed


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_stands_in_padding_does_not_matter(kernel):
    given, projection = tensors(70)
    valid = torch.ones(2, 70, dtype=torch.bool)
    valid[1, 40:] = False
    found = []
    for junk in (0.0, torch.nan):
        query, *others = (t.clone() for t in given)
        for tensor in others:
            tensor[1, 40:] = junk
        states = [t.requires_grad_() for t in (query, *others)]
        out = linear_attention(*states, projection=projection, kernel=kernel, valid=valid)
        found.append([out, *torch.autograd.grad(out.square().sum(), states)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives_are_refused(causal):
    given, projection = tensors(5)
    out = attended([t.requires_grad_() for t in given], projection, causal)
    with pytest.raises(RuntimeError, match="gradients can be taken once"):
        torch.autograd.grad(out.sum(), given, create_graph=True)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_mode_is_refused(causal):
    (query, *rest), projection = tensors(5)
    with pytest.raises(RuntimeError, match=r"none in forward mode \(jvp\)"):
        torch.func.jvp(
            lambda x: attended([x, *rest], projection, causal), (query,), (torch.ones_like(query),)
        )


def test_odd_inputs():
    given, projection = tensors(20)
    none = [t[:0] for t in given]
    assert linear_attention(*none, projection=projection).shape == (0, 20, 3, 8)
    assert causal_linear_attention(*none, projection=projection)[0].shape == (0, 20, 3, 8)
    mixed = [given[0].float(), *given[1:]]
    for causal in (False, True):
        wanted = attended([t.float() for t in given], projection.float(), causal)
        torch.testing.assert_close(attended(mixed, projection, causal), wanted)
    with pytest.raises(ValueError, match="must be of the same tokens"):
        causal_linear_attention(given[0][:, :10], *given[1:], projection=projection)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_operators_are_as_torch_wants_them(kernel):
    given, projection = tensors(130, dtype=torch.float32)
    given = [t.requires_grad_() for t in given]
    vectors = None if kernel == "elu" else projection
    valid = torch.rand(2, 130) < 0.7
    torch.library.opcheck(module.linear_op, (*given, vectors, valid, kernel, 1e-6))
    before = causal_linear_attention(*given, projection=projection, kernel=kernel)[1]
    for sums in ((None, None), before):
        torch.library.opcheck(module.causal_op, (*given, vectors, *sums, kernel, True))


@compiles_anywhere
@pytest.mark.parametrize("causal", [False, True])
def test_it_compiles_as_one_graph(causal):
    given, projection = tensors(300, dtype=torch.float32)
    given = [t.requires_grad_() for t in given]

    def call(*states):
        return attended(states, projection, causal).square()

    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    both = [
        [out, *torch.autograd.grad(out.sum(), given)] for out in (call(*given), compiled(*given))
    ]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)
