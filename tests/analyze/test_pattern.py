"""What is said of patterns is what models do: checked by gradients."""

import pytest
import torch

from longspan import LongspanConfig, LongspanModel
from longspan.analyze.pattern import informed_by_layer, receptive_field, seen_by_layer

TOKENS = 23
PATTERNS = {
    "window": {"window": 4},
    "per layer": [{"window": 2}, {"window": 6}, {"window": 2}],
    "dilated": {"window": 4, "dilation": [1, 3]},
    "one-sided": {"window": [3, 1]},
    "causal": {"window": [2, 0]},
}


def make(attention) -> LongspanModel:
    torch.manual_seed(0)
    config = LongspanConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=40,
        attention=attention,
        initializer_range=0.3,
    )
    return LongspanModel(config).eval().double()


def measured(model: LongspanModel, global_tokens: list[int]) -> list[torch.Tensor]:
    """Bool [tokens, tokens] after each layer: has the word at j a gradient from the state of i?"""
    words = torch.randn(1, TOKENS, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(1, TOKENS, dtype=torch.long)
    mask[:, global_tokens] = 1
    output = model(inputs_embeds=words, global_attention_mask=mask, output_hidden_states=True)
    found = []
    for states in output.hidden_states[1:]:
        # A fixed sum over a normalised state would be constant: weigh its parts.
        weights = torch.arange(1.0, 17.0, dtype=torch.float64)
        rows = [
            torch.autograd.grad((states[0, i] * weights).sum(), words, retain_graph=True)[0]
            for i in range(TOKENS)
        ]
        found.append(torch.stack([row[0].abs().sum(dim=1) > 1e-14 for row in rows]))
    return found


@pytest.mark.parametrize("global_tokens", [[], [0], [5, 11]], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_computed_is_measured(name: str, global_tokens: list[int]) -> None:
    model = make(PATTERNS[name])
    computed = informed_by_layer(model.config, TOKENS, global_tokens)
    for layer, (ours, theirs) in enumerate(
        zip(computed, measured(model, global_tokens), strict=True)
    ):
        assert torch.equal(ours, theirs), f"layer {layer}"


@pytest.mark.parametrize("name", PATTERNS)
def test_reach_is_the_outermost_token(name: str) -> None:
    config, middle, tokens = make(PATTERNS[name]).config, 60, 121
    for reach, informed in zip(
        receptive_field(config), informed_by_layer(config, tokens), strict=True
    ):
        seen = informed[middle].nonzero()[:, 0]
        assert (middle - int(seen.min()), int(seen.max()) - middle) == (reach.left, reach.right)


def test_reach_of_the_usual_window() -> None:
    config = LongspanConfig(num_hidden_layers=6, attention={"window": 512})
    assert [reach.tokens for reach in receptive_field(config)] == [
        513,
        1025,
        1537,
        2049,
        2561,
        3073,
    ]


def test_first_layer() -> None:
    seen = seen_by_layer(make({"window": 2}).config, 4, [3])[0]
    wanted = [[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert seen.int().tolist() == wanted
