"""Functions as torch operators, without what `torch.library.custom_op` does on every call.

That looks at all arguments and results for shared memory: 10 us of the 75 that a call of window
attention costs the host inside a compiled model, 10 of 120 backward. `opcheck` looks for the same
once, in the tests.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

_LIBRARY = torch.library.Library("longspan", "FRAGMENT")


def operator(name: str, *, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """`longspan::name`: the decorated function for real tensors, `fake` for shapes alone.

    Neither its arguments nor its results may share memory with a result.
    """

    def define(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"longspan::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.longspan, name).default

    return define


def differentiable(
    op: Any, backward: Callable[..., Any], *, save: Callable[[Any, Any, Any], None]
) -> None:
    """Give an operator its gradient: `save(ctx, inputs, output)`, then `backward(ctx, *grads)`."""
    torch.library.register_autograd(op, backward, setup_context=save, lib=_LIBRARY)


def refuse_forward_mode(name: str, *tensors: torch.Tensor) -> None:
    """Operators pass no tangents on, and torch would take them for zero without a word."""
    if torch.compiler.is_compiling():
        return
    if any(unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(f"{name}: gradients go backward, there are none in forward mode (jvp)")
