"""A checkpoint on disk made long: weights, tokenizer, and a report of how equal the two are."""

import copy
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from longspan import models
from longspan.hub import seq2seq
from longspan.hub.convert import convert, load, positions_of
from longspan.hub.rounding import MOST_TOKENS, Rounding, compare
from longspan.layers.quantized import QuantizedLinear
from longspan.models import (
    LongspanConfig,
    LongspanPreTrainedModel,
    LongspanSeq2SeqConfig,
    quantize,
)
from longspan.models.loading import read_config


@dataclass(frozen=True)
class Parity:
    """The largest difference between the outputs of two models on one input, in float32, and the
    size of these outputs: rounding errors grow with it. `exact` is the difference in float64, where
    there are hardly any, `alike` that in float32 if ours rounds as transformers' Longformer does;
    None where they were not looked at."""

    what: str
    tokens: int
    largest: float
    size: float
    exact: float | None = None
    alike: float | None = None


@dataclass(frozen=True)
class Conversion:
    """What was made of a checkpoint; `window` is None where a layer has none. `rounding` and
    `megabytes` of weights, before and after, are there if they were made int8."""

    source: str
    result: str
    positions: tuple[int, int]
    window: int | None
    parameters: int
    parity: list[Parity]
    notes: list[str] = field(default_factory=list)
    rounding: list[Rounding] = field(default_factory=list)
    megabytes: tuple[float, float] | None = None


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    max_length: int | None = None,
    window: int | None = None,
    texts: Sequence[str] = (),
    int8: bool = False,
) -> Conversion:
    """`convert`, from a folder or hub name to a folder, with the tokenizer and a parity report.

    One of longspan's own is copied, with `max_length` positions if that is given. With `int8` the
    weights are then quantized, with a report of what that costs. The folder appears only when
    everything is in it.
    """
    destination = Path(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already; give a folder that does not")
    own = _own(source)
    if own is not None and window is not None:
        raise ValueError(f"{source} is one of longspan's already: its windows stay as they are")
    if own is not None and texts and not int8:
        raise ValueError(f"{source} is one of longspan's already: a text has nothing to compare")
    with warnings.catch_warnings(record=True) as said:  # of what is left behind
        warnings.simplefilter("always", UserWarning)
        theirs = load(source) if own is None else own
        has = getattr(theirs.config, "attention_window", None)
        if has is not None and window is not None:
            warnings.warn(
                f"{type(theirs).__name__} comes over as it is, with its windows of {has}: the "
                f"window of {window} that was asked for is not used",
                stacklevel=2,
            )
        trained = _trained(theirs)
        ours = own or convert(theirs, max_length=max_length, window=window)
    if own is not None and max_length is not None:
        own.extend_positions(max_length)
    tokenizer, notes = _tokenizer(source, ours)
    notes = [*dict.fromkeys(str(one.message) for one in said), *notes]
    reports = [] if own else parity(theirs, ours, tokenizer=tokenizer, texts=texts)
    saved, rounding, size = ours, [], _megabytes(ours)
    if int8:
        saved = quantize(ours)
        most = min(ours.config.longest or MOST_TOKENS, MOST_TOKENS)
        rounding = compare(ours.float(), saved, _inputs(ours, tokenizer, texts, most))
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Beside the destination, so that renaming is one step on one file system.
    building = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        saved.save_pretrained(building)
        if tokenizer is not None:
            tokenizer.save_pretrained(building)
        written = sum(path.stat().st_size for path in building.glob("*.safetensors")) / 1e6
        building.chmod(0o755)  # mkdtemp makes it private
        if destination.exists():
            destination.rmdir()
        os.replace(building, destination)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Conversion(
        source=type(theirs).__name__,
        result=type(ours).__name__,
        positions=(trained, ours.config.longest or trained),
        window=_window(theirs, ours),
        parameters=_parameters(ours),
        parity=reports,
        notes=notes,
        rounding=rounding,
        megabytes=(size, written) if int8 else None,
    )


def _own(source: str | Path) -> LongspanPreTrainedModel | None:
    """The model of longspan's in a folder or on the hub, None if it is another's."""
    known = read_config(source)
    if known.get("model_type") not in (LongspanConfig.model_type, LongspanSeq2SeqConfig.model_type):
        return None
    return getattr(models, known["architectures"][0]).from_pretrained(source)


@torch.no_grad()
def parity(
    theirs: PreTrainedModel,
    ours: LongspanPreTrainedModel,
    *,
    tokenizer: Any = None,
    texts: Sequence[str] = (),
    seed: int = 0,
) -> list[Parity]:
    """Compare outputs in float32, then in float64, on input that fits the window, or two windows if
    the source has windows itself: random ids, then given texts."""
    theirs, ours = copy.deepcopy(theirs).float().eval(), copy.deepcopy(ours).float().eval()
    window = _window(theirs, ours)
    assert window is not None  # what `convert` makes has them
    had = getattr(theirs.config, "attention_window", None)
    widest = had if had is None or isinstance(had, int) else max(had)
    fits = window // 2 + 1 if widest is None else 2 * widest
    fits = min(fits, ours.config.longest or 512, _trained(theirs))
    inputs = list(_inputs(ours, tokenizer, texts, fits, seed))
    found = [_difference(theirs, ours, ids) for _, ids in inputs]
    alike: list[float | None] = [None] * len(inputs)
    if theirs.config.model_type == "longformer":  # a decoder, as LED has one, rounds in its own way
        ours.set_backend("chunks")
        alike = [_difference(theirs, ours, ids)[0] for _, ids in inputs]
        ours.set_backend("auto")
    theirs, ours = theirs.double(), ours.double()
    return [
        Parity(what, ids.shape[1], *rounded, exact=_difference(theirs, ours, ids)[0], alike=same)
        for (what, ids), rounded, same in zip(inputs, found, alike, strict=True)
    ]


def _inputs(
    ours: LongspanPreTrainedModel, tokenizer: Any, texts: Sequence[str], most: int, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """What to compare on, and ids [documents, tokens], up to `most` of them."""
    draw = torch.Generator().manual_seed(seed)
    # Ids from 10 on: special tokens have places of their own, at which heads look.
    low = min(10, ours.config.vocab_size - 1)
    yield "random tokens", torch.randint(low, ours.config.vocab_size, (2, most), generator=draw)
    for text in texts:
        if tokenizer is None:
            raise ValueError("to compare on a text, the source needs a tokenizer; it has none")
        ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"]])
        shown = text[:40].replace("\n", " ") + ("..." if len(text) > 40 else "")
        cut = "" if ids.shape[1] <= most else f", its first {most} tokens"
        yield f"{shown!r}{cut}", ids[:, :most]


def _parameters(model: PreTrainedModel) -> int:
    """How many, with those that are int8 already, which torch counts as buffers."""
    int8 = [part.codes.numel() for part in model.modules() if isinstance(part, QuantizedLinear)]
    return sum(p.numel() for p in model.parameters()) + sum(int8)


def _megabytes(model: PreTrainedModel) -> float:
    """Of all its tensors, those that it shares counted once."""
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in model.state_dict().values()}
    return sum(tensors.values()) / 1e6


def _difference(
    theirs: PreTrainedModel, ours: LongspanPreTrainedModel, ids: Tensor
) -> tuple[float, float]:
    if type(ours).__name__.endswith("MultipleChoice"):
        ids = ids[:, None].expand(-1, 2, -1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(ours.config, LongspanSeq2SeqConfig):
        # Any target will do, as long as both get the same.
        given["decoder_input_ids"] = ids[:, : ours.config.decoder_positions]
    pair = []
    for model in (theirs, ours):
        outputs = model(**given)
        pair.append(_tensors(outputs))
    difference = max((a - b).abs().max().item() for a, b in zip(*pair, strict=True))
    return difference, max(a.abs().max().item() for a in pair[0])


def _tensors(outputs: Any) -> list[Tensor]:
    """Logits where there is a head, else hidden states."""
    names = ("logits", "start_logits", "end_logits", "last_hidden_state")
    found = [outputs[name] for name in names if outputs.get(name) is not None]
    return found[:-1] if len(found) > 1 and "last_hidden_state" in outputs else found


def _trained(model: PreTrainedModel) -> int:
    """The longest document that a model, theirs or ours, has positions for."""
    config = model.config
    if config.model_type in seq2seq.FAMILIES:
        return seq2seq.positions(config)[0]
    if isinstance(config, LongspanConfig):
        return config.max_position_embeddings - config.position_offset
    known = positions_of(config)[1]
    assert known is not None  # it was loaded, so its family is known
    return known


def _window(theirs: PreTrainedModel, ours: LongspanPreTrainedModel) -> int | None:
    """The narrowest window among layers that had none, or among all if each layer had one; None
    where a layer of ours is of another kind."""
    if any("window" not in setting for setting in ours.config.attention):
        return None
    windows = [setting["window"] for setting in ours.config.attention]
    kinds = getattr(theirs.config, "layer_types", None) or [None] * len(windows)
    converted = [w for w, kind in zip(windows, kinds, strict=True) if kind != "sliding_attention"]
    return min(w if isinstance(w, int) else 2 * min(w) for w in converted or windows)


def _tokenizer(source: str | Path, ours: LongspanPreTrainedModel) -> tuple[Any, list[str]]:
    if Path(source).is_dir() and not any(
        path.name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece"))
        for path in Path(source).iterdir()
    ):
        # transformers would make up an empty one.
        return None, [f"no tokenizer was found in {source}, so none was saved"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return None, [f"no tokenizer was found in {source}, so none was saved ({reason})"]
    tokenizer.model_max_length = ours.config.longest or tokenizer.model_max_length
    if tokenizer.is_fast:
        # Encoders of sentences come with one that cuts, after 128 tokens say, whoever uses the
        # file without transformers.
        tokenizer.backend_tokenizer.no_truncation()
    tokenizer.init_kwargs.pop("max_length", None)
    if ours.config.sep_token_id is None:
        # BERT's config does not say, and without it nobody knows where a question ends.
        ours.config.sep_token_id = tokenizer.sep_token_id
    return tokenizer, []
