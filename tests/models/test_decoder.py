"""The language model: causality, state, generation, saving."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspan.models import LongspanDecoderConfig, LongspanForCausalLM, Sampler

VOCAB = 20
ATTENTION = {
    "window": [{"left": 4, "dilation": [1, 2]}, {"left": 6}],
    "relative": {"left": 5, "dilation": [2, 1], "position": "relative"},
    "full": {"kind": "full"},
    "xl": {"kind": "xl", "memory": 8},
    "compressive": {"kind": "compressive", "memory": 4, "compressed": 4, "rate": 2},
    "mixed": [{"left": 4}, {"kind": "xl", "memory": 6, "same_length": True}],
}
KINDS = pytest.mark.parametrize("kind", ATTENTION)


def model(kind="window", **changes) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LongspanDecoderConfig(
        vocab_size=VOCAB, intermediate_size=24, attention=ATTENTION[kind], **sizes, **changes
    )
    made = LongspanForCausalLM(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.eval()


def ids(tokens=30, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, tokens), generator=generator)


@KINDS
def test_the_future_is_unseen(kind):
    made, given = model(kind), ids()
    changed = given.clone()
    changed[:, 17:] = (changed[:, 17:] + 1) % VOCAB
    torch.testing.assert_close(made(given).logits[:, :17], made(changed).logits[:, :17])
    assert not torch.allclose(made(given).logits[:, 17], made(changed).logits[:, 17])


@pytest.mark.parametrize("kind", ["window", "relative", "full"])
@pytest.mark.parametrize("size", [1, 11])
def test_in_pieces_or_at_once(kind, size):
    made, given = model(kind), ids()
    state: Any = None
    found = []
    for piece in given.split(size, 1):
        done = made(piece, state=state, keep_state=True)
        state = done.state
        found.append(done.logits)
    assert state.tokens == 30
    torch.testing.assert_close(torch.cat(found, 1), made(given).logits, rtol=1e-4, atol=1e-4)


def test_influence_reaches_as_far_as_the_windows():
    """Two layers, 4 and 6 steps, two tokens each for one head: no further than 4 * 2 + 6."""
    made = model(dtype="float64").double()
    given = ids(batch=1)
    embedded = made.embeddings(given).detach().requires_grad_()
    hidden = embedded
    for block in made.layers:
        hidden = block(hidden).out
    (grad,) = torch.autograd.grad(hidden[0, 29].sum(), embedded)
    reached = grad[0].any(-1).nonzero().min().item()
    assert reached == 29 - (4 * 2 + 6)


@pytest.mark.parametrize("kind", ["window", "relative", "full"])
def test_generation_is_what_recomputation_gives(kind):
    made, given = model(kind), ids(5)
    found = made.generate(given, 40)
    again = given
    for _ in range(40):
        again = torch.cat([again, made(again).logits[:, -1:].argmax(-1)], 1)
    assert found.tolist() == again.tolist()


def test_the_cache_stays_at_the_window():
    made = model()
    state: Any = None
    for _ in range(40):
        state = made(ids(1), state=state, keep_state=True).state
    assert [cache.key.shape[1] for cache in state.layers] == [8, 6]


@KINDS
def test_every_kind_generates(kind):
    sampler = Sampler(temperature=1.0, seed=3)
    made = model(kind)
    one, two = (made.generate(ids(4), 12, sampler) for _ in range(2))
    assert one.shape == (2, 16)
    assert torch.equal(one, two)
    assert not torch.equal(one, made.generate(ids(4), 12, Sampler(temperature=1.0, seed=4)))


def test_sampling_obeys_its_limits():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain = Sampler(temperature=1.0).chances(logits)
    torch.testing.assert_close(plain, logits.softmax(-1))
    assert (Sampler(temperature=1.0, top_k=2).chances(logits) > 0).sum() == 2
    # 0.644 alone falls short of 0.7; with 0.237 it does not.
    nucleus = Sampler(temperature=1.0, top_p=0.7).chances(logits)
    assert (nucleus > 0).tolist() == [[True, True, False, False]]
    torch.testing.assert_close(nucleus.sum(), torch.tensor(1.0))
    assert (Sampler(temperature=1.0, top_p=0.1).chances(logits) > 0).sum() == 1
    sharp = Sampler(temperature=0.5).chances(logits)
    torch.testing.assert_close(sharp, (logits * 2).softmax(-1))


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"seed": 2**70}]
)
def test_wrong_sampling_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampler(**wrong)


@KINDS
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "norm": "rms"}, {"norm": "unit"}]
)
def test_saved_and_loaded_it_is_the_same(kind, changes, tmp_path):
    made = model(kind, **changes)
    made.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is LongspanForCausalLM
    torch.testing.assert_close(again(ids()).logits, made(ids()).logits)


def test_labels_are_shifted_targets_are_not():
    made, given = model(), ids()
    logits = made(given).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten())
    torch.testing.assert_close(made(given, labels=given).loss, wanted)
    targets = torch.cat([given[:, 1:], torch.full((2, 1), -100)], 1)
    torch.testing.assert_close(made(given, targets=targets).loss, wanted)
    padded = torch.cat([given, torch.zeros(2, 3, dtype=torch.long)], 1)
    labels = torch.cat([given, torch.full((2, 3), -100)], 1)
    torch.testing.assert_close(made(padded, labels=labels).loss, wanted)


@KINDS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(kind, reentrant):
    made, given = model(kind).train(), ids()

    def gradients():
        made.zero_grad()
        state = made(given[:, :15], keep_state=True).state
        made(given[:, 15:], labels=given[:, 15:], state=state, keep_state=True).loss.backward()
        return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}

    plain = gradients()
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(), plain)


@pytest.mark.parametrize("pre_norm", [True, False])
def test_one_batch_can_be_learned_by_heart(pre_norm):
    torch.manual_seed(0)
    config = LongspanDecoderConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        attention={"left": 8},
        pre_norm=pre_norm,
    )
    made, given = LongspanForCausalLM(config), ids(16)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    loss = torch.tensor(torch.inf)
    for _ in range(150):
        loss = made(given, labels=given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.05:
            break
    assert loss.item() < 0.05


def test_where_dropout_falls():
    plain = model(hidden_dropout_prob=0.3).train()
    assert {m.p for m in plain.modules() if isinstance(m, torch.nn.Dropout)} == {0.3}
    made = model(hidden_dropout_prob=0.3, activation_dropout=0.0).train()
    assert made.layers[0].activation_dropout.p == 0.0
    assert made.layers[0].dropout.p == 0.3
    with pytest.raises(ValueError, match=r"activation_dropout=1\.5"):
        model(activation_dropout=1.5)


@pytest.mark.parametrize("half", [False, True])
def test_the_residual_under_autocast(half):
    made, given, seen = model(half_residual=half), ids(), []
    made.layers[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    exact = made(given).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = made(given).logits
    assert seen == [torch.float32, torch.bfloat16 if half else torch.float32]
    assert (found - exact).norm() < 0.05 * exact.norm()


def test_windows_can_be_set():
    made = model()
    made.set_windows([1, 2])
    assert [block.attention.left for block in made.layers] == [1, 2]
    assert [setting["left"] for setting in made.config.attention] == [1, 2]
    with pytest.raises(ValueError, match="3 windows for 2 layers"):
        made.set_windows([1, 2, 3])
    with pytest.raises(ValueError, match="layer 0 is of kind 'xl'"):
        model("xl").set_windows([1, 2])


@pytest.mark.parametrize("kind", ["window", "relative", "xl"])
def test_it_is_one_graph(kind):
    """Compiled without a break, state and all, and to the same numbers."""
    torch._dynamo.reset()
    made = model(kind)
    compiled: Any = torch.compile(made, backend="aot_eager", fullgraph=True)
    plain, found = None, None
    for piece in ids().split(15, 1):
        plain = made(piece, state=plain and plain.state, keep_state=True)
        found = compiled(piece, state=found and found.state, keep_state=True)
        torch.testing.assert_close(found.logits, plain.logits)


def test_the_published_sizes():
    """41 million parameters: 12 layers of 512 with relative positions."""
    with torch.device("meta"):
        config = LongspanDecoderConfig(attention={"left": 32, "position": "relative"})
        made = LongspanForCausalLM(config)
    assert round(made.num_parameters() / 1e6) == 41


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "batch"}, "choose from layer, rms, unit"),
        ({"hidden_act": "shrug"}, "not an activation"),
        ({"attention": [{"left": 2}]}, "1 settings for 2 layers"),
        ({"attention": {"kind": "window", "left": -2}}, "layer 0: left=-2"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob"),
    ],
)
def test_wrong_configurations_are_named(changes, message):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with pytest.raises(ValueError, match=message):
        LongspanDecoderConfig(**(sizes | changes))


def test_wrong_input_is_named():
    made = model()
    with pytest.raises(ValueError, match=r"ids from 0 to 19"):
        made(torch.tensor([[VOCAB]]))
    with pytest.raises(ValueError, match="at least one each"):
        made(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="not both"):
        made(ids(), labels=ids(), targets=ids())


@pytest.mark.parametrize(
    "setting",
    [
        {"left": 8, "dilation": [1, 2]},
        {"left": 8, "dilation": [1, 2], "position": "relative"},
        {"kind": "full", "norm_keys": True},
        {"kind": "xl", "memory": 12},
        {"kind": "compressive", "memory": 8, "compressed": 4, "rate": 2},
    ],
    ids=["window", "relative", "full", "xl", "compressive"],
)
def test_one_batch_is_learned_by_heart(setting):
    """Two segments of random bytes; only what the first is preceded by cannot be known."""
    torch.manual_seed(0)
    config = LongspanDecoderConfig(
        vocab_size=32,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        norm="rms",
        attention=setting,
    )
    model = LongspanForCausalLM(config).train()
    ids = torch.randint(32, (4, 25))
    segments = [(ids[:, :12], ids[:, 1:13]), (ids[:, 12:24], ids[:, 13:])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    nats = torch.tensor(torch.inf)
    for _ in range(120):
        state, found = None, []
        for inputs, targets in segments:
            done = model(inputs, targets=targets, state=state, keep_state=True)
            done.loss.backward()
            state = done.state
            found.append(done.loss.detach() - (done.auxiliary_loss or 0.0))
        nats = torch.stack(found).mean()
        optimizer.step()
        optimizer.zero_grad()
        if nats < 0.05:
            break
    assert nats < 0.05
