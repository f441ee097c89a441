"""`output_attentions=True` against transformers' own attention weights."""

import pytest
import torch
import transformers

import longspan


def theirs_as_rows(local, whole, chosen, window):
    """transformers' weights of one layer as dense [batch, heads, query, key].

    local [batch, heads, tokens, most + window + 1]: global columns, then the band;
    whole [batch, heads, tokens, most]: the rows of global tokens, transposed.
    """
    batch, heads, tokens, width = local.shape
    most = width - window - 1
    dense = torch.zeros(batch, heads, tokens, tokens)
    for b in range(batch):
        places = chosen[b].nonzero().flatten().tolist()
        for i in range(tokens):
            for slot, place in enumerate(places):
                dense[b, :, i, place] += local[b, :, i, slot]
            for o in range(window + 1):
                j = i + o - window // 2
                if 0 <= j < tokens:
                    dense[b, :, i, j] += local[b, :, i, most + o]
        for slot, place in enumerate(places):
            dense[b, :, place] = whole[b, :, :tokens, slot]
    return dense


@pytest.mark.parametrize("with_global", [False, True])
def test_weights_are_those_of_transformers(with_global):
    torch.manual_seed(0)
    window, tokens, heads = 8, 24, 3
    config = transformers.LongformerConfig(
        vocab_size=50,
        hidden_size=24,
        num_attention_heads=heads,
        num_hidden_layers=2,
        intermediate_size=32,
        attention_window=window,
        max_position_embeddings=60,
    )
    source = transformers.LongformerModel(config).eval()
    ours = longspan.convert(source).eval()
    input_ids = torch.randint(3, 50, (2, tokens))
    mask = torch.ones(2, tokens).long()
    mask[1, 17:] = 0
    input_ids[1, 17:] = 1
    chosen = torch.zeros(2, tokens).long()
    if with_global:
        chosen[0, [0, 9]] = 1
        chosen[1, 3] = 1
    inputs = {"input_ids": input_ids, "attention_mask": mask, "global_attention_mask": chosen}
    with torch.no_grad():
        theirs = source(**inputs, output_attentions=True)
        made = ours(**inputs, output_attentions=True)
    assert len(made.attentions) == 2
    for layer, mapped in enumerate(made.attentions):
        whole = theirs.global_attentions[layer] if with_global else None
        dense = theirs_as_rows(theirs.attentions[layer], whole, chosen, window)
        for b in range(2):
            for i in range(int(mask[b].sum())):
                for h in range(heads):
                    positions, weights = mapped.row(i, h, b)
                    row = torch.zeros(tokens).index_add(0, positions, weights)
                    torch.testing.assert_close(row, dense[b, h, i], rtol=1e-4, atol=2e-6)


def test_asking_changes_nothing_else():
    config = longspan.LongspanConfig(
        vocab_size=50,
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=32,
        attention={"window": (5, 0), "dilation": (1, 2, 3)},
    )
    model = longspan.LongspanModel(config).eval()
    input_ids = torch.randint(3, 50, (1, 30))
    plain, asked = model(input_ids), model(input_ids, output_attentions=True)
    assert torch.equal(plain.last_hidden_state, asked.last_hidden_state)
    assert plain.attentions is None
    positions, weights = asked.attentions[0].row(20, 2)
    assert positions.tolist() == [5, 8, 11, 14, 17, 20]
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-5)
