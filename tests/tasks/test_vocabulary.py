"""Vocabularies that need no training."""

import pytest
from transformers import AutoTokenizer

from longspan.tasks.documents import make_template, token_ids
from longspan.tasks.vocabulary import make_tokenizer


def test_bytes_are_tokens(tmp_path):
    tokenizer = make_tokenizer("bytes")
    texts = ["a b\n\n c", "été 日本", "<pad> and <s> are text", "\x00\x7f"]
    for text, ids in zip(texts, token_ids(tokenizer, texts), strict=True):
        assert len(ids) == len(text.encode())
        assert min(ids) >= 3  # none of the special ones
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256 + 3
    assert make_template(tokenizer, pair=False).before == [tokenizer.cls_token_id]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [again(text)["input_ids"] for text in texts] == [
        tokenizer(text)["input_ids"] for text in texts
    ]


def test_symbols_of_listops_are_tokens():
    tokenizer = make_tokenizer("listops")
    (plain, published) = token_ids(tokenizer, ["[MAX 2 [SM 3 4 ] ]", "( ( ( [MAX 2 ) 3 ) ] )"])
    assert len(plain) == 7
    assert len(published) == 4
    assert plain[0] == published[0]
    assert tokenizer.unk_token_id not in {*plain, *published}
    assert token_ids(tokenizer, ["12"])[0].tolist() == [tokenizer.unk_token_id]


def test_others_are_unknown():
    with pytest.raises(ValueError, match="choose from bytes, listops"):
        make_tokenizer("words")
