"""Text written on by a byte model, as it comes."""

import codecs
from collections.abc import Iterator

import torch

from longspan.data.text import SEPARATOR
from longspan.models.decoder import LongspanForCausalLM
from longspan.models.sampling import Sampler


def write(model: LongspanForCausalLM, prompt: str, tokens: int, sampler: Sampler) -> Iterator[str]:
    """What follows the prompt, piece by piece, until `tokens` bytes or the document's end."""
    text = prompt.encode() or b"\n"
    if model.config.vocab_size < 256:
        raise ValueError(f"a vocabulary of {model.config.vocab_size} is not one of bytes")
    ids = torch.tensor([list(text)], device=model.device)
    decoder = codecs.getincrementaldecoder("utf8")(errors="replace")
    for chosen in model.stream(ids, tokens, sampler):
        byte = int(chosen)
        if byte == SEPARATOR:
            break
        yield decoder.decode(bytes([byte]))
    yield decoder.decode(b"", final=True)
