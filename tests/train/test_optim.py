"""Who updates which weights."""

import torch

from longspan.models import (
    LongspanConfig,
    LongspanDecoderConfig,
    LongspanForCausalLM,
    LongspanForSequenceClassification,
)
from longspan.train.optim import build_optimizers, set_learning_rate
from longspan.train.recipe import Optimizer


def groups(kind, **changes):
    """{parameter name: (optimiser, weight decay, scale)}."""
    config = LongspanDecoderConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        attention=[
            {"left": 4, "position": "relative"},
            {"kind": "compressive", "memory": 4, "compressed": 4},
        ],
        **changes,
    )
    model = LongspanForCausalLM(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    made = build_optimizers(model, Optimizer(kind, weight_decay=0.1, muon_scale=3.0))
    for optimizer in made:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own = (type(optimizer).__name__, group["weight_decay"], group["scale"])
                assert names[id(parameter)] not in found
                found[names[id(parameter)]] = own
    assert found.keys() == set(names.values())
    return found, made


def test_adamw_decays_matrices_only():
    found, made = groups("adamw")
    assert len(made) == 1
    for name, (optimizer, decay, _) in found.items():
        vector = name.endswith(("bias", "norm.weight"))
        assert (optimizer, decay) == ("AdamW", 0.0 if vector else 0.1), name


def test_muon_takes_the_matrices_inside_layers():
    found, _ = groups("muon", tie_word_embeddings=False)
    for name, (optimizer, decay, scale) in found.items():
        inner = name.startswith("layers") and name.endswith(
            ("qkv.weight", "project.weight", "up.weight", "down.weight")
        )
        assert (optimizer == "Muon") == inner, name
        assert scale == (3.0 if inner else 1.0)
        if name in ("embeddings.weight", "output.weight") or "conv.weight" in name:
            assert (optimizer, decay) == ("AdamW", 0.1)


def test_learning_rates_are_scaled():
    _, made = groups("muon")
    set_learning_rate(made, 0.01)
    rates = {type(o).__name__: {g["lr"] for g in o.param_groups} for o in made}
    assert rates == {"AdamW": {0.01}, "Muon": {0.03}}


def test_muon_moves_weights_as_far_as_adamw():
    """At one learning rate, one step of either changes a matrix by about as much."""
    moved = {}
    for kind in ("adamw", "muon"):
        torch.manual_seed(0)
        config = LongspanDecoderConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
        model = LongspanForCausalLM(config)
        made = build_optimizers(model, Optimizer(kind, weight_decay=0.0))
        set_learning_rate(made, 1e-3)
        ids = torch.randint(0, 256, (4, 64))
        model(ids, labels=ids).loss.backward()
        weight = model.get_parameter("layers.0.up.weight")
        before = weight.detach().clone()
        for optimizer in made:
            optimizer.step()
        moved[kind] = (weight.detach() - before).square().mean().sqrt().item()
    assert 0.1 < moved["muon"] / moved["adamw"] < 2.0


def test_a_head_may_learn_at_another_rate():
    config = LongspanConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = LongspanForSequenceClassification(config)
    for scale in (1.0, 10.0):
        (made,) = build_optimizers(model, Optimizer(weight_decay=0.1, head_scale=scale))
        set_learning_rate([made], 0.5)
        found = {
            id(p): (g["lr"], g["weight_decay"]) for g in made.param_groups for p in g["params"]
        }
        assert len(found) == len(list(model.parameters()))
        for name, parameter in model.named_parameters():
            rate = 0.5 if name.startswith("encoder.") else 0.5 * scale
            decay = 0.0 if parameter.dim() < 2 else 0.1
            assert found[id(parameter)] == (rate, decay), name
