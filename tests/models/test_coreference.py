"""The coreference head: scores against plain loops, the loss, and what it remembers."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from longspan.models import LongspanConfig, LongspanForCoreference
from longspan.models.coreference import Linker, _centered, _features

WORDS = 17


def small_config():
    return LongspanConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=66,
    )


def linker(**changes):
    torch.manual_seed(0)
    settings = {
        "longest": 4,
        "keep": 1.0,
        "antecedents": 6,
        "size": 8,
        "dropout": 0.0,
        "genres": ["talk"],
    }
    made = Linker(small_config(), **settings | changes).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def given(hidden, words=WORDS):
    firsts, lasts = torch.randn(2, words, hidden, dtype=torch.float64)
    sentence = torch.arange(words) // 6
    speaker, form = torch.arange(words) % 3, torch.arange(words) % 5
    return firsts, lasts, sentence, speaker, form, torch.tensor(1)


def test_candidates_are_all_spans_within_a_sentence():
    made = linker()
    _, _, sentence, *_ = given(16)
    start, end = torch.randn(2, WORDS, 8, dtype=torch.float64)
    scores = made._candidates(start, end, sentence)
    assert scores.shape == (WORDS, 4)
    for i in range(WORDS):
        for width in range(4):
            j = i + width
            if j >= WORDS or sentence[i] != sentence[j]:
                assert scores[i, width] == -torch.inf
                continue
            expected = (made.spans(start[i]) @ end[j]) / 8**0.5
            expected = expected + made.opens(start[i]) + made.closes(end[j])
            expected = expected + made.width.weight[width]
            torch.testing.assert_close(scores[i, width], expected[0], rtol=1e-5, atol=1e-5)


def test_links_are_the_best_of_all_pairs():
    """With every span kept and as many antecedents as there are, as two loops have it."""
    made = linker(keep=4.0, antecedents=100).eval()
    inputs = given(made.inside.in_features)
    links = made(*inputs, None)
    sentence = inputs[2]
    count = sum(
        1
        for i in range(WORDS)
        for w in range(4)
        if i + w < WORDS and sentence[i] == sentence[i + w]
    )
    assert len(links.first) == count
    assert links.scores.shape == (count, count + 1)
    assert bool((links.scores[:, 0] == 0).all())
    for i in (0, 1, 20, count - 1):
        assert int((links.scores[i, 1:] > -torch.inf).sum()) == i
        assert sorted(links.antecedents[i, :i].tolist()) == list(range(i))
    order = list(zip(links.first.tolist(), links.last.tolist(), strict=True))
    assert order == sorted(order)


def test_what_is_no_mention_is_linked_to_nothing():
    """And mentions that are sure to be such are linked by what they have in common alone."""
    made = linker(keep=4.0, antecedents=100).eval()
    inputs = given(made.inside.in_features)
    torch.nn.init.constant_(made.opens.bias, -1000.0)
    assert bool((made(*inputs, None).scores[:, 1:] < -1000).all())
    found = []
    for sure in (1000.0, 2000.0):
        torch.nn.init.constant_(made.opens.bias, sure)
        found.append(made(*inputs, None).scores)
    torch.testing.assert_close(*found)


def test_a_pair_is_compared_as_the_formula_says():
    made = linker().eval()
    vectors = torch.randn(5, 8, dtype=torch.float64)
    antecedents = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 2], [3, 1]])
    kinds = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 0], [2, 2]])
    found = made._pairs(vectors, antecedents, torch.tensor(1), kinds + 3, kinds, 2 - kinds)
    for i in range(5):
        for column in range(2):
            mine, other, kind = vectors[i], vectors[antecedents[i, column]], kinds[i, column]
            inner = made.mine(mine) + made.other(other) + made.both(mine * other)
            inner = inner + made.distance.weight[kind + 3] + made.speaker.weight[kind]
            inner = inner + made.same.weight[2 - kind] + made.genre.weight[1]
            expected = made.fine(gelu(inner))[0] + made.coarse(mine) @ other / 8**0.5
            torch.testing.assert_close(found[i, column], expected.float(), rtol=1e-5, atol=1e-5)


def test_what_is_known_of_a_pair():
    """Spans "the cat" (0-1), "cat" (1), "the cat" (40-41), "a cat" (43-44)."""
    form = torch.zeros(50, dtype=torch.long)
    form[[0, 1, 40, 41, 43, 44]] = torch.tensor([1, 2, 1, 2, 3, 2])
    speaker = torch.zeros(50, dtype=torch.long)
    speaker[[1, 40]] = 1
    speaker[43] = 2
    first, last = torch.tensor([0, 1, 40, 43]), torch.tensor([1, 1, 41, 44])
    before = torch.tensor([[0, 0], [0, 0], [0, 1], [1, 2]])
    distance, speakers, same = _features(first, last, speaker, form, before)
    assert distance[1:].tolist() == [[0, 0], [5, 5], [5, 1]]  # 0 words, 39 and 39, 42 and 2
    assert speakers[1:].tolist() == [[0, 0], [0, 1], [2, 2]]
    assert same[1:].tolist() == [[1, 1], [2, 1], [1, 1]]


def test_fewer_antecedents_are_the_coarsely_best(monkeypatch):
    """Rows are compared some at a time; how many does not matter."""
    made = linker().eval()
    inputs = given(made.inside.in_features)
    whole = made(*inputs, None)
    monkeypatch.setattr("longspan.models.coreference._ROWS", 3)
    parts = made(*inputs, None)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)
    many = linker(antecedents=100).eval()(*inputs, None)
    assert whole.antecedents.shape[1] == 6
    for i in range(len(whole.first)):
        few = dict(zip(whole.antecedents[i].tolist(), whole.scores[i, 1:].tolist(), strict=True))
        all_ = dict(zip(many.antecedents[i].tolist(), many.scores[i, 1:].tolist(), strict=True))
        for place, score in few.items():
            if place < i:
                assert score == pytest.approx(all_[place])


def test_the_loss_is_that_of_any_right_antecedent():
    made = linker(keep=4.0, antecedents=100).eval()
    inputs = given(made.inside.in_features)
    right = torch.tensor([[0, 0, 0], [2, 3, 0], [13, 13, 0], [5, 5, 1], [6, 8, 2], [0, 5, 2]])
    loss = made(*inputs, right)
    links = made(*inputs, None)
    cluster = {(a, b): c for a, b, c in right.tolist() if b - a < 4}  # one is too wide
    spans = list(zip(links.first.tolist(), links.last.tolist(), strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for i, span in enumerate(spans):
        chances = links.scores[i].softmax(dim=0)
        own = cluster.get(span)
        rows = [
            1 + column
            for column, place in enumerate(links.antecedents[i].tolist())
            if place < i and own is not None and cluster.get(spans[place]) == own
        ]
        total = total - chances[rows or [0]].sum().log()
    is_mention = torch.tensor([float(span in cluster) for span in spans], dtype=torch.float64)
    total = total + binary_cross_entropy_with_logits(links.mention, is_mention, reduction="sum")
    torch.testing.assert_close(loss, total / len(spans), rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_weight():
    made = linker(keep=1.0)
    inputs = given(made.inside.in_features)
    made(*inputs, torch.tensor([[0, 0, 0], [2, 3, 0], [7, 7, 1]])).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


def test_what_all_tokens_share_does_not_matter():
    """Packed or padded, each piece by itself."""
    states = torch.randn(7, 5)
    shift = torch.randn(2, 5) * 100
    shared = torch.cat([shift[:1].expand(3, 5), shift[1:].expand(4, 5)])
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = _centered((states + shared)[None], None, bounds)
    torch.testing.assert_close(packed, _centered(states[None], None, bounds), rtol=1e-4, atol=1e-4)
    rows = torch.zeros(2, 4, 5)
    rows[0, :3], rows[1] = states[:3], states[3:]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    padded = _centered(rows + shift[:, None], mask, None)[mask.bool()]
    torch.testing.assert_close(padded, packed[0], rtol=1e-4, atol=1e-4)
    assert float(packed[0, :3].mean(dim=0).abs().max()) < 1e-4


def test_it_is_saved_with_its_settings(tmp_path):
    config = small_config()
    config.coreference = {"longest": 3, "size": 8, "genres": ["a", "b"], "singletons": True}
    model = LongspanForCoreference(config).eval()
    model.save_pretrained(tmp_path)
    again = LongspanForCoreference.from_pretrained(tmp_path)
    assert again.config.coreference == config.coreference
    assert again.linker.longest == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert [path.suffix for path in tmp_path.glob("model*")] == [".safetensors"]


def test_memory_is_linear():
    """What autograd keeps of a document twice as long is twice as much."""
    made = linker(keep=0.5).float()
    sizes = {}
    for words in (1000, 2000):
        inputs = given(made.inside.in_features, words)
        kept: dict[int, int] = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = made(
                *(one.float() if one.is_floating_point() else one for one in inputs),
                torch.tensor([[0, 0, 0]]),
            )
        sizes[words] = sum(kept.values())
        del loss
    assert sizes[2000] < 2.1 * sizes[1000]
