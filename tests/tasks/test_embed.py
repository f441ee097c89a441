"""Passages embedded in their context: exact characters, exact states, nothing left out."""

import copy
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tasks.tiny import load_tiny, story, tiny_checkpoint
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel

import longspan
from longspan.data.tables import Row
from longspan.tasks.embed import (
    Reading,
    cut,
    embed,
    embed_query,
    longest,
    owned,
    paragraphs,
    read,
)
from longspan.tasks.embedder import Embedder
from longspan.tasks.lines import remarks, write_lines

LONG = 96


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """(long model, short model, tokenizer)"""
    short, tokenizer = load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))
    return longspan.convert(short, max_length=LONG, window=8).eval(), short, tokenizer


def direct_states(model: Any, tokenizer: Any, text: str) -> torch.Tensor:
    """One pass over the whole text, special tokens cut off."""
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 1:-1]


def test_equals_direct_pooling(tiny: tuple[Any, Any, Any]) -> None:
    model, _, tokenizer = tiny
    text = "The cat sleeps. The dog is in the garden."
    spans = [(0, 15), (16, len(text)), (4, 7)]
    found = embed(model, tokenizer, text, spans)
    states = direct_states(model, tokenizer, text)
    pieces = [tokenizer(text[:end], add_special_tokens=False)["input_ids"] for end in (15, 4, 7)]
    first, before_cat, cat = (len(piece) for piece in pieces)
    wanted = [states[:first], states[first:], states[before_cat:cat]]
    for vector, tokens in zip(found.vectors, wanted, strict=True):
        torch.testing.assert_close(vector, normalize(tokens.mean(dim=0), dim=0))


def test_context_changes_a_passage(tiny: tuple[Any, Any, Any]) -> None:
    """The same words after other words have another vector: that is what it is for."""
    model, _, tokenizer = tiny
    one, other = "The cat sleeps. It is a house.", "The dog floods. It is a house."
    vectors = [embed(model, tokenizer, text, [(16, len(text))]).vectors[0] for text in (one, other)]
    assert (vectors[0] - vectors[1]).abs().max() > 1e-3


def test_offsets_are_exact(tiny: tuple[Any, Any, Any]) -> None:
    model, _, tokenizer = tiny
    text = story(12)
    found = embed(model, tokenizer, text, length=40)
    reading = read(model, tokenizer, text, length=40)
    assert all(text[a:b].lower() in tokenizer.vocab for a, b in reading.offsets)
    assert found.text == text
    assert [text[a:b].strip() for a, b in found.spans] == [text[a:b] for a, b in found.spans]


def test_a_document_longer_than_a_pass(tiny: tuple[Any, Any, Any]) -> None:
    """Each token's state is that of the pass in which it stands farthest from an edge."""
    model, _, tokenizer = tiny
    text = story(20)
    reading = read(model, tokenizer, text, length=40, overlap=10)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(reading.states) == len(reading.offsets) == len(tokens) > 100
    assert len(reading.passes) > 3
    margins = torch.full((len(tokens),), -1)
    wanted = torch.empty_like(reading.states)
    for start, stop in reading.passes:
        ids = [tokenizer.cls_token_id, *tokens[start:stop], tokenizer.sep_token_id]
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0, 1:-1]
        for place in range(start, stop):
            to_left = 10**6 if start == 0 else place - start
            to_right = 10**6 if stop == len(tokens) else stop - 1 - place
            if min(to_left, to_right) > margins[place]:
                margins[place], wanted[place] = min(to_left, to_right), states[place - start]
    # In the middle of an overlap both passes are equally good.
    same = (reading.states - wanted).abs().amax(dim=1) < 1e-5
    assert int((~same).sum()) <= len(reading.passes)


def test_batches_change_nothing(tiny: tuple[Any, Any, Any]) -> None:
    _, short, tokenizer = tiny
    text, calls = story(20), []
    one = read(short, tokenizer, text, overlap=0)
    many = read(
        short, tokenizer, text, overlap=0, batch_size=3, progress=lambda *made: calls.append(made)
    )
    torch.testing.assert_close(one.states, many.states)
    assert calls[-1] == (len(one.passes), len(one.passes))


@given(st.integers(1, 300), st.integers(1, 60), st.data())
def test_passes_cover_every_token_once(tokens: int, room: int, data: st.DataObject) -> None:
    passes = cut(tokens, room, data.draw(st.integers(0, room - 1)))
    own = [owned(passes, index) for index in range(len(passes))]
    assert [place for a, b in own for place in range(a, b)] == list(range(tokens))
    for (start, stop), (first, last) in zip(passes, own, strict=True):
        assert start <= first <= last <= stop
        assert stop - start == min(room, tokens)


@given(st.text(alphabet=st.sampled_from("ab .\n\t?é"), max_size=400), st.integers(2, 40))
def test_paragraphs_hold_everything(text: str, most: int) -> None:
    spans = paragraphs(text, least=most // 2, most=most)
    assert all(0 < stop - start <= most for start, stop in spans)
    inside = {place for start, stop in spans for place in range(start, stop)}
    assert len(inside) == sum(stop - start for start, stop in spans)
    assert all(text[place].isspace() for place in set(range(len(text))) - inside)


def test_paragraphs_join_headings() -> None:
    text = "Heading\n=======\n\n" + "Words. " * 60 + "\n\nNext one is long enough. " + "More. " * 60
    assert [text[a:b][:7] for a, b in paragraphs(text)] == ["Heading", "Next on"]


def test_paragraphs_of_a_long_text_take_little_memory() -> None:
    text = ("word " * 15 + "end.\n") * 5000  # one paragraph
    tracemalloc.start()
    paragraphs(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(text)


def test_ranking(tiny: tuple[Any, Any, Any]) -> None:
    model, _, tokenizer = tiny
    text = "the cat sleeps\n\nthe river floods\n\nthe  cat sleeps"
    found = embed(model, tokenizer, text, [(0, 14), (16, 32), (34, 49)])
    ranked = found.ranked(found.vectors[2])
    assert ranked[0][0] == 2
    assert ranked[0][1] == pytest.approx(1.0)
    assert [index for index, _ in ranked] == [2, 1]  # the first repeats the last


def test_a_span_without_tokens_is_close_to_nothing(tiny: tuple[Any, Any, Any]) -> None:
    model, _, tokenizer = tiny
    found = embed(model, tokenizer, "cat   dog", [(3, 6), (0, 3)])
    assert found.vectors[0].abs().max() == 0
    assert found.vectors[1].norm() == pytest.approx(1.0)


def test_a_word_may_bring_its_space() -> None:
    """Tokens of ModernBERT's tokenizer, among others, begin with the space before their word."""
    text, states = "cat  dog house", torch.eye(4)
    reading = Reading(text, states, [(0, 3), (3, 4), (4, 8), (8, 14)], [(0, 4)])
    found = reading.pool([(0, 3), (5, 8), (9, 14), (3, 5)])
    torch.testing.assert_close(found, states[[0, 2, 3, 1]])


def test_half_precision_can_be_asked(tiny: tuple[Any, Any, Any]) -> None:
    model, tokenizer = copy.deepcopy(tiny[1]).bfloat16(), tiny[2]
    found = embed(model, tokenizer, "the cat sleeps", [(0, 14)])
    asked = embed_query(model, tokenizer, "the cat sleeps")
    assert asked.dtype == found.vectors.dtype == torch.float32
    assert found.ranked(asked)[0][1] > 0.9


@pytest.mark.parametrize(("kind", "room"), [("roberta", 30), ("mpnet", 30), ("bert", 32)])
def test_rows_of_a_table_that_are_no_positions(
    kind: str, room: int, tiny: tuple[Any, Any, Any]
) -> None:
    """RoBERTa's first position is the third row of its table."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tiny[2]),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        pad_token_id=1,
    )
    model = AutoModel.from_config(config).eval()
    assert longest(model) == room
    assert len(read(model, tiny[2], story(20)).passes) > 3


def test_wrong_input_is_named(tiny: tuple[Any, Any, Any], tmp_path: Path) -> None:
    model, short, tokenizer = tiny
    with pytest.raises(ValueError, match="no tokens"):
        embed(model, tokenizer, "  ", [])
    with pytest.raises(ValueError, match="at most 96"):
        read(model, tokenizer, "cat", length=97)
    with pytest.raises(ValueError, match="at least 3 tokens"):
        read(model, tokenizer, "cat", length=2)
    with pytest.raises(ValueError, match="overlap=94"):
        read(model, tokenizer, "cat", overlap=94)
    with pytest.raises(ValueError, match="span 0 is 0:9, but the text has 3"):
        embed(model, tokenizer, "cat", [(0, 9)])
    with pytest.raises(ValueError, match="question is empty"):
        embed_query(model, tokenizer, " ")
    with pytest.raises(ValueError, match="room for 24"):
        embed_query(short, tokenizer, "cat " * 40)


def test_a_table_is_embedded_row_by_row(tmp_path: Path) -> None:
    """Documents and passages as `embed` has them, in a file that can be gone on with."""
    source = tiny_checkpoint(tmp_path / "tiny")
    texts = [story(3), " ", "\x00\x01", story(40)]
    table, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    table.write_text("".join(json.dumps({"id": i, "body": t}) + "\n" for i, t in enumerate(texts)))
    use = Embedder(source, length=LONG, window=8, text="body")
    assert write_lines(table, output, use.rows, batch=2) == 4
    whole = output.read_bytes()
    first, blank, nothing, last = map(json.loads, whole.splitlines())
    assert blank == {"row": 1, "id": 1, "skipped": "the text is empty"}
    assert nothing == {"row": 2, "id": 2, "skipped": "the text has no tokens"}
    assert last["pieces"] > 1
    assert "pieces" not in first
    for text, line in ((texts[0], first), (texts[3], last)):
        found = embed(use.model, use.tokenizer, text, [(0, len(text)), *paragraphs(text)])
        assert [(one["start"], one["end"]) for one in line["passages"]] == found.spans[1:]
        made = torch.tensor([line["vector"], *(one["vector"] for one in line["passages"])])
        torch.testing.assert_close(made, found.vectors, atol=1e-6, rtol=0)
    output.write_bytes(whole[: len(whole) // 2])
    write_lines(table, output, use.rows, resume=True)
    assert output.read_bytes() == whole
    assert remarks(output) == ['2 skipped ("skipped")', '1 read in pieces ("pieces")']


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [([[0, 7], [4, 7]], [(0, 7), (4, 7)]), ("[[0, 7]]", [(0, 7)]), (None, []), ("", [])],
)
def test_spans_may_be_given(tmp_path: Path, spans: Any, wanted: list[Any]) -> None:
    use = Embedder(tiny_checkpoint(tmp_path), length=LONG, window=8, spans="where")
    (line,) = use.rows([Row("line 1", {"text": "The cat sleeps.", "where": spans})])
    assert [(one["start"], one["end"]) for one in line["passages"]] == wanted
    whole = Embedder(tmp_path, length=LONG, window=8, spans="document")
    (alone,) = whole.rows([Row("line 1", {"text": "The cat sleeps."})])
    assert alone == {"vector": line["vector"]}


@pytest.mark.parametrize(
    "spans", [[[0, 99]], [[5, 2]], [[-1, 2]], [[0]], [0, 2], "cat", [[0, 1.5]]]
)
def test_spans_that_are_none_are_named(tmp_path: Path, spans: Any) -> None:
    use = Embedder(tiny_checkpoint(tmp_path), length=LONG, window=8, spans="where")
    with pytest.raises(
        ValueError, match=r"line 1, column 'where': expected a list of \[start, end"
    ):
        use.rows([Row("line 1", {"text": "The cat sleeps.", "where": spans})])
    with pytest.raises(ValueError, match="no column 'where'"):
        use.rows([Row("line 1", {"text": "The cat sleeps."})])
