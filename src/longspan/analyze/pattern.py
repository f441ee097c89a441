"""Which tokens a token sees: in one layer, and through all layers up to one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.models import LongspanConfig
from longspan.ops.window.pattern import check_dilation, check_window


class Reach(NamedTuple):
    """How far a token's state is informed of its neighbours, in tokens to either side."""

    left: int
    right: int

    @property
    def tokens(self) -> int:
        """Itself included."""
        return self.left + 1 + self.right


def receptive_field(config: LongspanConfig) -> list[Reach]:
    """Reach after each layer, by windows alone, in a document that goes on long enough.

    With dilation there can be tokens in between that are not seen. A global token shortens every
    way: two layers lead from any token to any other.
    """
    left = right = 0
    reaches = []
    for setting in config.attention:
        window = check_window(setting["window"])
        step = max(check_dilation(setting.get("dilation", 1), config.num_attention_heads))
        left, right = left + window[0] * step, right + window[1] * step
        reaches.append(Reach(left, right))
    return reaches


def seen_by_layer(
    config: LongspanConfig, tokens: int, global_tokens: Sequence[int] = ()
) -> list[Tensor]:
    """Bool [tokens, tokens] for each layer, all heads taken together: does i look at j?

    This is n x n, for pictures and for checks; models never form it.
    """
    place = torch.arange(tokens)
    offset = place[None, :] - place[:, None]  # key minus query
    is_global = torch.zeros(tokens, dtype=torch.bool)
    is_global[list(global_tokens)] = True
    layers = []
    for setting in config.attention:
        left, right = check_window(setting["window"])
        seen = torch.zeros(tokens, tokens, dtype=torch.bool)
        for step in set(check_dilation(setting.get("dilation", 1), config.num_attention_heads)):
            seen |= (offset % step == 0) & (offset >= -left * step) & (offset <= right * step)
        seen |= is_global[None, :] | is_global[:, None]
        layers.append(seen & (offset <= 0) if right == 0 else seen)
    return layers


def informed_by_layer(
    config: LongspanConfig, tokens: int, global_tokens: Sequence[int] = ()
) -> list[Tensor]:
    """Bool [tokens, tokens] after each layer: does the state of i depend on the word at j?"""
    informed = torch.eye(tokens, dtype=torch.bool)
    through = []
    for seen in seen_by_layer(config, tokens, global_tokens):
        # A token also keeps what it had, by the residual; it sees itself, so that is included.
        informed = (seen.float() @ informed.float()) > 0
        through.append(informed)
    return through
