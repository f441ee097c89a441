"""Rows of global tokens from projections of their own, as Longformer has them.

Longformer projects every token a second time so that a handful of global tokens can look at all of
them. For g global tokens those two n x D x D products are mostly waste: the scores are
`(q W_k) x^T` and the values `(p x) W_v`, so both weights can be applied to the g rows instead of
to the n tokens (*late projection*). That is cheaper as long as g * heads < D, and the key's bias
drops out altogether: it shifts all scores of a row alike.
"""

from longspan.ops.rows.api import BACKENDS, global_attention, global_rows
from longspan.ops.rows.plain import global_weights
from longspan.ops.rows.positions import global_positions, take_rows

__all__ = [
    "BACKENDS",
    "global_attention",
    "global_positions",
    "global_rows",
    "global_weights",
    "take_rows",
]
