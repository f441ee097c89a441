"""Reversible blocks: a stack whose activations are computed back from its output, not kept.

Two streams go through it, which begin as the same and end as their mean:

    y1 = x1 + attention(x2),   y2 = x2 + feed-forward(y1)

so x2 = y2 - feed-forward(y1) and x1 = y1 - attention(x2). The backward pass walks back from the
last block to the first, computing each once more, with the random numbers it had, and its
gradients. Memory does not grow with the number of blocks, and time is that of gradient
checkpointing. What comes back is what was there, up to rounding.

What a layer's own parts learn from leaves the stack, too: what an encoder's layer notes of its
input and has a cost (`auxiliary_loss`), or the loss that a decoder's layer returns. Its gradient
goes back through the layers below.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from longspan.layers.block import Block
from longspan.layers.decoder_block import DecoderBlock
from longspan.layers.observing import Observing
from longspan.ops.again import Again


class Halves(NamedTuple):
    """A block with norms in front, as two functions of [batch, tokens, dim]."""

    mix: Callable[[Tensor], tuple[Tensor, ...]]  # what attention adds, and what else is to leave
    feed: Callable[[Tensor], Tensor]  # what the feed-forward part adds


def encode(blocks: Sequence[Block], hidden: Tensor, *about: Any) -> Tensor:
    """[batch, tokens, dim] through an encoder's blocks, which are told `about` the batch."""

    def halves(block: Block) -> Halves:
        return Halves(lambda given: (block.mix(given, *about), *_noted(block)), block.feed)

    hidden, noted = _through(blocks, [halves(block) for block in blocks], hidden)
    for block, states in zip(blocks, noted, strict=True):
        if states:
            cast(Observing, block.attention).note_again(*states)
    return hidden


def decode(
    blocks: Sequence[DecoderBlock],
    hidden: Tensor,
    first: int | Tensor,
    states: Sequence[Any],
    keep_state: bool,
) -> tuple[Tensor, list[Any], list[Tensor]]:
    """The same through a decoder's: what comes out, each layer's next state, and losses."""
    kept: list[Any] = [None] * len(blocks)

    def halves(layer: int) -> Halves:
        block = blocks[layer]

        def mix(given: Tensor) -> tuple[Tensor, ...]:
            done = block.mix(given, first, states[layer], keep_state)
            if kept[layer] is None:  # on the way forward
                kept[layer] = done.state
            return (done.out,) if done.loss is None else (done.out, done.loss)

        return Halves(mix, block.feed)

    hidden, losses = _through(blocks, [halves(layer) for layer in range(len(blocks))], hidden)
    return hidden, kept, [loss for own in losses for loss in own]


def _through(
    blocks: Sequence[nn.Module], halves: Sequence[Halves], hidden: Tensor
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """What comes out, and what else leaves each block."""
    if not torch.is_grad_enabled():
        first, second, beside, _ = _forward(halves, hidden, hidden, again=False)
        return (first + second) / 2, beside
    # Of all blocks together, as some may use what others own.
    own = {id(weight): weight for block in blocks for weight in block.parameters()}
    weights = [weight for weight in own.values() if weight.requires_grad]
    counts: list[int] = []
    made: Any = _Stack.apply(halves, counts, hidden, hidden, *weights)
    first, second, *rest = made
    ends = [sum(counts[: layer + 1]) for layer in range(len(counts))]
    return (first + second) / 2, [
        tuple(rest[end - count : end]) for count, end in zip(counts, ends, strict=True)
    ]


def _noted(block: Block) -> tuple[Tensor, ...]:
    """What its attention noted of its input in the last call, if it does that."""
    return block.attention.noted() if isinstance(block.attention, Observing) else ()


def _forward(
    halves: Sequence[Halves], first: Tensor, second: Tensor, *, again: bool
) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]], list[tuple[Again | None, Again | None]]]:
    beside, moments = [], []
    for mix, feed in halves:
        mixing = Again(first) if again else None
        mixed, *own = mix(second)
        first = first + mixed
        feeding = Again(first) if again else None
        second = second + feed(first)
        beside.append(tuple(own))
        moments.append((mixing, feeding))
    return first, second, beside, moments


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        halves: Sequence[Halves],
        counts: list[int],
        first: Tensor,
        second: Tensor,
        *weights: nn.Parameter,
    ) -> tuple[Tensor, ...]:
        ctx.halves, ctx.weights = halves, weights
        first, second, beside, ctx.again = _forward(halves, first, second, again=True)
        counts += [len(own) for own in beside]
        ctx.save_for_backward(first, second)
        return first, second, *(tensor for own in beside for tensor in own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, second = ctx.saved_tensors
        to_first, to_second, *to_beside = gradients
        learned: list[Tensor | None] = [None] * len(ctx.weights)

        def back(
            half: Callable[[Tensor], tuple[Tensor, ...]], given: Tensor, gradient: Tensor
        ) -> tuple[Tensor, Tensor]:
            """What a half makes of what it is given, and its gradient for that."""
            with torch.enable_grad():
                given = given.detach().requires_grad_()
                out, *beside = half(given)
                own = [to_beside.pop() for _ in beside][::-1]
                pairs = [(out, gradient), *zip(beside, own, strict=True)]
                made, wanted = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
                inputs = [given, *ctx.weights]
                found = torch.autograd.grad(made, inputs, wanted, allow_unused=True)
            for place, more in enumerate(found[1:]):
                known = learned[place]
                learned[place] = known if more is None else more if known is None else known + more
            return out.detach(), found[0]

        for (mix, feed), (mixing, feeding) in zip(ctx.halves[::-1], ctx.again[::-1], strict=True):
            with feeding():
                fed, more = back(lambda given, feed=feed: (feed(given),), first, to_second)
            second, to_first = second - fed, to_first + more
            with mixing():
                mixed, more = back(mix, second, to_first)
            first, to_second = first - mixed, to_second + more
        return None, None, to_first, to_second, *learned
