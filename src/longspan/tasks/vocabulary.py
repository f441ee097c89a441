"""Vocabularies that need no training: the tokens of a model that starts from nothing."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from longspan.data.listops import SYMBOLS

PAD, FIRST, UNKNOWN = "<pad>", "<s>", "<unk>"


def make_tokenizer(vocabulary: str) -> Any:
    """Of "bytes" or the symbols of "listops"; before each text stands one token more, from which
    a document's scores may come."""
    special = [PAD, FIRST, UNKNOWN]
    if vocabulary == "bytes":
        # Each byte is written as one printable character, so that any text has its tokens.
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        known = {name: number for number, name in enumerate([*special, *letters])}
        made = Tokenizer(models.BPE(vocab=known, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    elif vocabulary == "listops":
        known = {name: number for number, name in enumerate([*special, *SYMBOLS])}
        made = Tokenizer(models.WordLevel(vocab=known, unk_token=UNKNOWN))
        # The benchmark's own files also have parentheses, which say nothing more.
        made.normalizer = normalizers.Sequence([normalizers.Replace(one, "") for one in "()"])
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        raise ValueError(f"vocabulary={vocabulary!r}: choose from bytes, listops")
    made.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A", special_tokens=[(FIRST, known[FIRST])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=PAD,
        cls_token=FIRST,
        unk_token=UNKNOWN,
        split_special_tokens=True,  # a text that has "<pad>" in it means these five bytes
    )
