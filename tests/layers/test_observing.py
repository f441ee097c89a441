"""What layers take in while training: explicit, saved, and the same after a pause."""

import copy
from typing import Any

import pytest
import torch
from layers.family import DECODERS, DIM, ENCODERS, HEADS, compiles_anywhere

import longspan
from longspan.layers.observing import Observing, end_part, refresh
from longspan.layers.registry import ATTENTION, CAUSAL_ATTENTION

pytestmark = pytest.mark.usefixtures("on_device")


def encoder(kind: str) -> Any:
    return longspan.LongspanForMaskedLM(
        longspan.LongspanConfig(
            vocab_size=30,
            hidden_size=DIM,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=32,
            max_position_embeddings=66,
            attention=ENCODERS[kind],
        )
    )


def decoder(kind: str) -> Any:
    return longspan.LongspanForCausalLM(
        longspan.LongspanDecoderConfig(
            vocab_size=30,
            hidden_size=DIM,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=32,
            attention=DECODERS[kind],
        )
    )


MODELS = [
    *(
        (encoder, kind)
        for kind in ENCODERS
        if issubclass(ATTENTION[ENCODERS[kind]["kind"]], Observing)
    ),
    *(
        (decoder, kind)
        for kind in DECODERS
        if issubclass(CAUSAL_ATTENTION[DECODERS[kind]["kind"]], Observing)
    ),
]
every_model = pytest.mark.parametrize(("build", "kind"), MODELS)


def step(model, number):
    torch.manual_seed(number)
    ids = torch.randint(3, 30, (2, 25))
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None
    refresh(model)
    return float(loss.detach())


@every_model
def test_a_saved_model_goes_on_to_the_same_numbers(build, kind, tmp_path):
    torch.manual_seed(0)
    model = build(kind)
    for number in range(5):
        step(model, number)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert [step(model, n) for n in range(5, 9)] == [step(again, n) for n in range(5, 9)]
    one, two = model.state_dict(), again.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


@every_model
def test_layers_do_take_something_in(build, kind):
    torch.manual_seed(0)
    model = build(kind)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for number in range(4):
        step(model, number)
    own = [name for name in before if name.endswith("directions")]
    assert len(own) == 2
    assert not any(torch.equal(before[name], model.get_buffer(name)) for name in own)


@every_model
def test_parts_of_a_batch_are_taken_in_together(build, kind):
    """A step in two parts is the step in one, and nothing of it is left for the next."""
    torch.manual_seed(1)
    ids = torch.randint(3, 30, (4, 25))
    found = []
    for parts in (1, 2):
        torch.manual_seed(0)
        model = build(kind).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif isinstance(module, Observing):
                setattr(module, "dropout", 0.0)  # noqa: B010 (of a mixin)
        for number in range(4):
            torch.manual_seed(number)
            for part in ids.chunk(parts):
                model(part)
                end_part(model)
            refresh(model)
            refresh(model)  # there is nothing more to take in
        found.append(dict(model.named_buffers()))
    steps = [int(buffer) for name, buffer in found[1].items() if name.endswith("steps")]
    assert steps == [4, 4]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


@every_model
def test_a_model_is_copied_in_the_middle_of_a_step(build, kind):
    """As for a mean of its weights; the copy has nothing to take in."""
    model = build(kind).train()
    ids = torch.randint(3, 30, (2, 25))
    model(ids, labels=ids).loss.backward()
    again = copy.deepcopy(model)
    refresh(again)
    refresh(model)
    steps = [
        [int(buffer) for name, buffer in one.named_buffers() if name.endswith("steps")]
        for one in (model, again)
    ]
    assert steps == [[1, 1], [0, 0]]


@every_model
def test_gradient_checkpointing_changes_nothing(build, kind):
    """It calls every layer twice in a step; what is taken in counts once."""
    states = []
    for again in (False, True):
        torch.manual_seed(0)
        model = build(kind)
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for number in range(5):
            step(model, number)
        states.append(model.state_dict())
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=1e-6)


@compiles_anywhere
@every_model
def test_it_compiles_whole_and_still_takes_in(build, kind):
    torch.manual_seed(0)
    layer = build(kind).train().base_model.layers[0].attention
    layer.dropout = 0.0
    hidden = torch.randn(2, 25, DIM)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = run(hidden), layer(hidden)
    if build is decoder:
        found, wanted = found.out, wanted.out
    torch.testing.assert_close(found, wanted)
    run(hidden)
    layer.refresh()
    assert int(layer.centroids.steps) == 1
