"""The backend that rounds as transformers' Longformer does: right, and the same to the bit."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from ops.cases import assert_within_budget, cases, run
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from longspan import window_attention
from longspan.layers.window import WindowAttention
from longspan.ops import global_positions
from longspan.ops.window import chunks
from longspan.ops.window.pattern import Pattern


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@given(case=cases())
@settings(max_examples=30)
def test_it_keeps_the_budget_of_errors(case, dtype, device):
    """Packed, causal and with shared projections of global tokens, too, which transformers has
    not: the oracle's other half."""
    case = case.with_(key_heads=case.heads, dilation=(1,) * case.heads)
    assert_within_budget(case, "chunks", dtype, device)


@given(case=cases())
@settings(max_examples=30)
def test_it_is_the_reference(case, device):
    case = case.with_(key_heads=case.heads, dilation=(1,) * case.heads)
    pairs = zip(
        *(run(case, name, torch.float64, device) for name in ("reference", "chunks")), strict=True
    )
    for exact, found in pairs:
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


def test_what_stands_in_padding_does_not_matter():
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, 30:] = 0
    clean = window_attention(q, k, v, window=8, attention_mask=mask, backend="chunks")
    for tensor in (q, k, v):
        tensor[:, 30:] = torch.nan
    q.requires_grad_()
    out = window_attention(q, k, v, window=8, attention_mask=mask, backend="chunks")
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(out, clean)
    assert grad.isfinite().all()


def test_room_for_more_global_tokens_than_there_are_tokens():
    layer = WindowAttention(32, 2, 8, backend="chunks").eval()
    hidden, chosen = torch.randn(2, 11, 32), torch.zeros(2, 11).long()
    chosen[0, :2] = 1
    exact = layer(hidden, global_mask=chosen)
    found = layer(hidden, global_mask=chosen, positions=global_positions(chosen, 20))
    torch.testing.assert_close(found, exact)


def test_what_it_cannot_do_is_said():
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    with pytest.raises(ValueError, match=r"backend='chunks' cannot serve.*no dilation"):
        window_attention(q, k, v, window=4, dilation=2, backend="chunks")
    with pytest.raises(ValueError, match=r"backend='chunks' cannot serve.*does not group 2 heads"):
        window_attention(q, k[:, :, :1], v[:, :, :1], window=4, backend="chunks")
    assert chunks.refusal(Pattern(3, 0, (1, 1), 1.0), 2) is None


@pytest.mark.parametrize("heads", [12, 3])
@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize("globals_", [((), ()), ((0, 5, 70), (0,)), ((0,), ())], ids=str)
def test_a_layer_is_transformers_to_the_bit(heads, window, globals_):
    """Padded, with uneven sets of global tokens, in whole windows as transformers has them."""
    torch.manual_seed(0)
    dim, tokens = heads * 16, 128
    config = transformers.LongformerConfig(
        hidden_size=dim, num_attention_heads=heads, attention_window=[window]
    )
    stock = LongformerSelfAttention(config, 0).eval()
    ours = WindowAttention(dim, heads, window, backend="chunks").eval()
    for layer, suffix in ((ours.qkv, ""), (ours.qkv_global, "_global")):
        assert layer is not None
        parts = [getattr(stock, f"{name}{suffix}") for name in ("query", "key", "value")]
        for name in ("weight", "bias"):
            getattr(layer, name).data = torch.cat([getattr(part, name) for part in parts]).detach()
    hidden = torch.randn(2, tokens, dim) * 3
    mask = torch.arange(tokens) < torch.tensor([[tokens], [100]])
    chosen = torch.zeros_like(mask)
    for row, places in enumerate(globals_):
        chosen[row, list(places)] = True
    told = torch.where(chosen, 10000.0, torch.where(mask, 0.0, -10000.0))
    with torch.no_grad():
        (theirs,) = stock(
            hidden,
            attention_mask=told,
            is_index_masked=told < 0,
            is_index_global_attn=told > 0,
            is_global_attn=bool(chosen.any()),
        )
        mine = ours(hidden, mask.long(), chosen.long())
        ours.backend = "auto"
        other = ours(hidden, mask.long(), chosen.long())
    assert torch.equal(mine[mask], theirs[mask])
    torch.testing.assert_close(other[mask], theirs[mask], rtol=1e-4, atol=1e-5)
