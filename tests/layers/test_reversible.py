"""Reversible blocks: the gradients of the plain stack, without its activations."""

from typing import Any

import pytest
import torch
from layers.family import DECODERS, DIM, HEADS, states
from torch.utils._pytree import tree_leaves

import longspan
from longspan.layers.block import Block
from longspan.layers.decoder_block import DecoderBlock
from longspan.layers.observing import auxiliary_loss, refresh
from longspan.layers.registry import CAUSAL_ATTENTION, build_attention, build_causal_attention
from longspan.layers.reversible import decode, encode
from longspan.ops import visibility

pytestmark = pytest.mark.usefixtures("on_device")

REFORMER = {"kind": "reformer", "buckets": 4, "rounds": 2, "chunk": 5}
SHARED = {"kind": "linformer", "length": 20, "rank": 4, "sharing": "layers"}
CAUSAL = {
    "window": {"left": 5},
    "full": {"kind": "full"},
    "xl": {"kind": "xl", "memory": 7},
    "compressive": {"kind": "compressive", "memory": 4, "compressed": 6, "rate": 2},
    **DECODERS,
}
SETTINGS = [{"window": 6}, REFORMER, {"kind": "performer", "features": 8, "fresh": True}]


def blocks(settings, dropout=0.0) -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        Block(
            build_attention(DIM, HEADS, setting, dropout=dropout),
            DIM,
            32,
            activation=torch.nn.functional.gelu,
            dropout=dropout,
            norm_first=True,
        )
        for setting in settings
    ).double()


def plain(stack, hidden, *about):
    first = second = hidden
    for block in stack:
        first = first + block.mix(second, *about)
        second = second + block.feed(first)
    return (first + second) / 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_gradients_of_the_plain_stack(dropout):
    stack, hidden = blocks(SETTINGS, dropout), states(2, 23)
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, 15:] = 0
    seen = visibility(hidden, attention_mask=mask)
    gradient = states(2, 23)
    found = []
    for run in (plain, encode):
        given = hidden.clone().requires_grad_()
        torch.manual_seed(5)
        out = run([*stack], given, seen)
        out.backward(gradient)
        grads = {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}
        found.append([out, given.grad, grads, torch.get_rng_state()])
        stack.zero_grad()
    (out, given, weights, state), (other, theirs, learned, after) = found
    torch.testing.assert_close(other, out)
    torch.testing.assert_close(theirs, given)
    torch.testing.assert_close(learned, weights)
    assert len(weights) > 20
    assert torch.equal(state, after)  # as if nothing had been computed twice


def test_nothing_is_kept_of_the_layers():
    """As many tensors whatever the depth, but for the weights."""
    kept = []
    for depth in (1, 6):
        stack = blocks([REFORMER] * depth)
        hidden = states(1, 20).requires_grad_()
        seen = visibility(hidden)
        count = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, count=count: count.append(t.numel()) or t, lambda t: t
        ):
            encode([*stack], hidden, seen)
        kept.append(sum(count))
    assert kept[0] == kept[1] == 2 * 20 * DIM


def test_weights_that_layers_share_learn_from_all_of_them():
    stack, hidden = blocks([SHARED] * 3), states(1, 20)
    for number, block in enumerate(stack):
        block.attention.follow([other.attention for other in stack[:number]])
    found = []
    for run in (plain, encode):
        run([*stack], hidden, visibility(hidden)).sum().backward()
        found.append({name: p.grad.clone() for name, p in stack.named_parameters()})
        stack.zero_grad()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("normed", [True, False])
def test_what_layers_cost_teaches_the_layers_below(normed):
    """As in the plain stack, also where a layer is given the states themselves, without a norm."""
    routing = {"kind": "routing", "clusters": 4, "size": 5, "commitment": 10.0}
    window = {"window": 6, "separate_global": False}
    stack, hidden = blocks([routing, window, routing]), states(2, 20)
    if not normed:
        stack[0].attention_norm = torch.nn.Identity()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 13:] = 0
    seen, found = visibility(hidden, attention_mask=mask), []
    for run in (plain, encode):
        given = hidden.clone().requires_grad_()
        out = run([*stack], given, seen)
        (out.sum() + auxiliary_loss(stack)).backward()
        learned = {name: p.grad.clone() for name, p in stack.named_parameters()}
        found.append((out, given.grad, learned))
        stack.zero_grad()
    torch.testing.assert_close(*found)


def causal_blocks(settings, dropout=0.0) -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        DecoderBlock(
            build_causal_attention(DIM, HEADS, setting, dropout=dropout),
            DIM,
            32,
            activation=torch.nn.functional.gelu,
            norm=torch.nn.LayerNorm,
            dropout=dropout,
        )
        for setting in settings
    ).double()


def plain_decoder(stack, hidden, first, given, keep_state):
    one = two = hidden
    kept, losses = [], []
    for block, state in zip(stack, given, strict=True):
        done = block.mix(two, first, state, keep_state)
        one = one + done.out
        two = two + block.feed(one)
        kept.append(done.state)
        losses += [] if done.loss is None else [done.loss]
    return (one + two) / 2, kept, losses


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", CAUSAL)
def test_a_decoder_has_the_states_losses_and_gradients_of_the_plain_stack(kind, dropout):
    """On a second segment, which the state of the first is given to."""
    stack = causal_blocks([CAUSAL[kind], {"left": 3}, CAUSAL[kind]], dropout)
    before, hidden, gradient = states(2, 9), states(2, 14), states(2, 14)
    found = []
    for run in (plain_decoder, decode):
        torch.manual_seed(5)
        _, kept, _ = run([*stack], before, 0, [None] * 3, True)
        given = hidden.clone().requires_grad_()
        out, kept, losses = run([*stack], given, 9, kept, True)
        (torch.sum(out * gradient) + 10 * sum(losses)).backward()
        learned = {n: p.grad.clone() for n, p in stack.named_parameters() if p.grad is not None}
        found.append([out, given.grad, learned, losses, torch.get_rng_state()])
        found[-1] += tree_leaves(kept)
        stack.zero_grad()
    torch.testing.assert_close(*found)
    assert len(found[0][2]) > 20
    with torch.no_grad():
        stack.eval()
        quiet, kept, _ = decode([*stack], hidden, 0, [None] * 3, False)
        torch.testing.assert_close(quiet, plain_decoder(stack, hidden, 0, [None] * 3, False)[0])
        assert kept == [None] * 3


def test_every_kind_of_decoder_is_tried():
    assert {one.get("kind", "window") for one in CAUSAL.values()} == set(CAUSAL_ATTENTION)


def test_nothing_is_kept_of_a_decoder_s_layers():
    kept = []
    for depth in (1, 6):
        stack, hidden, count = causal_blocks([CAUSAL["reformer"]] * depth), states(1, 20), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, count=count: count.append(t.numel()) or t, lambda t: t
        ):
            decode([*stack], hidden.requires_grad_(), 0, [None] * depth, False)
        kept.append(sum(count))
    assert kept[0] == kept[1] == 2 * 20 * DIM


def test_frozen_weights_stay_frozen():
    stack, hidden = blocks(SETTINGS), states(1, 20)
    for parameter in stack[0].parameters():
        parameter.requires_grad_(False)
    encode([*stack], hidden, visibility(hidden)).sum().backward()
    assert all(p.grad is None for p in stack[0].parameters())
    assert stack[1].up.weight.grad.abs().sum() > 0


def test_the_precision_of_the_forward_pass_is_that_of_the_backward_pass():
    stack, hidden = blocks([REFORMER]).float(), states(1, 20, torch.float32)
    used = []
    stack[0].up.register_forward_hook(lambda _, __, out: used.append(out.dtype))
    with torch.autocast(hidden.device.type, torch.bfloat16):
        out = encode([*stack], hidden, visibility(hidden))
    out.float().sum().backward()
    assert used == [torch.bfloat16] * 2


def model(**changes) -> Any:
    torch.manual_seed(0)
    config = longspan.LongspanConfig(
        vocab_size=30,
        hidden_size=DIM,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        intermediate_size=32,
        max_position_embeddings=66,
        **{"attention": REFORMER, "norm_first": True, "reversible": True, **changes},
    )
    return longspan.LongspanForMaskedLM(config)


def test_a_model_learns_and_is_saved(tmp_path):
    made = model()
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    ids, losses = torch.randint(3, 30, (2, 25)), []
    for _ in range(8):
        loss = made(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    made.eval().save_pretrained(tmp_path)
    again = longspan.LongspanForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.config.reversible
    assert torch.equal(made(ids).logits, again(ids).logits)


def writer(**changes) -> Any:
    torch.manual_seed(0)
    config = longspan.LongspanDecoderConfig(
        hidden_size=DIM,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        intermediate_size=32,
        **{"attention": CAUSAL["reformer"], "reversible": True, **changes},
    )
    return longspan.LongspanForCausalLM(config)


@pytest.mark.parametrize("kind", ["reformer", "routing", "window"])
def test_a_decoder_learns_writes_and_is_saved(tmp_path, kind):
    made = writer(attention=CAUSAL[kind])
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    ids, losses = torch.randint(3, 30, (2, 25)), []
    for _ in range(8):
        loss = made(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        refresh(made)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    made.eval().save_pretrained(tmp_path)
    again = longspan.LongspanForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.reversible
    written = again.generate(ids, 6)
    assert torch.equal(made(written).logits[:, 24:-1].argmax(-1), written[:, 25:])


def test_what_cannot_be_is_named():
    with pytest.raises(ValueError, match="needs pre_norm=True"):
        writer(pre_norm=False)
    with pytest.raises(ValueError, match="needs half_residual=False"):
        writer(half_residual=True)
    with pytest.raises(ValueError, match="needs norm_first=True"):
        model(norm_first=False)
    with pytest.raises(ValueError, match="layer 0 makes documents shorter"):
        model(attention={"kind": "funnel", "stride": 2})
    with pytest.raises(ValueError, match="without output_hidden_states"):
        model()(torch.ones(1, 5, dtype=torch.long), output_hidden_states=True)
