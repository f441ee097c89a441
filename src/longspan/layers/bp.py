"""BP-Transformer: tokens see spans of a binary tree, small ones nearby and large ones far away."""

from torch import Tensor

from longspan.layers.causal import Attended, CausalAttention
from longspan.layers.document import Chosen, DocumentAttention
from longspan.ops.tree import Tree, causal_tree_attention, tree_attention


class BPAttention(DocumentAttention):
    """Every token sees its whole document, in spans that get longer with the distance; see
    `longspan.ops.tree`. So global tokens change nothing. The paper's model carries a state for each
    span from layer to layer; here a layer is given tokens and makes the spans of them anew.

    Args:
        near: spans of each length on each side, about.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        near: int = 16,
        dropout: float = 0.0,
        rotary: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, rotary=rotary, bias=bias)
        self.near = _check_near(near)

    def attend(
        self,
        hidden: Tensor,
        *,
        valid: Tensor | None,
        chosen: Chosen | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        out = tree_attention(
            *self.project(hidden, position_ids),
            near=self.near,
            valid=valid,
            dropout_p=self.dropout_p,
        )
        return out.flatten(2)


class CausalBP(CausalAttention):
    """Every token sees itself and all before it, in spans that end before it. The state grows with
    the logarithm of the text's length.

    Args:
        near: spans of each length, about.
        base: of the rotary angles.
        norm_keys: scale queries and keys to one length before they meet.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        near: int = 16,
        base: float = 10000.0,
        norm_keys: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, heads, dropout=dropout, bias=bias, base=base, norm_keys=norm_keys)
        self.near = _check_near(near)

    def forward(
        self, hidden: Tensor, first: int = 0, state: Tree | None = None, keep_state: bool = False
    ) -> Attended:
        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        out, tree = causal_tree_attention(
            query, key, value, near=self.near, before=state, dropout_p=self.dropout_p
        )
        return Attended(out.flatten(2), tree if keep_state else None)


def _check_near(near: int) -> int:
    if isinstance(near, bool) or not isinstance(near, int) or near < 1:
        raise ValueError(f"near={near!r} must be a whole number of spans, at least 1")
    return near
