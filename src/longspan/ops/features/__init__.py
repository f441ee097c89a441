"""Attention by positive random features on a GPU, in fused kernels.

What `linear` otherwise computes with the features of all tokens in memory, several times as large
as the tokens and in float32. Products are in the precision of the inputs, sums and exponents in
float32. The random vectors are rounded to the inputs' precision, for queries and keys alike, which
leaves them random vectors.
"""

from longspan.ops.features.autograd import feature_attention, serves
from longspan.ops.features.causal import causal_feature_attention

__all__ = ["causal_feature_attention", "feature_attention", "serves"]
