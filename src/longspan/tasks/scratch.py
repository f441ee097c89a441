"""A small encoder-decoder that knows nothing yet, and words for it, learned from the texts it is
to read: a start where no pretrained checkpoint can be had."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from longspan.layers.position import sinusoids
from longspan.models import LongspanForConditionalGeneration, LongspanSeq2SeqConfig
from longspan.train import checkpoint

SIZES = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6}
WORDS = 8192
# Words are learned from so many characters; more would hardly change them.
_ENOUGH = 10_000_000
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # in BART's order


def make_writer(
    folder: Path,
    texts: Iterable[str],
    *,
    positions: int,
    window: int,
    longest: int,
    words: int = WORDS,
    seed: int = 0,
    **sizes: Any,
) -> Path:
    """Save a new model and its tokenizer in `folder`, unless they are there; both follow from the
    texts and the seed."""
    if (folder / "config.json").exists():
        return folder
    tokenizer = learn_words(texts, words)
    sizes = SIZES | sizes
    config = LongspanSeq2SeqConfig(
        **sizes | {"intermediate_size": 4 * sizes["hidden_size"]},
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        decoder_positions=longest + 1,
        attention={"window": window},
        norm_first=True,  # learns at higher rates
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    torch.manual_seed(seed)
    model = LongspanForConditionalGeneration(config)
    for part in (model.encoder, model.decoder):
        _order(part.embeddings.positions)
    unfinished = checkpoint.unfinished(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, folder)
    return folder


@torch.no_grad()
def _order(positions: nn.Embedding | None) -> None:
    """Let learned positions begin as waves, as large as they were: who stands next to whom is then
    known from the first step, also where few documents reach."""
    assert positions is not None  # an encoder-decoder learns them
    table = positions.weight
    waves = sinusoids(torch.arange(table.shape[0]), table.shape[1], table.dtype)
    table.copy_(waves * (table.std() / waves.std()))


def learn_words(texts: Iterable[str], words: int = WORDS) -> PreTrainedTokenizerFast:
    """A tokenizer of byte pairs, as BART has one, of at most so many words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=words,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_some(texts), trainer)
    first, last = _SPECIAL[0], _SPECIAL[2]
    made.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(first, 0), (last, 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=first,
        cls_token=first,
        pad_token=_SPECIAL[1],
        eos_token=last,
        sep_token=last,
        unk_token=_SPECIAL[3],
    )


def _some(texts: Iterable[str]) -> Iterator[str]:
    read = 0
    for text in texts:
        if read > _ENOUGH:
            return
        read += len(text)
        yield text
