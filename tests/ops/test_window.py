"""What `window_attention` promises whichever backend serves it: its meaning and its errors."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.cases import FEATURES, NATIVE, Case, cases, run
from torch.nn.functional import scaled_dot_product_attention

from longspan import window_attention
from longspan.ops.window import visibility

BACKENDS = ["blocked", "triton", NATIVE]
PLAIN = Case(2, 70, 2, 2, 16, (9, 4), (1, 1))


def call(backend, tensors, **options):
    """Float32 for every backend: the interpreter and the GPU kernels know no float64."""
    return window_attention(*tensors, backend=backend, **options)


def tensors(tokens, device, heads=2, head_dim=16, batch=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, heads, head_dim)
    return [torch.randn(shape, generator=draw).to(device) for _ in range(3)]


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_window_over_everything_is_dense_attention(backend, device):
    q, k, v = tensors(50, device)
    dense = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    dense = dense.transpose(1, 2)
    everyone = torch.ones(1, 50, dtype=torch.int64, device=device)
    for out in (
        call(backend, (q, k, v), window=98),
        call(backend, (q, k, v), window=(60, 80)),
        call(backend, (q, k, v), window=(1, 1), global_mask=everyone),
    ):
        torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("window", [(4, 0), (3, 5)])
def test_influence_reaches_exactly_the_window(backend, dilation, window, device):
    """A token changes the rows that may see it and no other: receptive field and causality."""
    tokens, moved = 41, 20
    q, k, v = tensors(tokens, device)
    before = call(backend, (q, k, v), window=window, dilation=dilation)
    k, v = k.clone(), v.clone()
    k[:, moved] += 1.0
    v[:, moved] += 1.0
    after = call(backend, (q, k, v), window=window, dilation=dilation)
    changed = (before != after).flatten(2).any(2)[0].nonzero().flatten().tolist()
    left, right = window
    assert changed == [moved + dilation * step for step in range(-right, left + 1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_global_tokens_do_not_leak_the_future(backend, device):
    tokens, moved = 40, 25
    q, k, v = tensors(tokens, device)
    chosen = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    chosen[:, [3, moved, 30]] = 1
    before = call(backend, (q, k, v), window=(4, 0), global_mask=chosen)
    k[:, moved:] += 1.0
    v[:, moved:] += 1.0
    after = call(backend, (q, k, v), window=(4, 0), global_mask=chosen)
    assert torch.equal(before[:, :moved], after[:, :moved])
    assert (before[:, moved:] != after[:, moved:]).any(dim=(0, 2, 3)).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_rows_of_global_tokens_can_be_given(backend, device):
    """They replace what the op would compute, get their gradient, and shut off that of the op."""
    q, k, v = (t.requires_grad_() for t in tensors(40, device, batch=2))
    chosen = torch.zeros(2, 40, dtype=torch.int64, device=device)
    chosen[0, [3, 30]] = chosen[1, 7] = 1
    at = torch.tensor([[3, 30, -1], [7, -1, -1]], device=device)
    rows = torch.randn(2, 3, 2, 16, device=device, requires_grad=True)
    grad = torch.randn(2, 40, 2, 16, device=device)
    options = {"window": (5, 4), "global_mask": chosen}

    out = call(backend, (q, k, v), global_rows=(rows, at), **options)
    given = torch.autograd.grad(out, (q, k, v, rows), grad)
    for row in (0, 1):
        for slot, place in enumerate(at[row].tolist()):
            want = grad[row, place] if place >= 0 else torch.zeros_like(grad[0, 0])
            assert torch.equal(given[3][row, slot], want)
            assert place < 0 or torch.equal(out[row, place], rows[row, slot])

    without = call("reference", (q, k, v), global_rows=False, **options)
    there = chosen.bool()
    assert (without[there] == 0).all()
    torch.testing.assert_close(out[~there], without[~there], rtol=1e-4, atol=1e-5)
    plain = torch.autograd.grad(without, (q, k, v), grad)
    for ours, theirs in zip(given, plain, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for wrong in ((rows[:, :2], at), (rows, at.float()), (rows, at[:1])):
        with pytest.raises(ValueError, match="global rows must be"):
            call(backend, (q, k, v), global_rows=wrong, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_the_same_as_separate(backend, device):
    lengths = [17, 1, 40, 12]
    q, k, v = tensors(sum(lengths), device)
    chosen = torch.zeros(1, sum(lengths), dtype=torch.int64, device=device)
    chosen[:, [0, 5, 18, 30]] = 1
    cuts = torch.tensor([0, *lengths]).cumsum(0)
    options = {"window": (5, 3), "dilation": (1, 2)}
    packed = call(backend, (q, k, v), global_mask=chosen, cu_seqlens=cuts, **options)
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        part = slice(begin, end)
        alone = [t[:, part] for t in (q, k, v)]
        out = call(backend, alone, global_mask=chosen[:, part], **options)
        torch.testing.assert_close(packed[:, part], out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(backend, side, device):
    q, k, v = tensors(45, device)
    chosen = torch.zeros(1, 45, dtype=torch.int64, device=device)
    chosen[:, [0, 20]] = 1
    options = {"window": (6, 6), "dilation": (2, 1)}
    alone = call(backend, (q, k, v), global_mask=chosen, **options)
    for extra in (1, 19, 83):
        room = (extra, 0) if side == "left" else (0, extra)

        def pad(t, value=0.0, room=room):
            return torch.nn.functional.pad(t, (0, 0) * (t.dim() - 2) + room, value=value)

        mask = pad(torch.ones_like(chosen))
        # A huge number in the padding would show if it were ever looked at.
        padded = call(
            backend,
            [pad(t, 1e4) for t in (q, k, v)],
            attention_mask=mask,
            global_mask=pad(chosen, 1),
            **options,
        )
        torch.testing.assert_close(padded[mask.bool()][None], alone, rtol=1e-5, atol=1e-6)
        assert (padded[~mask.bool()] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_global_sets_are_per_example(backend, device):
    q, k, v = tensors(60, device, batch=3)
    chosen = torch.zeros(3, 60, dtype=torch.int64, device=device)
    chosen[0, 0] = 1
    chosen[2, [1, 7, 30, 59]] = 1
    batched = call(backend, (q, k, v), window=8, global_mask=chosen)
    for row in range(3):
        one = [t[row : row + 1] for t in (q, k, v)]
        alone = call(backend, one, window=8, global_mask=chosen[row : row + 1])
        torch.testing.assert_close(batched[row : row + 1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_global_key_in_the_window_counts_once(backend, device):
    """With equal scores the output is the mean of the distinct keys."""
    v = torch.randn(1, 9, 1, 16, device=device)
    zero = torch.zeros_like(v)
    chosen = torch.zeros(1, 9, dtype=torch.int64, device=device)
    chosen[:, [4, 5]] = 1
    out = call(backend, (zero, zero, v), window=2, global_mask=chosen)
    expected = v[:, [3, 4, 5]].mean(dim=1)  # row 4 sees 3, 4, 5 locally; 4 is global: all of them
    torch.testing.assert_close(out[:, 4], v.mean(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[:, 6], v[:, [4, 5, 6, 7]].mean(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        call(backend, (zero, zero, v), window=2)[:, 4], expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
@settings(max_examples=6)
def test_a_prepared_visibility_gives_the_same(backend, device, data):
    feature = data.draw(st.sampled_from(FEATURES))
    case = data.draw(cases(feature, most_tokens=60, most_heads=2)).with_(dropout_p=0.0)
    given_ = case.inputs(torch.float32, device)
    seen = visibility(given_["tensors"][0], **given_["masks"])
    for name in (backend, "reference"):
        direct = window_attention(
            *given_["tensors"], **given_["masks"], **case.options(), backend=name
        )
        prepared = window_attention(
            *given_["tensors"], visibility=seen, **case.options(), backend=name
        )
        assert torch.equal(direct, prepared)


def test_dropout_keeps_the_expectation_and_follows_the_seed(device):
    case = PLAIN.with_(tokens=64, window=(31, 31), dropout_p=0.25)
    backend = "triton" if device.type == "cuda" else "blocked"
    one = run(case, backend, torch.float32, device)
    again = run(case, backend, torch.float32, device)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(
        one[0], run(case.with_(dropout_p=0.0), backend, torch.float32, device)[0]
    )
    given_ = case.inputs(torch.float32, device)
    ones = torch.ones_like(given_["tensors"][2])
    torch.manual_seed(0)
    query, key, _ = given_["tensors"]
    trial = [call(backend, (query, key, ones), **case.options()).mean() for _ in range(30)]
    # Each output is the sum of kept weights / (1 - p), whose mean is 1.
    assert abs(torch.stack(trial).mean().item() - 1.0) < 0.01


def test_dropout_draws_are_uniform_and_independent():
    """A weak hash would show as correlated neighbours, rows or heads."""
    from longspan.ops.window.dropout import kept

    seed = torch.tensor([7])
    index = torch.arange(512)
    keep = kept(seed, torch.arange(4).view(4, 1, 1), index[:, None], index, 0.5).double() - 0.5
    total = keep.numel()
    bound = 5 * 0.5 / total**0.5
    assert abs(keep.mean()) < bound
    for shifted in (keep.roll(1, 0), keep.roll(1, 1), keep.roll(1, 2), keep.roll((1, 1), (1, 2))):
        assert abs((keep * shifted).mean()) < bound / 2


@pytest.mark.parametrize("backend", ["auto", "reference", *BACKENDS])
def test_no_tokens_and_no_examples(backend, device):
    for batch, tokens_ in ((0, 5), (2, 0)):
        q = torch.randn(batch, tokens_, 2, 16, device=device, requires_grad=True)
        out = window_attention(q, q, q, window=4, backend=backend)
        assert out.shape == q.shape
        out.sum().backward()
        assert q.grad is not None


GOOD = {"window": 4}
ROW, AT = torch.zeros(1, 1, 2, 16), torch.tensor([[0]])
WRONG = [
    ({"window": 3}, ValueError, "even"),
    ({"window": -2}, ValueError, "even and not negative"),
    ({"window": (1, -1)}, ValueError, "negative"),
    ({"window": (1, 2, 3)}, TypeError, "two ints"),
    ({"window": 2.0}, TypeError, "even int"),
    ({"window": True}, TypeError, "even int"),
    ({"dilation": 0}, ValueError, "at least 1"),
    ({"dilation": (1, 2, 3)}, ValueError, "3 entries for 2 heads"),
    ({"dilation": (1, 1.5)}, TypeError, "int"),
    ({"dilation": 1.5}, TypeError, "one int per head"),
    ({"window": torch.tensor([2, 2])}, TypeError, r"even int or .* got tensor\(\[2, 2\]\)"),
    ({"window": torch.tensor(4.0)}, TypeError, r"got tensor\(4.\)"),
    ({"dilation": torch.tensor([1, 2])}, TypeError, "one int per head, got tensor"),
    ({"scale": "x"}, ValueError, "positive"),
    ({"dropout_p": "x"}, ValueError, "number in .* got 'x'"),
    ({"dropout_p": None}, ValueError, "got None"),
    ({"global_rows": None}, TypeError, "True, False or two tensors .* got None"),
    ({"global_rows": ("a", "b")}, TypeError, "two tensors"),
    ({"global_rows": (ROW, AT, AT)}, TypeError, "two tensors"),
    ({"global_rows": (ROW.to("meta"), AT)}, ValueError, "are on meta and cpu, the tensors .* cpu"),
    ({"global_rows": (ROW, AT + 10)}, ValueError, "below tokens = 10, got 10"),
    ({"visibility": "x"}, TypeError, "visibility must come from"),
    ({"cu_seqlens": torch.tensor([])}, ValueError, "boundaries"),
    ({"cu_seqlens": torch.tensor([0, 10], device="meta")}, ValueError, "cu_seqlens is on meta"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p"),
    ({"scale": -1.0}, ValueError, "positive"),
    ({"scale": float("nan")}, ValueError, "positive"),
    (
        {"backend": "cuda"},
        ValueError,
        "choose from auto, triton, native, blocked, chunks, reference",
    ),
    ({"attention_mask": torch.ones(1, 9)}, ValueError, r"\(1, 10\), got \(1, 9\)"),
    ({"attention_mask": torch.zeros(1, 10)}, TypeError, "additive mask"),
    ({"attention_mask": [[1] * 10]}, TypeError, "torch.Tensor"),
    ({"global_mask": torch.ones(10).long()}, ValueError, "global_mask"),
    ({"cu_seqlens": torch.tensor([0, 4, 9])}, ValueError, "rise from 0 to tokens = 10"),
    ({"cu_seqlens": torch.tensor([1, 10])}, ValueError, "rise from 0"),
    ({"cu_seqlens": torch.tensor([0, 7, 5, 10])}, ValueError, "rise from 0"),
    ({"cu_seqlens": torch.tensor([0.0, 10.0])}, TypeError, "int32 or int64"),
    ({"cu_seqlens": torch.tensor([10])}, ValueError, "boundaries"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG, ids=[str(w[0])[:40] for w in WRONG])
def test_wrong_options_are_named(options, kind, message):
    q = torch.randn(1, 10, 2, 16)
    with pytest.raises(kind, match=message):
        window_attention(q, q, q, **(GOOD | options))


def test_a_description_of_wrong_masks_is_refused():
    """Whoever gives it in their place would not hear of it later."""
    q = torch.randn(1, 10, 2, 16)
    for masks, kind, message in [
        ({"attention_mask": torch.ones(1, 9).long()}, ValueError, r"\(1, 10\), got \(1, 9\)"),
        ({"global_mask": torch.zeros(1, 10)}, TypeError, "bool or integer"),
        ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "rise from 0 to tokens = 10"),
    ]:
        with pytest.raises(kind, match=message):
            visibility(q, **masks)


def test_wrong_tensors_are_named():
    q = torch.randn(1, 10, 2, 16)
    for args, kind, message in [
        ((q[0], q, q), ValueError, r"query must be \[batch, tokens, heads, head_dim\]"),
        ((q, q[:, :9], q[:, :9]), ValueError, "agree in batch, tokens"),
        ((q, q, q[:, :9]), ValueError, "one shape"),
        ((q, q.double(), q), TypeError, "share a dtype"),
        ((q.long(), q.long(), q.long()), TypeError, "float16"),
        ((q, q.to("meta"), q), ValueError, "one device"),
        ((q[:, :, :1].expand(-1, -1, 3, -1), q, q), ValueError, "do not divide"),
        (("q", q, q), TypeError, "torch.Tensor"),
    ]:
        with pytest.raises(kind, match=message):
            window_attention(*args, **GOOD)
    two = torch.randn(2, 10, 2, 16)
    with pytest.raises(ValueError, match="one row, but batch is 2"):
        window_attention(two, two, two, window=4, cu_seqlens=torch.tensor([0, 10]))
    seen = visibility(q)
    mask = torch.ones(1, 10).long()
    for made in ({"attention_mask": mask}, {"global_mask": mask}):
        other, short = visibility(q, **made), two[:, :9]
        with pytest.raises(ValueError, match="batch of 1 x 10 tokens, the tensors are 2 x 9"):
            window_attention(short, short, short, window=4, visibility=other)
    with pytest.raises(ValueError, match="not both"):
        window_attention(q, q, q, window=4, attention_mask=mask, visibility=seen)


def test_whole_numbers_of_any_kind_are_taken():
    import numpy as np

    q = torch.randn(1, 10, 2, 16)
    plain = window_attention(q, q, q, window=4, dilation=(1, 2))
    dilation: Any = [np.int64(1), 2]
    window: Any
    for window in (np.int64(4), (np.int32(2), np.int64(2)), [2, 2], torch.tensor(4)):
        out = window_attention(q, q, q, window=window, dilation=dilation)
        assert torch.equal(out, plain)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_numbers_beyond_any_row(backend, device):
    """Their products must not wrap around."""
    q = torch.randn(1, 10, 2, 16, device=device)
    for far in (2**31, 2**40, 2**70):
        everything = call(backend, (q, q, q), window=(far, far))
        torch.testing.assert_close(everything, call("reference", (q, q, q), window=20))
        alone = call(backend, (q, q, q), window=(far, 3), dilation=far)
        torch.testing.assert_close(alone, q)


def test_shapes_alone_on_the_meta_device():
    q = torch.randn(2, 10, 2, 16, device="meta")
    assert window_attention(q, q, q, window=4).shape == q.shape


def test_a_named_backend_says_why_it_cannot(device):
    q = torch.randn(1, 10, 2, 16, dtype=torch.float64, device=device)
    with pytest.raises(
        ValueError, match=r"triton.*float16, bfloat16 or float32, not torch.float64"
    ):
        window_attention(q, q, q, window=4, backend="triton")
    wide = torch.randn(1, 4, 1, 300, device=device)
    with pytest.raises(ValueError, match="head_dim 300 is above 256"):
        window_attention(wide, wide, wide, window=2, backend="triton")
