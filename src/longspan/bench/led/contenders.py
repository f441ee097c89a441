"""Who is measured. A contender turns a case into a `Workload`: an encoder-decoder and its batch.

All have the same weights, those of a new LED of transformers, no dropout, and the same documents
and texts. A step is ids in, the loss out, and back to all weights; the optimiser, which costs the
same for every length, is no part of it. Generation goes on to the last token. On a GPU our layers
are compiled for steps, and each step of ours that generates is captured, as for a user.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspan.bench.benchmark import Clocked, Contenders, Workload
from longspan.bench.led.cases import LEDCase

CONTENDERS = Contenders()
contender = CONTENDERS.register

# Texts that are generated for a point, and seconds after which no further one is begun.
_TEXTS = 3
_ENOUGH = 4.0


def _theirs(case: LEDCase, device: torch.device) -> Any:
    from transformers import LEDConfig, LEDForConditionalGeneration

    config = LEDConfig(
        vocab_size=case.vocab,
        d_model=case.hidden,
        encoder_layers=case.layers,
        decoder_layers=case.layers,
        encoder_attention_heads=case.heads,
        decoder_attention_heads=case.heads,
        encoder_ffn_dim=4 * case.hidden,
        decoder_ffn_dim=4 * case.hidden,
        attention_window=case.window,
        max_encoder_position_embeddings=case.tokens,
        max_decoder_position_embeddings=case.target + 1,
        dropout=0.0,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        with device:
            return LEDForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)


def _workload(case: LEDCase, model: Any, device: torch.device, *, ours: bool) -> Workload:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(3, case.vocab, (case.batch, case.tokens), generator=drawn).to(device)
    labels = torch.randint(3, case.vocab, (case.batch, case.target), generator=drawn).to(device)
    place = torch.arange(case.tokens, device=device)
    given: dict[str, Any] = {
        "global_attention_mask": (place < case.globals).expand(ids.shape).long()
    }
    if ours:
        given["max_global_tokens"] = case.globals
    model.train(not case.beams)

    def step() -> Tensor:
        return model(ids, labels=labels, **given).loss

    def write(tokens: int = case.target) -> Tensor:
        return model.generate(
            ids,
            num_beams=case.beams,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            **given,
        )

    weights: list[Tensor] = list(model.parameters())
    resident = sum(weight.numel() * weight.element_size() for weight in weights)
    if case.beams and device.type == "cuda":
        return Clocked(lambda: _clock(write, resident))
    output = weights[0].detach().new_zeros(())
    # Who generates looks at every step whether all beams have ended; transformers' LED looks at
    # its masks in any case.
    waits = not ours or case.beams > 0
    return Workload(write if case.beams else step, weights, output, resident, waits)


def _clock(write: Callable[..., object], resident: int) -> tuple[float, float]:
    """Milliseconds and MiB of a text. One takes seconds: the ten that a pass is usually given
    before it is timed would take a minute."""
    write(1)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    while len(times) < _TEXTS and sum(times) < _ENOUGH:
        start = time.perf_counter()
        write()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    growth = torch.cuda.max_memory_allocated() - before
    return 1e3 * statistics.median(times), (growth + resident) / 2**20


def _ours(case: LEDCase, device: torch.device) -> Any:
    from longspan.hub.convert import convert

    with device:
        model: Any = convert(_theirs(case, device))
    if device.type == "cuda" and not case.beams:
        torch.compiler.reset()  # graphs of earlier cases would count towards dynamo's limit
        parts = [model.encoder.embeddings, *model.encoder.layers, *model.decoder.layers]
        for part in parts:
            part.compile(fullgraph=True, dynamic=False)
    return model


@contender("longspan", "longspan")
def _longspan(case: LEDCase, device: torch.device) -> Workload:
    return _workload(case, _ours(case, device), device, ours=True)


@contender("longspan-captured", "longspan, captured", devices=("cuda",))
def _longspan_captured(case: LEDCase, device: torch.device) -> Workload:
    """As a user has it: `longspan.capture(model)`, called from Python."""
    from longspan.models import capture

    workload = _workload(case, capture(_ours(case, device)), device, ours=True)
    return replace(workload, waits=True)  # no graph contains another


@contender("longspan-patch", "LED, patched")
def _longspan_patch(case: LEDCase, device: torch.device) -> Workload:
    from longspan.hub.patch import patch

    return _workload(case, patch(_theirs(case, device)), device, ours=False)


@contender("led", "transformers LED")
def _led(case: LEDCase, device: torch.device) -> Workload:
    return _workload(case, _theirs(case, device), device, ours=False)
