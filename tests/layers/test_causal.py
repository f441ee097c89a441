"""Causal layers: against formulas written out, piece by piece against in one go."""

import math
from typing import Any

import pytest
import torch

from longspan.layers.causal import CausalFull, CausalWindow
from longspan.layers.compressive import COMPRESSIONS, CompressiveAttention, Compressor
from longspan.layers.position import rotate, rotate_from
from longspan.layers.registry import CAUSAL_ATTENTION, build_causal_attention
from longspan.layers.xl import XLAttention

pytestmark = pytest.mark.usefixtures("on_device")

DIM, HEADS, TOKENS = 12, 3, 24

SETTINGS = {
    "window": {"left": 5, "dilation": [1, 2, 1]},
    "window-relative": {"left": 5, "dilation": [1, 3, 1], "position": "relative"},
    "window-plain": {"left": 0, "position": "none"},
    "full": {"kind": "full"},
    "xl": {"kind": "xl", "memory": 8, "same_length": True},
    "compressive": {"kind": "compressive", "memory": 6, "compressed": 4, "rate": 2},
}


def layer(setting, seed=0) -> Any:
    torch.manual_seed(seed)
    made = build_causal_attention(DIM, HEADS, setting, bias=False).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def hidden(tokens=TOKENS, batch=2):
    return torch.randn(batch, tokens, DIM, dtype=torch.float64, requires_grad=True)


def in_pieces(made, given, sizes) -> Any:
    """Outputs of pieces of a text, and the state after them."""
    state, first, out = None, 0, []
    for piece in given.split(sizes, dim=1):
        done: Any = made(piece, first, state, keep_state=True)
        out.append(done.out)
        first, state = first + piece.shape[1], done.state
    return torch.cat(out, 1), state


@pytest.mark.parametrize("kind", ["window", "window-relative", "window-plain", "full"])
@pytest.mark.parametrize("size", [1, 7])
def test_a_cache_changes_nothing(kind, size):
    made, given = layer(SETTINGS[kind]), hidden()
    whole = made(given).out
    pieces, cache = in_pieces(made, given, size)
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)
    if isinstance(made, CausalWindow):
        assert cache.key.shape[1] == made.reach


@torch.no_grad()
@pytest.mark.parametrize("kind", ["window", "window-relative", "window-plain"])
@pytest.mark.parametrize("read", [1, 4, 17])
def test_a_ring_changes_nothing(kind, read):
    """Several times around, after a prompt shorter or longer than the window."""
    made, given = layer(SETTINGS[kind]), hidden(60)
    whole = made(given).out
    state = made.ring(made(given[:, :read], keep_state=True).state, read)
    places = [tensor.data_ptr() for tensor in state]
    for token in range(read, 60):
        done = made(given[:, token : token + 1], token, state, keep_state=True)
        torch.testing.assert_close(done.out[:, 0], whole[:, token], rtol=1e-9, atol=1e-9)
        state = done.state
    if kind != "window-relative":  # which keeps its cache: positions go by order there
        assert [tensor.data_ptr() for tensor in state] == places
        assert state.key.shape[1] == made.reach + 1


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_future_is_unseen(setting):
    made, given = layer(setting), hidden()
    changed = given.detach().clone()
    changed[:, 15:] += 1.0
    torch.testing.assert_close(made(given).out[:, :15], made(changed).out[:, :15])
    assert not torch.allclose(made(given).out[:, 15], made(changed).out[:, 15])


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_state_can_be_used_twice(setting):
    """A call changes neither the module nor the state it was given."""
    made, given = layer(setting), hidden()
    _, state = in_pieces(made, given[:, :16], 8)
    weights = [parameter.clone() for parameter in made.parameters()]
    one = made(given[:, 16:], 16, state, keep_state=True).out
    two = made(given[:, 16:], 16, state, keep_state=True).out
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(weights, made.parameters(), strict=True))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_no_gradient_into_the_past(setting):
    made, given = layer(setting), hidden()
    state = made(given[:, :12], 0, None, keep_state=True).state
    out = made(given[:, 12:], 12, state).out
    (grad,) = torch.autograd.grad(out.sum(), given)
    assert (grad[:, :12] == 0).all()
    assert (grad[:, 12:] != 0).any()


def test_rotary_positions_are_relative():
    """Scores depend on the distance alone, however far into the text."""
    query, key = hidden()[:, :, None], hidden()[:, :, None]

    def scores(first):
        place = torch.arange(TOKENS, dtype=torch.float64)[None] + first
        turned = rotate(query, key, position=place, base=10000.0)
        return torch.einsum("bihd,bjhd->bij", *turned)

    torch.testing.assert_close(scores(0), scores(1_000_000), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first", [0, 3])
def test_a_rotation_is_differentiated_twice(first):
    given = torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True)

    def squared(one):
        (turned,) = rotate_from(first, one, base=100.0)
        return turned.square() * torch.arange(4)

    torch.autograd.gradcheck(squared, given)
    torch.autograd.gradgradcheck(squared, given)


def sinusoid(distance, dim):
    rates = [10000 ** (-2 * (i // 2) / dim) for i in range(dim)]
    return torch.tensor(
        [(math.sin, math.cos)[i % 2](distance * rate) for i, rate in enumerate(rates)],
        dtype=torch.float64,
    )


def naive_xl(made, given, sees):
    """Transformer-XL's four terms, one pair of tokens after the other, over the whole text."""
    size = DIM // HEADS
    w_q, w_k, w_v = made.qkv.weight.split(DIM)
    rows = []
    for batch in range(given.shape[0]):
        for i in range(given.shape[1]):
            row = []
            for head in range(HEADS):
                own = slice(head * size, (head + 1) * size)
                q = w_q[own] @ given[batch, i]
                u, v = made.relative.content_bias[head], made.relative.position_bias[head]
                scores, values = [], []
                for j in range(i + 1):
                    if sees(i, j):
                        far = (
                            i - j
                            if made.relative.clamp is None
                            else min(i - j, made.relative.clamp)
                        )
                        k = w_k[own] @ given[batch, j]
                        r = made.relative.project.weight[own] @ sinusoid(far, DIM)
                        scores.append((q @ k + q @ r + u @ k + v @ r) / math.sqrt(size))
                        values.append(w_v[own] @ given[batch, j])
                row.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            rows.append(torch.cat(row))
    return torch.stack(rows).view_as(given)


@pytest.mark.parametrize("clamp", [None, 4])
@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("memory", [4, 6, 30])
def test_xl_is_its_formula(memory, same_length, clamp):
    """Segments of 6: token i sees from its segment's start less the memory, or `memory` tokens."""
    made = layer(
        {"kind": "xl", "memory": memory, "same_length": same_length, "clamp": clamp}, seed=3
    )
    given = hidden(18, batch=1).detach()

    def sees(i, j):
        return i - j < memory if same_length else j >= i // 6 * 6 - memory

    found, state = in_pieces(made, given, 6)
    torch.testing.assert_close(found, naive_xl(made, given, sees), rtol=1e-5, atol=1e-6)
    assert state.shape[1] == min(memory, 18)


def test_xl_in_pieces_is_one_pass_if_it_remembers_all():
    made, given = layer({"kind": "xl", "memory": TOKENS}), hidden()
    for size in (1, 5, 12):
        torch.testing.assert_close(in_pieces(made, given, size)[0], made(given).out)


def test_xl_without_memory_is_segments_apart():
    made, given = layer({"kind": "xl", "memory": 0}), hidden()
    apart = torch.cat([made(piece).out for piece in given.split(6, 1)], 1)
    torch.testing.assert_close(in_pieces(made, given, 6)[0], apart)


@pytest.mark.parametrize("kind", ["xl", "compressive", "most-used"])
@pytest.mark.parametrize("switch", [False, True])
def test_keys_that_are_remembered_are_those_projected_anew(kind, switch):
    """Outside training a memory brings its keys along; either kind is taken from the other."""
    setting = SETTINGS["xl" if kind == "xl" else "compressive"]
    if kind == "most-used":
        setting = {**setting, "compression": "most-used"}
    made, given = layer(setting), hidden().detach()
    states: list[Any] = []
    outs = []
    for training in (False, True):
        state, out = None, []
        for number, piece in enumerate(given.split(4, 1)):
            made.train(training != (switch and number % 2 == 1))
            done = made(piece, 4 * number, state, keep_state=True)
            state = done.state
            out.append(done.out)
            states.append((made.training, state if kind == "xl" else state.recent))
        outs.append(torch.cat(out, 1))
    torch.testing.assert_close(*outs)
    assert all(memory.shape[2] == (DIM if training else 3 * DIM) for training, memory in states)


def compressive(**changes):
    options = {"memory": 6, "compressed": 4, "rate": 2, "compression": "mean"} | changes
    return layer({"kind": "compressive", **options})


def same_weights(made, kind, **options):
    other = layer({"kind": kind, **options})
    own = made.state_dict()
    other.load_state_dict({name: own[name] for name in other.state_dict()})
    return other


def test_without_compressed_memory_it_is_xl():
    made, given = compressive(compressed=0, memory=8), hidden()
    xl = same_weights(made, "xl", memory=8)
    torch.testing.assert_close(in_pieces(made, given, 4)[0], in_pieces(xl, given, 4)[0])


def test_compressing_one_to_one_is_a_longer_memory():
    made, given = compressive(rate=1, memory=5, compressed=7), hidden()
    xl = same_weights(made, "xl", memory=12)
    torch.testing.assert_close(in_pieces(made, given, 6)[0], in_pieces(xl, given, 6)[0])


def test_memories_are_queues():
    """Tagged tokens: the recent ones are whole, older ones in pairs, the oldest are gone."""
    made = compressive(memory=4, compressed=3)
    tags = torch.arange(20.0, dtype=torch.float64)[None, :, None].expand(1, -1, DIM)
    _, state = in_pieces(made, tags, 5)
    assert state.recent[0, :, 0].tolist() == [16, 17, 18, 19]
    assert state.compressed[0, :, 0].tolist() == [10.5, 12.5, 14.5]
    _, one_by_one = in_pieces(made, tags, 1)
    torch.testing.assert_close(one_by_one.compressed, state.compressed)


def test_convolution_can_be_the_mean():
    mean, conv = (Compressor(DIM, 3, kind).double() for kind in ("mean", "conv"))
    assert conv.conv is not None
    assert conv.conv.bias is not None
    with torch.no_grad():
        conv.conv.weight.copy_(torch.eye(DIM)[..., None].expand(-1, -1, 3) / 3)
        conv.conv.bias.zero_()
    old = torch.randn(2, 9, DIM, dtype=torch.float64)
    torch.testing.assert_close(conv(old), mean(old))


def test_most_used_keeps_what_was_looked_at_in_order():
    old = torch.arange(6.0)[None, :, None].expand(1, -1, 2)
    usage = torch.tensor([[0.1, 5.0, 0.2, 0.3, 9.0, 4.0]])
    assert Compressor(2, 2, "most-used")(old, usage)[0, :, 0].tolist() == [1, 4, 5]


def test_usage_adds_up():
    """Every query hands out one unit per head; tokens that left took theirs along."""
    made, given = compressive(memory=TOKENS, compression="most-used"), hidden(12)
    _, state = in_pieces(made, given, 4)
    torch.testing.assert_close(state.usage.sum(1), torch.full((2,), 12.0 * HEADS))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_compression_runs(compression):
    made, given = compressive(compression=compression).train(), hidden()
    out, state = in_pieces(made, given, 4)
    assert out.isfinite().all()
    assert state.compressed.shape == (2, 4, DIM)
    assert state.recent.shape == (2, 6, DIM)


@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
@pytest.mark.parametrize("compression", ["conv", "dilated"])
def test_the_extra_loss_teaches_the_compressor_only(loss, compression):
    made = compressive(compression=compression, loss=loss).train()
    given = hidden()
    state = made(given[:, :8], 0, None, keep_state=True).state
    done = made(given[:, 8:], 8, state, keep_state=True)
    done.loss.backward()
    own = {n for n, p in made.named_parameters() if p.grad is not None and p.grad.any()}
    assert all(name.startswith(("compressor", "expand")) for name in own)
    assert {name.split(".")[0] for name in own} >= {"compressor"}
    assert given.grad is None or not given.grad.any()
    (grad,) = torch.autograd.grad(made(given[:, 8:], 8, state).out.sum(), made.qkv.weight)
    assert grad.any()  # the weights learn from everything else as before


def test_an_identity_loses_nothing():
    """Attention over tokens compressed one to one by the identity is the same attention."""
    made = compressive(rate=1, compression="conv", loss="attention").train()
    with torch.no_grad():
        made.compressor.conv.weight.copy_(torch.eye(DIM)[..., None])
        made.compressor.conv.bias.zero_()
    assert made(hidden(), 0, None, keep_state=True).loss.item() < 1e-20


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"left": -1}, "left=-1"),
        ({"left": 4, "position": "absolute"}, "choose from rotary, relative"),
        ({"left": 4, "dilation": [1, 1.5]}, r"\[1, 1.5\]: expected int or a list of int"),
        ({"kind": "blockwise", "shifts": "0,1"}, "'0,1': expected a list of int or None"),
        ({"kind": None}, "kind=None of attention must be a name; choose from window"),
        ({"kind": "full", "base": float("inf")}, "base=inf of the rotary angles"),
        ({"kind": "adaptive_span", "longest": 8, "cost": float("nan")}, "cost=nan"),
        ({"kind": "xl", "memory": -1}, "memory=-1"),
        ({"kind": "xl", "memory": 1.5}, "memory=1.5: expected int"),
        ({"kind": "xl", "memory": "abc"}, "memory='abc': expected int"),
        ({"kind": "xl", "memory": 4, "same_length": 1}, "same_length=1: expected bool"),
        ({"kind": "xl", "memory": 0, "same_length": True}, "memory=0"),
        ({"kind": "xl", "memory": 4, "clamp": 0}, "clamp=0"),
        ({"kind": "compressive", "memory": 4, "compressed": 4, "rate": 0}, "rate=0"),
        (
            {"kind": "compressive", "memory": 4, "compressed": 4, "compression": "zip"},
            "choose from mean",
        ),
        (
            {
                "kind": "compressive",
                "memory": 4,
                "compressed": 4,
                "compression": "mean",
                "loss": "attention",
            },
            "nothing to learn",
        ),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(ValueError, match=message):
        build_causal_attention(DIM, HEADS, setting, bias=False)


def test_a_misspelt_option_is_named():
    with pytest.raises(ValueError, match="no option 'memroy'; did you mean memory"):
        build_causal_attention(DIM, HEADS, {"kind": "xl", "memroy": 4}, bias=False)


def test_kinds_are_what_they_say():
    kinds = {"window": CausalWindow, "full": CausalFull, "xl": XLAttention}
    for name, cls in kinds.items():
        assert type(layer(SETTINGS[name])) is cls
    assert type(layer(SETTINGS["compressive"])) is CompressiveAttention


def test_who_learns_from_what_segments_left_says_so():
    """Then a task reads a text as a stream; other kinds are given segments in any order."""
    recurrent = {kind for kind, layer in CAUSAL_ATTENTION.items() if layer.recurrent}
    assert recurrent == {"xl", "compressive", "shortformer"}


@pytest.mark.parametrize(
    "setting",
    [
        {"left": 4},
        {"kind": "full"},
        {"kind": "sparse", "stride": 4},
        {"kind": "adaptive_span", "longest": 8, "start": 0.5},
        {"kind": "bp", "near": 2},
    ],
    ids=lambda setting: setting.get("kind", "window"),
)
def test_queries_and_keys_of_one_length(setting):
    """However long their weights make them, attention is the same; without, it is not."""
    hidden = torch.randn(2, 19, 16, generator=torch.Generator().manual_seed(0)).double()
    apart = []
    for norm in (True, False):
        torch.manual_seed(0)
        layer = build_causal_attention(16, 2, setting | {"norm_keys": norm}, bias=False).double()
        before = layer(hidden).out
        with torch.no_grad():
            layer.qkv.weight[:32] *= 5.0
        apart.append(float((layer(hidden).out - before).detach().abs().max()))
    assert apart[0] < 1e-4 < apart[1]
