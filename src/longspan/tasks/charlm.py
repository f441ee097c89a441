"""Language modelling by characters, that is, bytes."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from longspan.data.segments import Shuffled, Streams
from longspan.data.text import Bytes, Corpus, read, split_documents
from longspan.layers.registry import CAUSAL_ATTENTION
from longspan.models.decoder import DecoderState, LongspanForCausalLM
from longspan.models.decoder_config import LongspanDecoderConfig
from longspan.models.sampling import Sampler
from longspan.tasks.bits import bits, sliding_nats, streamed_nats
from longspan.train.optim import build_optimizers
from longspan.train.recipe import Evaluation, Phase, Recipe, fit, unknown
from longspan.train.task import BITS, Loss


class CharLM:
    """The task of a recipe: its text in segments, its model, and bits per character.

    Everything that can be wrong with a recipe or its text is found here, before training.
    """

    goal = BITS
    varies = False

    def __init__(self, recipe: Recipe, corpus: Corpus | None = None) -> None:
        _check(recipe)
        self.recipe = recipe
        self.config = _config(recipe.model)
        self._try_out()
        self.corpus = read(recipe.data) if corpus is None else corpus
        self.recurrent = any(
            CAUSAL_ATTENTION[setting["kind"]].recurrent for setting in self.config.attention
        )
        self._segments = [self._cut(phase) for phase in recipe.phases]

    def _try_out(self) -> None:
        """Find on a model without memory what else would be found only in the course of the run."""
        with torch.device("meta"):
            model = self.build()
        for number, phase in enumerate(self.recipe.phases):
            with _named(f"phases.{number}.windows"):
                self.enter(model, phase)
        with _named("evaluation.attention"):
            with_attention(model, self.recipe.evaluation.attention)
        with _named("optimizer"):
            build_optimizers(model, self.recipe.optimizer)

    def _cut(self, phase: Phase) -> Shuffled | Streams:
        text = self.corpus.train
        if self.recurrent:
            return Streams(text, phase.length, phase.batch)
        return Shuffled(text, phase.length, phase.batch, self.recipe.seed)

    def build(self) -> LongspanForCausalLM:
        return LongspanForCausalLM(copy.deepcopy(self.config))

    def enter(self, model: PreTrainedModel, phase: Phase) -> None:
        if phase.windows is not None:
            cast(LongspanForCausalLM, model).set_windows(phase.windows)

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        segments = self._segments[number]
        taken = torch.from_numpy(segments.take(step, rows).astype(np.int64))
        return {"input_ids": taken[:, :-1], "targets": taken[:, 1:]}, segments.begins_anew(step)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss:
        if state is not None:
            # As a number it would be compiled for, anew in every step.
            state = state._replace(tokens=torch.as_tensor(state.tokens))
        done = model(**batch, state=state, keep_state=self.recurrent)
        nats = done.loss.detach()
        if done.auxiliary_loss is not None:
            nats = nats - done.auxiliary_loss.detach()
        return Loss(done.loss, nats, done.state)

    def evaluate(self, model: PreTrainedModel, split: str, limit: int = 0) -> dict[str, float]:
        text: Bytes = getattr(self.corpus, split)
        nats = evaluate(
            cast(LongspanForCausalLM, model),
            text[: limit + 1] if limit else text,
            self.recipe.evaluation,
        )
        return {"bits_per_character": bits(nats), "loss": float(nats.double().mean())}

    def sample(self, model: PreTrainedModel) -> str:
        """200 bytes that the model writes on from the beginning of the validation text."""
        model.eval()
        prompt = torch.from_numpy(self.corpus.valid[None, :128].astype(np.int64)).to(model.device)
        sampler = Sampler(temperature=0.8, top_p=0.95, seed=self.recipe.seed)
        made = cast(LongspanForCausalLM, model).generate(prompt, 200, sampler)[0]
        return bytes(made.tolist()).decode("utf8", errors="replace")

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def accompany(self, folder: Path) -> None:
        """Nothing: bytes need no tokenizer."""

    def pack(self, state: DecoderState) -> dict[str, Tensor]:
        leaves, _ = pytree.tree_flatten(state)
        return {
            str(place): torch.as_tensor(leaf)
            for place, leaf in enumerate(leaves)
            if leaf is not None
        }

    def unpack(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> DecoderState:
        """A state has the form of any other of its model, so a call says what it is."""
        with torch.no_grad():
            one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            like = model(one, keep_state=True).state
        leaves, form = pytree.tree_flatten(like)
        known: list[Any] = [tensors.get(str(place)) for place in range(len(leaves))]
        # Numbers were written as tensors.
        known = [
            value.item() if isinstance(leaf, int) else value
            for value, leaf in zip(known, leaves, strict=True)
        ]
        return pytree.tree_unflatten(known, form)


def evaluate(model: LongspanForCausalLM, text: Bytes, settings: Evaluation) -> Tensor:
    """[len(text) - 1] nats of each byte but the first, measured as the recipe says."""
    model = with_attention(model, settings.attention).eval()
    if settings.kind == "streamed":
        return streamed_nats(model, text, length=settings.length, batch=settings.batch)
    return sliding_nats(
        model, text, length=settings.length, stride=settings.stride, batch=settings.batch
    )


def by_document(
    model: LongspanForCausalLM, text: Bytes, settings: Evaluation
) -> list[tuple[int, float]]:
    """(bytes, bits per character) of each document by itself, measured as the recipe says."""
    model = with_attention(model, settings.attention)
    # A stream is one: every document is read from its beginning.
    batch = 1 if settings.kind == "streamed" else settings.batch
    settings = replace(settings, attention={}, batch=batch)
    documents = [document for document in split_documents(text) if len(document) > 1]
    return [(len(one), bits(evaluate(model, one, settings))) for one in documents]


def with_attention(model: LongspanForCausalLM, changes: Mapping[str, Any]) -> LongspanForCausalLM:
    """The same weights in a model whose attention layers have some other options, a longer
    memory, say. The weights are shared, not copied, unless they lie in shards."""
    if not changes:
        return model
    config = copy.deepcopy(model.config)
    values = config.to_dict()
    values["attention"] = [{**setting, **changes} for setting in config.attention]
    with torch.device("meta"):
        twin = LongspanForCausalLM(LongspanDecoderConfig(**_known(values)))
    twin.load_state_dict({n: _whole(t) for n, t in model.state_dict().items()}, assign=True)
    return twin


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a configuration's values that are settings of ours."""
    return {name: values[name] for name in _settings() if name in values}


def _settings() -> set[str]:
    return {name for name in LongspanDecoderConfig.__annotations__ if not name.startswith("_")}


def _config(settings: Mapping[str, Any]) -> LongspanDecoderConfig:
    for name in settings:
        if name not in _settings():
            raise ValueError(unknown(f"model.{name}", name, _settings()))
    kinds = LongspanDecoderConfig.__annotations__
    fitting = {name: fit(value, kinds[name], f"model.{name}") for name, value in settings.items()}
    if fitting.get("vocab_size", 256) < 256:
        raise ValueError(f"model.vocab_size={fitting['vocab_size']}: there are 256 bytes")
    with _named("model"):
        return LongspanDecoderConfig(**copy.deepcopy(fitting))


@contextmanager
def _named(setting: str) -> Iterator[None]:
    """Errors say which setting they are about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{setting}: {error}") from None


def _check(recipe: Recipe) -> None:
    """Numbers that no run can do with."""
    for name in ("accumulate", "log_every"):
        if getattr(recipe, name) < 1:
            raise ValueError(f"{name}={getattr(recipe, name)} must be at least 1")
    if not (recipe.minutes >= 0 and math.isfinite(recipe.minutes)):
        raise ValueError(f"minutes={recipe.minutes} must not be negative; 0 = by steps")
    for name in ("seed", "save_every", "sample_every"):
        if getattr(recipe, name) < 0:
            raise ValueError(f"{name}={getattr(recipe, name)} must not be negative")
    if not recipe.phases:
        raise ValueError("phases: there must be at least one")
    for number, phase in enumerate(recipe.phases):
        for name in ("steps", "length", "batch"):
            if getattr(phase, name) < 1:
                raise ValueError(f"phases.{number}.{name}={getattr(phase, name)}: at least 1")
        if not (phase.learning_rate > 0 and math.isfinite(phase.learning_rate)):
            raise ValueError(f"phases.{number}.learning_rate={phase.learning_rate}: above 0")
        if phase.warmup < 0:
            raise ValueError(f"phases.{number}.warmup={phase.warmup} must not be negative")
    _check_evaluation(recipe.evaluation)


def _check_evaluation(settings: Evaluation) -> None:
    for name in ("length", "batch"):
        if getattr(settings, name) < 1:
            raise ValueError(f"evaluation.{name}={getattr(settings, name)}: at least 1")
    for name in ("every", "limit"):
        if getattr(settings, name) < 0:
            raise ValueError(f"evaluation.{name}={getattr(settings, name)} must not be negative")
    if settings.kind == "sliding" and not 1 <= settings.stride <= settings.length:
        raise ValueError(
            f"evaluation.stride={settings.stride}: from 1 to evaluation.length={settings.length}"
        )
