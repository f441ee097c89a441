"""Attention among tokens that belong together by content.

Each head sorts its tokens by the cluster they are in, those of one cluster by position, padding
last, cuts the result into chunks, and attends within these:

- encoders: every token of a chunk sees the chunk and the `before` chunks in front of it;
- causally: every token sees the last `size` tokens of its own cluster before it. Chunks would
  depend on what follows: a later token moves the ones sorted behind it into other chunks.

With several rounds, each with clusters of its own, a token sees what it sees in any of them, each
key once, however many have it in common: rounds are merged by their log-sum-exp. Clusters may also
choose their members, any number or none of them sharing a token (`routed_attention`).

Memory is linear in the number of tokens. `fused` serves on a GPU, `plain` everywhere.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from longspan.ops.clustered import fused, plain

_FEW = 8  # queries that are held against all keys instead of sorting these


def clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Tensor,
    *,
    size: int,
    before: int = 0,
    causal: bool = False,
    self_last: bool = False,
    valid: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """[batch, queries, heads, head_dim]; rows of padding are zero. Gradients can be taken once.

    Args:
        query: [batch, queries, heads, head_dim]; causally they may be fewer than the keys, and are
            then those of the last tokens.
        key, value: [batch, tokens, heads, head_dim].
        clusters: [batch, tokens, heads or 1, rounds], numbers from 0.
        size: tokens in a chunk; causally, how many others a token sees at most.
        before: how many chunks in front are seen, for encoders.
        causal: see above.
        self_last: a token sees itself only if it would see nothing else, for queries that are
            their own keys and would see little but themselves.
        valid: bool [batch, tokens], False = padding, for encoders.
        dropout_p: on the attention weights.
    """
    batch, tokens, heads, head_dim = key.shape
    queries = query.shape[1]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    if causal and (before or valid is not None):
        raise ValueError("causal=True goes neither with before nor with valid; leave them out")
    if not causal and queries != tokens:
        raise ValueError(f"{queries} queries for {tokens} keys: only causally they may differ")
    if clusters.shape[:2] != (batch, tokens) or clusters.shape[2] not in (1, heads):
        raise ValueError(
            f"clusters must be [{batch}, {tokens}, {heads} or 1, rounds], not {[*clusters.shape]}"
        )
    if causal and queries < tokens and queries <= _FEW:
        return _write_on(query, key, value, clusters, size, self_last, dropout_p, scale)
    if queries < tokens:
        query = pad(query, (0, 0, 0, 0, tokens - queries, 0))
    module = fused if fused.serves(query, key, value, clusters.shape[3]) else plain
    out = module.clustered(
        *(query, key, value, clusters),
        size=min(size, tokens),
        before=before,
        causal=causal,
        self_last=self_last,
        valid=valid,
        dropout_p=dropout_p,
        scale=scale,
    )
    return out[:, tokens - queries :]


def routed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    *,
    self_last: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """[batch, tokens, heads, head_dim]: attention among the members of each cluster. A token of
    several clusters gets the mean of what it makes of each, one of none zeros.

    Args:
        query, key, value: [batch, tokens, heads, head_dim].
        places: [batch, clusters, heads, size], the members of each cluster, -1 = none.
        self_last, dropout_p: as in `clustered_attention`.
    """
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    module = fused if fused.serves(query, key, value) else plain
    how = {"self_last": self_last, "dropout_p": dropout_p, "scale": scale}
    return module.routed(query, key, value, places, **how)


def _write_on(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Tensor,
    size: int,
    self_last: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Causally, for a few queries: each against all keys."""
    tokens, queries = key.shape[1], query.shape[1]
    place = torch.arange(tokens, device=key.device)
    own = place[tokens - queries :, None]
    # [batch, heads, rounds, queries, keys]
    cluster = clusters.movedim(1, -1)
    same = cluster[..., tokens - queries :, None] == cluster[..., None, :]
    same = same & (place < own)
    nearer = same.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)  # members from a key to the query
    seen = (same & (nearer <= size)).any(2)
    itself = place == own
    seen = seen | (itself & ~seen.any(-1, keepdim=True)) if self_last else seen | itself
    out = scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        attn_mask=seen,
        dropout_p=dropout_p,
        scale=scale,
    )
    return out.transpose(1, 2)
