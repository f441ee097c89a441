"""Text written on by a byte model, as it comes."""

import codecs
from collections.abc import Iterator

import torch

from longspan.data.text import SEPARATOR
from longspan.models.decoder import LongspanForCausalLM
from longspan.models.sampling import Sampler


def write(
    model: LongspanForCausalLM, prompt: str, tokens: int, sampler: Sampler, stop: str = ""
) -> Iterator[str]:
    """What follows the prompt, piece by piece: `tokens` bytes of it, or up to the document's end
    or the first `stop`, which is the last piece then."""
    text = prompt.encode() or b"\n"
    if model.config.vocab_size < 256:
        raise ValueError(f"a vocabulary of {model.config.vocab_size} is not one of bytes")
    ids = torch.tensor([list(text)], device=model.device)
    written = bytearray()
    decoder = codecs.getincrementaldecoder("utf8")(errors="replace")
    for chosen in model.stream(ids, tokens, sampler):
        byte = int(chosen)
        if byte == SEPARATOR:
            break
        yield decoder.decode(bytes([byte]))
        written.append(byte)
        if stop and written.endswith(stop.encode()):
            break
    yield decoder.decode(b"", final=True)
