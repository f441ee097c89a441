"""Reversible blocks: a stack whose activations are computed back from its output, not kept.

Two streams go through it, which begin as the same and end as their mean:

    y1 = x1 + attention(x2),   y2 = x2 + feed-forward(y1)

so x2 = y2 - feed-forward(y1) and x1 = y1 - attention(x2). The backward pass walks back from the
last block to the first, computing each once more, with the random numbers it had, and its
gradients. Memory does not grow with the number of blocks, and time is that of gradient
checkpointing. What comes back is what was there, up to rounding.

What a layer notes of its input leaves the stack, too: it has a cost of its own (`auxiliary_loss`),
whose gradient goes back through the layers below.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from longspan.layers.block import Block
from longspan.layers.observing import Observing


def run_reversible(blocks: Sequence[Block], hidden: Tensor, *about: Any) -> Tensor:
    """[batch, tokens, dim] through blocks with norms in front, which are told `about` the batch."""
    # Of all blocks together, as some may use what others own.
    own = {id(weight): weight for block in blocks for weight in block.parameters()}
    weights = [weight for weight in own.values() if weight.requires_grad]
    made: Any = _Stack.apply(blocks, about, hidden, hidden, *weights)
    first, second, *noted = made
    observing = [block.attention for block in blocks if _noted(block)]
    for layer, states in zip(observing, noted, strict=True):
        cast(Observing, layer).note_again(states)
    return (first + second) / 2


def _noted(block: Block) -> tuple[Tensor, ...]:
    """What its attention noted of its input in the last call, if it does that."""
    return block.attention.noted() if isinstance(block.attention, Observing) else ()


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        blocks: Sequence[Block],
        about: tuple[Any, ...],
        first: Tensor,
        second: Tensor,
        *weights: nn.Parameter,
    ) -> tuple[Tensor, ...]:
        ctx.blocks, ctx.about, ctx.weights, ctx.again = blocks, about, weights, []
        noted: list[Tensor] = []
        for block in blocks:
            mixing = _Again(first)
            first = first + block.mix(second, *about)
            noted += _noted(block)
            feeding = _Again(first)
            second = second + block.feed(first)
            ctx.again.append((mixing, feeding))
        ctx.save_for_backward(first, second)
        return first, second, *noted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, second = ctx.saved_tensors
        to_first, to_second, *to_noted = gradients
        learned: list[Tensor | None] = [None] * len(ctx.weights)

        def back(block: Block, mixes: bool, given: Tensor, gradient: Tensor) -> Any:
            """What a half makes of what it is given, and its gradient for that."""
            with torch.enable_grad():
                given = given.detach().requires_grad_()
                out = block.mix(given, *ctx.about) if mixes else block.feed(given)
                noted = _noted(block) if mixes else ()
                wanted = [gradient, *(to_noted.pop() for _ in noted)]
                inputs = [given, *ctx.weights]
                found = torch.autograd.grad((out, *noted), inputs, wanted, allow_unused=True)
            for place, more in enumerate(found[1:]):
                known = learned[place]
                learned[place] = known if more is None else more if known is None else known + more
            return out.detach(), found[0]

        for block, (mixing, feeding) in zip(ctx.blocks[::-1], ctx.again[::-1], strict=True):
            with feeding():
                fed, more = back(block, False, first, to_second)
            second, to_first = second - fed, to_first + more
            with mixing():
                mixed, more = back(block, True, second, to_first)
            first, to_second = first - mixed, to_second + more
        return None, None, to_first, to_second, *learned


class _Again:
    """The random numbers and the precision of now, for later."""

    def __init__(self, like: Tensor) -> None:
        kind = like.device.type
        self.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        self.host = torch.get_rng_state()
        self.devices, self.states = get_device_states(like)

    @contextmanager
    def __call__(self) -> Any:
        with torch.random.fork_rng(devices=self.devices), torch.autocast(**self.autocast):
            torch.set_rng_state(self.host)
            set_device_states(self.devices, self.states)
            yield
