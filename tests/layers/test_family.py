"""What every mechanism of the family promises: masks, lengths, documents, dtypes, models."""

from collections.abc import Callable
from itertools import pairwise
from math import isqrt
from typing import Any

import pytest
import torch
from layers.family import (
    DECODERS,
    DEVICE,
    DIM,
    ENCODERS,
    HEADS,
    causal_layer,
    encoder_layer,
    states,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import longspan
from longspan.layers.registry import ATTENTION, CAUSAL_ATTENTION
from longspan.ops import visibility

exactly = {"rtol": 0, "atol": 1e-10}
# Of packed documents: one is empty, one alone of its length, and the others share a batch.
BOUNDS = [0, 17, 17, 18, 36, 60]
every_encoder = pytest.mark.parametrize("kind", ENCODERS)


def ones(*shape):
    return torch.ones(shape, dtype=torch.long, device=DEVICE)


def two_steps(model, ids):
    """Of training: every weight takes part, and the loss falls."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(2):
        loss = model.eval()(ids, labels=ids).loss  # without dropout
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert not unused
        optimizer.step()
    assert losses[1] < losses[0]


@every_encoder
@pytest.mark.parametrize("rotary", [None, 100.0])
def test_padding_changes_nothing_wherever_it_is(kind, rotary):
    """Documents alone, padded at the right, at the left and on both sides, give the same, and so
    do their gradients."""
    made = encoder_layer({**ENCODERS[kind], "rotary": rotary})
    document, way = states(1, 37).requires_grad_(), states(1, 37)
    alone = made(document)
    (wanted,) = torch.autograd.grad((alone * way).sum(), document)
    for left, right in ((0, 13), (13, 0), (6, 5)):
        row = torch.cat((states(1, left), document.detach(), states(1, right)), dim=1)
        hidden = torch.cat((row, states(1, row.shape[1]))).requires_grad_()
        mask = ones(*hidden.shape[:2])
        mask[0, :left] = mask[0, left + 37 :] = 0
        places = torch.arange(row.shape[1], device=DEVICE).repeat(2, 1)
        places[0] -= left
        seen = visibility(hidden, attention_mask=mask)
        out = made(hidden, seen=seen, position_ids=places)
        own = out[:1, left : left + 37]
        torch.testing.assert_close(own, alone, **exactly)
        assert not out[mask == 0].any()
        (found,) = torch.autograd.grad((own * way).sum(), hidden)
        torch.testing.assert_close(found[:1, left : left + 37], wanted, **exactly)
        assert not found[mask == 0].any()


@every_encoder
def test_a_row_of_padding_alone_is_zero(kind):
    made, hidden = encoder_layer(ENCODERS[kind]), states(2, 21).requires_grad_()
    mask = ones(2, 21)
    mask[1] = 0
    out = made(hidden, seen=visibility(hidden, attention_mask=mask))
    assert not out[1].any()
    out.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[1].any()


@every_encoder
def test_packed_documents_are_read_as_if_alone(kind):
    """Also with a hole in one, with global tokens in some, and in their gradients."""
    made = encoder_layer({**ENCODERS[kind], "rotary": 100.0})
    hidden, way = states(1, 60).requires_grad_(), states(1, 60)
    mask, chosen = ones(1, 60), torch.zeros_like(ones(1, 60))
    mask[:, 40:43], chosen[:, [2, 20, 30]] = 0, 1
    masks = {"attention_mask": mask, "global_mask": chosen}
    seen = visibility(hidden, **masks, cu_seqlens=torch.tensor(BOUNDS, device=DEVICE))
    parts = []
    for a, b in pairwise(BOUNDS):
        if b > a:
            own = visibility(hidden[:, a:b], **{name: m[:, a:b] for name, m in masks.items()})
            parts.append(made(hidden[:, a:b], seen=own))
    runs = made(hidden, seen=seen), torch.cat(parts, dim=1)
    torch.testing.assert_close(*runs, **exactly)
    torch.testing.assert_close(
        *(torch.autograd.grad((out * way).sum(), hidden)[0] for out in runs), **exactly
    )


@every_encoder
def test_a_hole_is_not_seen(kind):
    made, hidden = encoder_layer(ENCODERS[kind]), states(2, 30)
    mask = ones(2, 30)
    mask[:, 11:14] = 0
    other = hidden.clone()
    other[:, 11:14] = 5.0
    seen = visibility(hidden, attention_mask=mask)
    torch.testing.assert_close(made(hidden, seen=seen), made(other, seen=seen), **exactly)


@every_encoder
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 31, 64])
def test_any_length(kind, tokens):
    made, hidden = encoder_layer(ENCODERS[kind]), states(2, tokens).requires_grad_()
    out = made(hidden)
    assert out.shape == (2, tokens, DIM)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor had that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                numbers = one.untyped_storage().nbytes() // one.element_size()
                self.numbers = max(self.numbers, numbers)
        return made


def growth(run: Callable[[int, torch.Tensor], torch.Tensor]) -> float:
    """Of the largest tensor, forward and backward, when a text gets four times as long."""
    sizes = []
    for tokens in (512, 2048):
        hidden = states(1, tokens, torch.float32).requires_grad_()
        with Largest() as largest:
            run(tokens, hidden).sum().backward()
        sizes.append(largest.numbers)
    return sizes[1] / sizes[0]


@every_encoder
def test_no_n_by_n_is_formed(kind):
    def run(tokens, hidden):
        longer = {"length": tokens} if kind.startswith("linformer") else {}
        return encoder_layer({**ENCODERS[kind], **longer}, torch.float32).train()(hidden)

    assert growth(run) < 5  # 16 if it were


def gradients_are_right(layer: Callable[[torch.Tensor], torch.Tensor], tokens: int = 9) -> bool:
    """Along four directions of each token, drawn at random, and in four sums of each output: all
    numbers take part, and a sixth as many passes are made as for one at a time."""
    hidden, (way, back) = states(1, tokens), states(2, 4)
    moved = torch.zeros_like(hidden[..., :4]).requires_grad_()
    return torch.autograd.gradcheck(
        lambda moved: layer(hidden + moved @ way) @ back.mT, (moved,), nondet_tol=1e-10
    )


@every_encoder
def test_gradients(kind):
    # What eps is relative to counts as a constant.
    setting = ENCODERS[kind] | ({"eps": 0.0} if kind == "performer" else {})
    assert gradients_are_right(encoder_layer(setting))


@every_encoder
def test_a_model_of_it_learns_and_is_saved(kind, tmp_path):
    torch.manual_seed(0)
    config = longspan.LongspanConfig(
        vocab_size=30,
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=32,
        max_position_embeddings=66,
        attention=ENCODERS[kind],
    )
    model: Any = longspan.LongspanForMaskedLM(config)
    model.to(DEVICE)
    ids = torch.randint(3, 30, (2, 25)).to(DEVICE)
    two_steps(model, ids)
    model.eval().save_pretrained(tmp_path)
    again = longspan.LongspanForMaskedLM.from_pretrained(tmp_path).to(DEVICE).eval()
    assert torch.equal(model(ids).logits, again(ids).logits)


every_decoder = pytest.mark.parametrize("kind", DECODERS)


@every_decoder
@pytest.mark.parametrize("sizes", [1, 7, [30, 1, 9]])
def test_a_text_in_pieces_is_the_text(kind, sizes):
    made, hidden = causal_layer(DECODERS[kind]), states(2, 40)
    state, first, out = None, 0, []
    for piece in hidden.split(sizes, dim=1):
        done = made(piece, first, state, keep_state=True)
        state, first = done.state, first + piece.shape[1]
        out.append(done.out)
    torch.testing.assert_close(torch.cat(out, 1), made(hidden).out, **exactly)


@every_decoder
@torch.no_grad()
@pytest.mark.parametrize("at", [0, 11, 39])
def test_no_token_sees_the_future(kind, at):
    made, hidden = causal_layer(DECODERS[kind]), states(1, 40)
    other = hidden.clone()
    other[:, at] += 1.0
    change = (made(hidden).out - made(other).out).abs().amax(-1)[0]
    assert float(change[:at].max() if at else 0.0) < 1e-12
    assert float(change[at]) > 1e-6


@every_decoder
@pytest.mark.parametrize("tokens", [1, 2, 130, 257])
def test_any_length_of_text(kind, tokens):
    made, hidden = causal_layer(DECODERS[kind], torch.float32), states(1, tokens, torch.float32)
    hidden.requires_grad_()
    out = made(hidden).out
    out.square().sum().backward()
    assert out.shape == hidden.shape
    assert out.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@every_decoder
def test_no_n_by_n_is_formed_causally(kind):
    rooted = kind.startswith("sparse")

    def run(tokens, hidden):
        longer = {"stride": isqrt(tokens)} if rooted else {}
        return causal_layer({**DECODERS[kind], **longer}, torch.float32).train()(hidden).out

    assert growth(run) < (10 if rooted else 5)


@every_decoder
def test_causal_gradients(kind):
    made = causal_layer(DECODERS[kind])
    assert gradients_are_right(lambda hidden: made(hidden).out)


@every_decoder
def test_a_language_model_of_it_writes(kind, tmp_path):
    """Token by token, from its state, what it would write reading everything anew."""
    torch.manual_seed(0)
    config = longspan.LongspanDecoderConfig(
        vocab_size=30,
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=32,
        attention=DECODERS[kind],
    )
    model: Any = longspan.LongspanForCausalLM(config)
    model.to(DEVICE)
    ids = torch.randint(0, 30, (2, 13)).to(DEVICE)
    two_steps(model, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    written = model.eval().generate(ids, 9)
    again = ids
    for _ in range(9):
        again = torch.cat((again, model(again).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(written, again)
    model.save_pretrained(tmp_path)
    loaded = longspan.LongspanForCausalLM.from_pretrained(tmp_path).to(DEVICE).eval()
    assert torch.equal(loaded.generate(ids, 9), written)


def test_every_kind_has_a_small_setting():
    assert {one["kind"] for one in ENCODERS.values()} == set(ATTENTION) - {"window"}
    others = {"window", "full", "xl", "compressive"}
    assert {one["kind"] for one in DECODERS.values()} == set(CAUSAL_ATTENTION) - others


@pytest.mark.parametrize("kind", sorted(set(DECODERS) - {"shortformer", "performer-relu"}))
@pytest.mark.parametrize("base", [0.0, -2.0, float("nan")])
def test_a_base_that_turns_nothing_is_named(kind, base):
    with pytest.raises(ValueError, match=f"base={base} of the rotary angles must be above 0"):
        causal_layer({**DECODERS[kind], "base": base})


@pytest.mark.parametrize("kind", sorted(set(ATTENTION) - set(CAUSAL_ATTENTION)))
def test_a_decoder_says_why_it_cannot(kind):
    with pytest.raises(ValueError, match=f"{kind!r} is for encoders alone: .+; choose from"):
        longspan.LongspanDecoderConfig(attention={"kind": kind})


@pytest.mark.parametrize("kind", sorted(set(CAUSAL_ATTENTION) - set(ATTENTION)))
def test_an_encoder_says_why_it_cannot(kind):
    with pytest.raises(ValueError, match=f"{kind!r} is for decoders alone: .+; choose from"):
        longspan.LongspanConfig(attention={"kind": kind})
