"""A stock transformers Longformer or LED made fast in place.

Only the class of its attention modules is exchanged, for a subclass with another `forward`: the
weights, names, configuration and everything around the attention stay what they were.
"""

from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from longspan.ops.rows import global_attention, global_positions, take_rows
from longspan.ops.window import Visibility, visibility, window_attention

# Longformer's attention, and the encoder's of LED: the same module under two names.
_PATCHED = {
    "transformers.models.longformer.modeling_longformer": "LongformerSelfAttention",
    "transformers.models.led.modeling_led": "LEDEncoderSelfAttention",
}

Model = TypeVar("Model", bound=nn.Module)


def patch(model: Model) -> Model:
    """Make a transformers `Longformer*` or `LED*` model fast; returns the same object.

    Outputs and gradients stay the same. Where attention weights are asked for
    (`output_attentions=True`), transformers' own code computes them. `unpatch` undoes it.
    """
    for module in _attention_modules(model):
        if not isinstance(module, _Fast):
            module.__class__ = _fast_class(type(module))
    return model


def unpatch(model: Model) -> Model:
    """Give a patched model transformers' own attention back; returns the same object."""
    for module in _attention_modules(model):
        if isinstance(module, _Fast):
            module.__class__ = type(module).__bases__[1]
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether every attention module of the model is ours."""
    return all(isinstance(module, _Fast) for module in _attention_modules(model))


def _attention_modules(model: nn.Module) -> list[Any]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch takes a transformers model, got {type(model).__name__}")
    found = [m for m in model.modules() if _PATCHED.get(type(m).__module__) == type(m).__name__]
    if not found:
        raise TypeError(
            f"{type(model).__name__} has no Longformer attention; patch serves transformers' "
            "Longformer* and LED* models (for others, see longspan.convert)"
        )
    return found


@cache
def _fast_class(base: type) -> type:
    # Under the old name: to transformers, and in print, it is the module it was.
    return type(base.__name__, (_Fast, base), {"__module__": base.__module__})


def _rebuild(base: type) -> Any:
    fast: Any = _fast_class(base)
    return fast.__new__(fast)


class _Fast:
    """The forward pass of a patched module, in front of transformers' class."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time, so pickle could not find it by its name.
        return _rebuild, (type(self).__bases__[1],), self.__dict__

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_index_masked: Tensor | None = None,
        is_index_global_attn: Tensor | None = None,
        is_global_attn: bool | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, ...]:
        """transformers' arguments: padding and global tokens as bool [batch, tokens]."""
        if output_attentions:
            return super().forward(  # pyright: ignore[reportAttributeAccessIssue]
                hidden_states,
                attention_mask=attention_mask,
                is_index_masked=is_index_masked,
                is_index_global_attn=is_index_global_attn,
                is_global_attn=is_global_attn,
                output_attentions=True,
            )
        chosen = is_index_global_attn if is_global_attn else None
        seen, positions = _described(hidden_states, is_index_masked, chosen)
        dropout_p = self.dropout if self.training else 0.0

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (self.num_heads, self.head_dim))

        rows = False
        if positions is not None:
            made = global_attention(
                heads(self.query_global(take_rows(hidden_states, positions))),
                hidden_states,
                self.key_global.weight,
                self.value_global.weight,
                self.value_global.bias,
                positions=positions,
                seen=seen,
                dropout_p=dropout_p,
            )
            # A key's bias shifts all scores of a row alike and so drops out. It still gets its
            # gradient of zero, as before: distributed training objects to unused parameters.
            rows = (made + 0.0 * self.key_global.bias.sum(), positions)
        out = window_attention(
            heads(self.query(hidden_states)),
            heads(self.key(hidden_states)),
            heads(self.value(hidden_states)),
            window=2 * self.one_sided_attn_window_size,
            visibility=seen,
            dropout_p=dropout_p,
            global_rows=rows,
        )
        return (out.flatten(2),)


# The layers of one forward pass are handed the same mask; what it means is worked out once.
_seen: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _described(
    hidden: Tensor, masked: Tensor | None, chosen: Tensor | None
) -> tuple[Visibility, Tensor | None]:
    # What inference mode makes has no version, by which a change would be noticed.
    unknown = any(one is not None and one.is_inference() for one in (masked, chosen))
    if masked is None or unknown or torch.compiler.is_compiling():
        return _describe(hidden, masked, chosen)
    versions = masked._version, None if chosen is None else chosen._version
    known = _seen.get(masked)
    if known is None or known[0] is not chosen or known[1] != versions:
        known = (chosen, versions, _describe(hidden, masked, chosen))
        _seen[masked] = known
    return known[2]


def _describe(
    hidden: Tensor, masked: Tensor | None, chosen: Tensor | None
) -> tuple[Visibility, Tensor | None]:
    valid = None if masked is None else ~masked
    seen = visibility(hidden, attention_mask=valid, global_mask=chosen)
    return seen, None if chosen is None else global_positions(chosen)
