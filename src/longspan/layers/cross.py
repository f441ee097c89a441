"""One layer of a decoder that reads a source: attention to the target so far, to the source, then
feed-forward, each added to its input."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class CrossBlock(nn.Module):
    """[batch, tokens, dim] and a source [documents, source, dim] -> [batch, tokens, dim].

    Both attentions are dense: targets are short, and every token of one may look at any of the
    source. A document may have several targets, one behind the other in the batch.

    Args:
        dim, heads, hidden_dim: of the tokens, and inside the feed-forward part.
        layer: its number, under which a cache keeps its keys and values.
        activation: of the feed-forward part.
        dropout, attention_dropout, inner_dropout: on what is added to the residual, on attention
            weights, and behind the activation.
        norm_first: norms stand before the three parts (mBART), not behind the residuals (BART).
        bias: of projections and norms.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden_dim: int,
        *,
        layer: int,
        activation: Callable[[Tensor], Tensor],
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        inner_dropout: float = 0.0,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        self.heads = heads
        self.layer = layer
        self.norm_first = norm_first
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.project = nn.Linear(dim, dim, bias=bias)
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps, bias=bias)
        self.cross_query = nn.Linear(dim, dim, bias=bias)
        self.cross_key_value = nn.Linear(dim, 2 * dim, bias=bias)
        self.cross_project = nn.Linear(dim, dim, bias=bias)
        self.cross_norm = nn.LayerNorm(dim, eps=norm_eps, bias=bias)
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.activation = activation
        self.down = nn.Linear(hidden_dim, dim, bias=bias)
        self.feed_forward_norm = nn.LayerNorm(dim, eps=norm_eps, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.inner_dropout = nn.Dropout(inner_dropout)

    def forward(
        self,
        hidden: Tensor,
        source: Tensor,
        target_mask: Tensor | None = None,
        source_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """
        Args:
            target_mask: bool [batch or 1, 1, tokens, cached + tokens], who sees whom; None for a
                target without padding of which nothing is cached, or a single token that sees all.
            source_mask: bool [documents, 1, 1, source], which tokens of the source may be seen.
            cache: transformers' `EncoderDecoderCache`, which is added to.
        """
        hidden = self._add(
            hidden, self.attention_norm, lambda one: self._target(one, target_mask, cache)
        )
        hidden = self._add(
            hidden, self.cross_norm, lambda one: self._source(one, source, source_mask, cache)
        )
        return self._add(hidden, self.feed_forward_norm, self._feed)

    def _add(self, hidden: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return hidden + self.dropout(part(norm(hidden)))
        return norm(hidden + self.dropout(part(hidden)))

    def _target(self, hidden: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        query, key, value = self._apart(self.qkv(hidden), 3)
        if cache is not None:
            key, value = cache.self_attention_cache.update(key, value, self.layer)
        # A single token behind a cache has all of it before it.
        causal = mask is None and bool(query.shape[2] == key.shape[2])
        return self.project(self._attend(query, key, value, mask, causal))

    def _source(self, hidden: Tensor, source: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        if cache is not None and cache.is_updated.get(self.layer):
            known = cache.cross_attention_cache.layers[self.layer]
            key, value = known.keys, known.values
        else:
            key, value = self._apart(self.cross_key_value(source), 2)
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, self.layer)
                cache.is_updated[self.layer] = True
        # Tokens of all targets of a document ask it as those of one would.
        asking = hidden.reshape(key.shape[0], -1, hidden.shape[-1])
        (query,) = self._apart(self.cross_query(asking), 1)
        return self.cross_project(self._attend(query, key, value, mask)).view_as(hidden)

    def _apart(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Each [batch, heads, tokens, head_dim], as PyTorch's attention and the cache have it."""
        split = projected.unflatten(-1, (parts, self.heads, -1))
        return tuple(part.transpose(1, 2) for part in split.unbind(2))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        dropout_p = self.attention_dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=causal
        )
        return mixed.transpose(1, 2).flatten(2)

    def _feed(self, hidden: Tensor) -> Tensor:
        return self.down(self.inner_dropout(self.activation(self.up(hidden))))
