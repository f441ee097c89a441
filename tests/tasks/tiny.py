"""A tiny sentence encoder with its tokenizer, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from models.small import short_sizes, spread
from transformers import BertConfig, BertForMaskedLM, BertModel, BertTokenizer

from longspan import LongspanForConditionalGeneration, LongspanSeq2SeqConfig

NOUNS = ["cat", "dog", "river", "house", "garden"]
WORDS = [*NOUNS, "the", "a", "is", "was", "opens", "floods", "sleeps", "in", "and", "why", "when"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tiny_checkpoint(folder: Path, positions: int = 24, *, masked: bool = False) -> Path:
    """A BertModel of `positions` positions, or one of masked tokens, and its tokenizer, saved."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = [*SPECIAL, *WORDS, ".", "?", *"abcdefghijklmnopqrstuvwxyz"]
    torch.manual_seed(0)
    sizes = short_sizes(vocab_size=len(vocabulary), max_position_embeddings=positions)
    config = BertConfig(**sizes)
    made = BertForMaskedLM(config) if masked else BertModel(config, add_pooling_layer=False)
    spread(made).save_pretrained(folder)
    words = {word: index for index, word in enumerate(dict.fromkeys(vocabulary))}
    BertTokenizer(vocab=words, model_max_length=positions).save_pretrained(folder)
    return folder


def tiny_writer(folder: Path) -> Path:
    """An encoder-decoder of ours with the same tokenizer, saved."""
    tiny_checkpoint(folder)
    words = len(BertTokenizer.from_pretrained(folder))
    torch.manual_seed(0)
    config = LongspanSeq2SeqConfig(
        **short_sizes(vocab_size=words, max_position_embeddings=24, attention={"window": 16}),
        decoder_positions=256,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=3,
    )
    LongspanForConditionalGeneration(config).save_pretrained(folder)
    return folder


def load_tiny(folder: Path) -> tuple[Any, Any]:
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    return model, BertTokenizer.from_pretrained(folder)


def story(sentences: int) -> str:
    """Paragraphs that differ, with white space of several kinds between and inside them."""
    made = []
    for index in range(sentences):
        word, other = NOUNS[index % 5], NOUNS[index // 5 % 5]
        made.append(f"The {word} is\nin the {other}  and Opens.")
    return "\n\n".join(made) + " \n"
