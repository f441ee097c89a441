"""Tensors that follow from a few numbers alone, made once and remembered.

To make a list of keys takes the host longer, for a short text, than the GPU needs to attend to it;
and the layers of a model, step after step, ask for the same ones.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock

import torch
from torch import Tensor

Made = tuple[Tensor, ...]
_Key = tuple[int, torch.device, tuple[Hashable, ...]]  # stream, device, numbers

# What is remembered of one function, beside the last: results, and their bytes.
_MOST = 128
_MOST_BYTES = 2**28


def made_once(make: Callable[..., Made]) -> Callable[..., Made]:
    """`make(device, *numbers)`, to be called with a tensor in place of its device. Results must not
    be changed. Nothing is remembered of tensors without numbers, or found again for them."""
    known: OrderedDict[_Key, Made] = OrderedDict()
    captured: dict[Hashable, Made] = {}  # a CUDA graph goes on to read them, so for ever
    lock = Lock()  # one thread must not forget what another is looking at

    @wraps(make)
    def found(like: Tensor, *numbers: Hashable) -> Made:
        if torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter):
            return make(like.device, *numbers)
        stream = 0
        if like.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                with lock:
                    made = _for_a_graph(known, captured, like.device, numbers)
                return made or make(like.device, *numbers)
            # What one stream makes is not there yet for another.
            stream = torch.cuda.current_stream(like.device).cuda_stream
        key = stream, like.device, numbers
        with lock:
            made = known.get(key)
            if made is not None:
                known.move_to_end(key)
                return made
        with torch.inference_mode(False):  # for a backward pass too
            made = make(like.device, *numbers)
        if any(type(tensor) is not Tensor for tensor in made):
            return made  # in a mode that makes tensors without numbers, whatever it is given
        with lock:
            known[key] = made
            while len(known) > 1 and (len(known) > _MOST or _bytes(known) > _MOST_BYTES):
                known.popitem(last=False)
        return made

    return found


def _for_a_graph(
    known: OrderedDict[_Key, Made],
    captured: dict[Hashable, Made],
    *asked: Hashable,
) -> Made | None:
    """Made before the capture, on any stream: it waits for all of them."""
    for (_, *about), made in known.items():
        if tuple(about) == asked:
            captured[asked] = made
    return captured.get(asked)


def _bytes(known: OrderedDict[_Key, Made]) -> int:
    return sum(t.numel() * t.element_size() for made in known.values() for t in made)
