"""The rows of global tokens: late projection is the same function as projecting every token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import window_attention
from longspan.ops import global_attention, global_positions, global_rows, visibility

# Which projection goes first, and who computes.
ORDERS = [
    {"late": True, "backend": "plain"},
    {"late": False, "backend": "plain"},
    {"backend": "early"},
]


def build(batch, tokens, heads, head_dim, dim, share, seed, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    inner = heads * head_dim
    chosen = (torch.rand(batch, tokens, generator=draw) < share).long()
    return {
        "hidden": normal(batch, tokens, dim),
        "weights": [normal(inner, dim) / dim**0.5 for _ in range(3)],
        "biases": [normal(inner) for _ in range(3)],
        "chosen": chosen,
        "mask": (torch.rand(batch, tokens, generator=draw) < 0.7).long(),
        "positions": global_positions(chosen),
    }


def rows(given_, heads, **options):
    """Project the queries of the global tokens, then attend."""
    hidden, positions = given_["hidden"], given_["positions"]
    at = positions.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[2])
    query = hidden.gather(1, at) @ given_["weights"][0].T + given_["biases"][0]
    return global_attention(
        query.unflatten(-1, (heads, -1)),
        hidden,
        given_["weights"][1],
        given_["weights"][2],
        given_["biases"][2],
        positions=positions,
        **options,
    )


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([4, 10]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_both_orders_equal_attention_over_projected_tokens(
    batch, tokens, heads, head_dim, share, causal, padded, seed
):
    given_ = build(batch, tokens, heads, head_dim, 12, share, seed)
    hidden = given_["hidden"]
    masks = {"attention_mask": given_["mask"]} if padded else {}
    seen = visibility(hidden, **masks)
    q, k, v = (
        (hidden @ w.T + b).unflatten(-1, (heads, -1))
        for w, b in zip(given_["weights"], given_["biases"], strict=True)
    )
    window = (0, 0) if causal else (tokens, tokens)
    options = {"backend": "reference", "global_mask": given_["chosen"]}
    truth = window_attention(q, k, v, window=window, **options, **masks)
    for order in ORDERS:
        out = rows(given_, heads, seen=seen, causal=causal, **order)
        for b in range(batch):
            for slot, position in enumerate(given_["positions"][b].tolist()):
                expected = torch.zeros_like(out[b, slot]) if position < 0 else truth[b, position]
                torch.testing.assert_close(out[b, slot], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_packed_documents_are_kept_apart(order):
    given_ = build(1, 30, 2, 4, 12, 0.2, 0)
    cuts = torch.tensor([0, 11, 30])
    packed = rows(given_, 2, seen=visibility(given_["hidden"], cu_seqlens=cuts), **order)
    at = 0
    for begin, end in ((0, 11), (11, 30)):
        part = given_ | {
            "hidden": given_["hidden"][:, begin:end],
            "positions": global_positions(given_["chosen"][:, begin:end]),
        }
        alone = rows(part, 2, **order)
        torch.testing.assert_close(packed[:, at : at + alone.shape[1]], alone)
        at += alone.shape[1]
    assert at == packed.shape[1]


def test_gradients_are_those_of_the_other_order():
    grads = []
    for order in ORDERS:
        given_ = build(2, 20, 2, 4, 12, 0.2, 1)
        leaves = [given_["hidden"], *given_["weights"], *given_["biases"]]
        for leaf in leaves:
            leaf.requires_grad_()
        seen = visibility(given_["hidden"], attention_mask=given_["mask"])
        out = rows(given_, 2, seen=seen, **order)
        (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for first, *others in zip(*grads, strict=True):
        for other in others:
            if first is None:  # the key's bias takes no part
                assert other is None
            else:
                torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-9)


def test_all_orders_drop_the_same():
    given_ = build(2, 20, 2, 4, 12, 0.3, 1)
    outs = []
    for order in ORDERS:
        torch.manual_seed(0)
        outs.append(rows(given_, 2, dropout_p=0.3, **order))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-9, atol=1e-9)


def test_many_global_tokens_of_packed_documents_take_the_windows_kernels(monkeypatch):
    """All rows over all tokens of a packed row would be tokens squared."""
    from longspan.ops.rows import plain

    given_ = build(1, 30, 2, 4, 12, 1.0, 0)
    seen = visibility(given_["hidden"], cu_seqlens=torch.tensor([0, 11, 30]))
    expected = rows(given_, 2, seen=seen, backend="plain")
    monkeypatch.setattr(plain, "attend", None)
    torch.testing.assert_close(rows(given_, 2, seen=seen), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_budget_of_the_late_order(dtype, device):
    """Rounding the folded query costs no more than rounding every key."""
    exact = build(2, 300, 4, 16, 64, 0.02, 3)

    def cast(value, kind):
        if isinstance(value, list):
            return [cast(v, kind) for v in value]
        return value.to(device, kind) if value.is_floating_point() else value.to(device)

    low = {name: cast(value, dtype) for name, value in exact.items()}
    high = {name: cast(value, torch.float64) for name, value in low.items()}
    truth = rows(high, 4, late=False)
    early = (rows(low, 4, late=False).double() - truth).abs().max()
    late = (rows(low, 4, late=True).double() - truth).abs().max()
    assert late <= 2 * early + torch.finfo(dtype).eps


def test_late_is_chosen_where_it_is_cheaper(monkeypatch):
    """Below heads * g = dim no token is projected."""
    import longspan.ops.rows.plain as module

    projected = []
    linear = module.linear
    monkeypatch.setattr(module, "linear", lambda *a: projected.append(1) or linear(*a))
    rows(build(1, 50, 2, 4, 12, 0.08, 0), 2)
    assert not projected
    rows(build(1, 50, 2, 4, 12, 1.0, 0), 2)
    assert len(projected) == 2


def test_positions_keep_order_and_capacity():
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [2, 0, 0, 0, 0]])
    assert global_positions(mask).tolist() == [[1, 3, 4], [-1, -1, -1], [0, -1, -1]]
    assert global_positions(mask, 4).tolist()[0] == [1, 3, 4, -1]
    with pytest.raises(ValueError, match="3 global tokens in one row, but room for only 2"):
        global_positions(mask, 2)


def test_too_many_global_tokens_are_an_error_in_a_graph_too():
    """Where the count cannot be looked at, their rows would be lost without a word."""
    compiled = torch.compile(global_positions, fullgraph=True)
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    for room in (2, 3, 4):  # the second is a number that the graph does not know
        assert compiled(mask, room)[:, :2].tolist() == [[1, 3], [0, -1]]
    with pytest.raises(RuntimeError, match="more global tokens in one row than room"):
        compiled(mask | 1, 2)


def test_wrong_shapes_are_named():
    given_ = build(1, 10, 2, 4, 12, 0.5, 0)
    query = torch.randn(1, given_["positions"].shape[1], 2, 4, dtype=torch.float64)
    _, key_weight, value_weight = given_["weights"]
    good = (query, given_["hidden"], key_weight, value_weight)
    for at, bad, message in [
        (0, query[0], "query must be"),
        (2, key_weight[:, :5], r"key_weight must be .* \(8, 12\), got \(8, 5\)"),
        (3, value_weight[:3], "value_weight must be"),
    ]:
        args = list(good)
        args[at] = bad
        with pytest.raises(ValueError, match=message):
            global_attention(*args, positions=given_["positions"])
    with pytest.raises(ValueError, match="positions must be integers"):
        global_attention(*good, positions=given_["positions"][:, :1].double())
    bias = torch.zeros(3, dtype=torch.float64)
    for options, kind, message in [
        ({"value_bias": bias}, ValueError, r"value_bias must be .* \(8,\), got \(3,\)"),
        ({"key_bias": bias}, ValueError, "key_bias must be"),
        ({"key_bias": [1.0]}, TypeError, "key_bias must be a torch.Tensor, got list"),
        ({"positions": [[0]]}, TypeError, "positions must be a torch.Tensor, got list"),
        ({"seen": 3}, TypeError, "visibility must come from"),
        ({"dropout_p": 1.5}, ValueError, r"in \[0, 1\), got 1.5"),
        ({"scale": -1.0}, ValueError, "positive number, got -1.0"),
        ({"query": query.float()}, TypeError, "share a dtype, got torch.float32 and torch.float64"),
        ({"hidden": given_["hidden"].to("meta")}, ValueError, "query is on cpu, hidden on meta"),
    ]:
        names = ("query", "hidden", "key_weight", "value_weight")
        all_ = {**dict(zip(names, good, strict=True)), "positions": given_["positions"], **options}
        with pytest.raises(kind, match=message):
            global_attention(**all_)


def test_wrong_shapes_of_stacked_projections_are_named():
    given_ = build(1, 10, 2, 4, 12, 0.5, 0)
    weight = torch.randn(24, 12, dtype=torch.float64)
    good = {"hidden": given_["hidden"], "weight": weight, "heads": 2}
    for options, message in [
        ({"heads": 0}, "at least 1 head, got heads=0"),
        ({"heads": 5}, "3 \\* 5 heads"),
        ({"weight": weight[:, :5]}, r"dim = 12\], got \(24, 5\)"),
        ({"bias": weight[0]}, r"bias must be \(24,\), got \(12,\)"),
        ({"dropout_p": 1.0}, "dropout_p"),
    ]:
        with pytest.raises(ValueError, match=message):
            global_rows(**(good | options), positions=given_["positions"])
