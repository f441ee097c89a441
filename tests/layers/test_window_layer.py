"""The layer against transformers' own Longformer self-attention, with the same weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.layers.window import WindowAttention
from longspan.ops import global_positions, visibility


def theirs(dim, heads, window):
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=dim,
        num_attention_heads=heads,
        attention_window=[window],
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )
    return LongformerSelfAttention(config, layer_id=0).eval()


def copy_weights(source, layer):
    with torch.no_grad():
        for ours, suffix in ((layer.qkv, ""), (layer.qkv_global, "_global")):
            parts = [getattr(source, name + suffix) for name in ("query", "key", "value")]
            ours.weight.copy_(torch.cat([part.weight for part in parts]))
            ours.bias.copy_(torch.cat([part.bias for part in parts]))


def run_theirs(module, hidden, attention_mask, global_mask):
    state = attention_mask + global_mask * attention_mask  # 0 padding, 1 local, 2 global
    return module(
        hidden,
        attention_mask=(state.float() - 1) * 10000.0,
        is_index_masked=state == 0,
        is_index_global_attn=state == 2,
        is_global_attn=bool((state == 2).any()),
    )[0]


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=12)
def test_parity_with_transformers(seed, with_global):
    """Ragged global sets, padding, all gradients."""
    torch.manual_seed(seed)
    batch, tokens, dim, heads, window = 2, 48, 24, 3, 8
    source, layer = theirs(dim, heads, window), WindowAttention(dim, heads, window)
    copy_weights(source, layer)
    attention_mask = (torch.arange(tokens) < torch.tensor([[tokens], [31]])).long()
    global_mask = (torch.rand(batch, tokens) < 0.1).long() * with_global * attention_mask
    hidden = torch.randn(batch, tokens, dim)
    real = attention_mask.bool()
    weight = torch.randn(batch, tokens, dim) * real[..., None]
    results = []
    for module in (source, layer):
        x = hidden.clone().requires_grad_()
        if module is source:
            out = run_theirs(module, x, attention_mask, global_mask)
        else:
            out = module(x, attention_mask, global_mask if with_global else None)
        (grad,) = torch.autograd.grad((out * weight).sum(), x)
        results.append((out[real], grad[real]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_what_a_model_prepares_once_gives_the_same():
    torch.manual_seed(0)
    layer = WindowAttention(24, 3, 8)
    hidden = torch.randn(2, 30, 24)
    mask = (torch.arange(30) < torch.tensor([[30], [20]])).long()
    chosen = torch.zeros(2, 30).long()
    chosen[0, [0, 7]] = 1
    seen = visibility(hidden, attention_mask=mask, global_mask=chosen)
    prepared = layer(hidden, seen=seen, positions=global_positions(chosen, 5))
    assert torch.equal(layer(hidden, mask, chosen), prepared)


def test_global_projections_touch_only_global_rows():
    torch.manual_seed(0)
    layer = WindowAttention(24, 3, 8)
    hidden, chosen = torch.randn(1, 40, 24), torch.zeros(1, 40).long()
    chosen[:, [3, 20]] = 1
    before = layer(hidden, None, chosen)
    assert layer.qkv_global is not None
    with torch.no_grad():
        layer.qkv_global.weight.mul_(2.0)
    changed = (layer(hidden, None, chosen) != before).any(dim=2)[0]
    assert changed.nonzero().flatten().tolist() == [3, 20]


def test_copied_projections_are_shared_projections():
    torch.manual_seed(0)
    separate = WindowAttention(24, 3, 8)
    shared = WindowAttention(24, 3, 8, separate_global=False)
    shared.qkv.load_state_dict(separate.qkv.state_dict())
    hidden, chosen = torch.randn(2, 40, 24), torch.zeros(2, 40).long()
    chosen[0, [3, 20]] = 1
    torch.testing.assert_close(
        separate(hidden, None, chosen), shared(hidden, None, chosen), rtol=1e-4, atol=1e-5
    )


def test_compiles_without_a_graph_break(device):
    layer = WindowAttention(32, 2, 8).to(device)
    hidden = torch.randn(2, 40, 32, device=device)
    chosen = torch.zeros(2, 40, dtype=torch.int64, device=device)
    chosen[:, 0] = 1

    def call(hidden, chosen):
        seen = visibility(hidden, global_mask=chosen)
        return layer(hidden, seen=seen, positions=global_positions(chosen, 4))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, chosen), call(hidden, chosen))


def test_wrong_size_is_named():
    with pytest.raises(ValueError, match="dim=10 is not divisible by heads=3"):
        WindowAttention(10, 3, 8)
