"""Time and memory of one pass over the document's tokens, ours against transformers'."""

import copy
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import BertModel, PreTrainedModel

from longspan.bench.child import growth
from longspan.hub.convert import convert, load, to_transformers
from longspan.layers.position import tile_positions

_BATCH = 8  # pieces that a short model reads at a time
# The best of several passes counts, for other programs have the machine too; no new one is begun
# after so many, or after so many seconds in all.
_TIMES, _SECONDS = 4, 12.0


class Cost(NamedTuple):
    """What one pass took."""

    name: str
    tokens: int
    seconds: float
    mib: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def measure(
    name: str, source: str | Path, tokens: Sequence[int], window: int, threads: int
) -> Cost:
    """The cost of one pass of a contender, in a process of its own, as only that has a peak."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if context.get_start_method() == "forkserver":
        # Forked from a server that has only imported things, a child is fresh and starts at once.
        modules = ("transformers.models.longformer.modeling_longformer", __name__)
        context.set_forkserver_preload(list(modules))
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_measure, name, source, list(tokens), window, threads).result()


def _measure(name: str, source: str | Path, tokens: list[int], window: int, threads: int) -> Cost:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    run = CONTENDERS[name](load(source).eval(), len(tokens), window)
    with torch.no_grad():
        run(torch.tensor([tokens[:64]]))  # starts threads, pages code in
        ids = torch.tensor([tokens])
        mib = 0.0
        times: list[float] = []
        while len(times) < _TIMES and sum(times) < _SECONDS:
            begin = time.perf_counter()
            if times:
                run(ids)
            else:
                mib = growth(lambda: run(ids))
            times.append(time.perf_counter() - begin)
        return Cost(name, len(tokens), min(times), mib)


Run = Callable[[Tensor], object]


def _longspan(source: PreTrainedModel, length: int, window: int) -> Run:
    return _lengthen(source, length, window)


def _longformer(source: PreTrainedModel, length: int, window: int) -> Run:
    return to_transformers(_lengthen(source, length, window))


def _lengthen(source: PreTrainedModel, length: int, window: int) -> Any:
    return convert(source, max_length=max(length, trained(source)), window=window)


def _dense(source: PreTrainedModel, length: int, window: int) -> Run:
    config = copy.deepcopy(source.config)
    config.max_position_embeddings = length
    model = BertModel(config, add_pooling_layer=False).eval()
    weights = dict(source.state_dict())
    name = "embeddings.position_embeddings.weight"
    weights[name] = tile_positions(weights[name], 0, max(length, trained(source)))[:length]
    model.load_state_dict(weights, strict=False)
    return model


def _pieces(source: PreTrainedModel, length: int, window: int) -> Run:
    def run(ids: Tensor) -> None:
        room = min(trained(source), ids.shape[1])
        whole = ids[0, : ids.shape[1] // room * room].view(-1, room)
        for batch in whole.split(_BATCH):
            source(batch)

    return run


def trained(source: PreTrainedModel) -> int:
    """Positions that a BERT was trained with."""
    return source.config.max_position_embeddings


# The first is ours.
CONTENDERS: dict[str, Callable[[PreTrainedModel, int, int], Run]] = {
    "longspan": _longspan,
    "transformers Longformer": _longformer,
    "dense BERT": _dense,
    "BERT in pieces": _pieces,
}
