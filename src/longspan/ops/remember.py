"""Tensors that follow from a few numbers alone, made once and remembered.

To make a list of keys takes the host longer, for a short text, than the GPU needs to attend to it;
and the layers of a model, step after step, ask for the same ones.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_MOST = 2**28  # bytes that one function's results may take, beside the last of them


def remembered(make: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`make(device, *numbers)`, to be called with a tensor in place of its device.

    Nothing is remembered, nor found again, while a CUDA graph is captured, which would go on to
    use memory that is forgotten some day, nor for tensors without numbers.
    """
    known: OrderedDict[Hashable, tuple[Tensor, ...]] = OrderedDict()

    @wraps(make)
    def found(like: Tensor, *numbers: Hashable) -> tuple[Tensor, ...]:
        stream = None
        if torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter):
            return make(like.device, *numbers)
        if like.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return make(like.device, *numbers)
            # What one stream makes is not there yet for another.
            stream = torch.cuda.current_stream(like.device).cuda_stream
        key = like.device, stream, numbers
        if key in known:
            known.move_to_end(key)
            return known[key]
        with torch.inference_mode(False):  # for a backward pass too
            made = make(like.device, *numbers)
        known[key] = made
        while len(known) > 1 and sum(map(_bytes, known.values())) > _MOST:
            known.popitem(last=False)
        return made

    return found


def _bytes(tensors: tuple[Any, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
