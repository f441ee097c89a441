"""The paper's `chunks`: overlapping pieces of two half windows, multiplied whole.

Twice the multiplications and many times the memory of what is needed. It is here for its rounding:
it takes the steps of transformers' Longformer in their order, sizes and layout in memory, so that a
float32 model comes out as it does there, where all faster ways differ in the last digits.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from longspan.ops.window import dropout
from longspan.ops.window.pattern import Pattern, Visibility
from longspan.ops.window.reference import put_rows


def refusal(pattern: Pattern, key_heads: int) -> str | None:
    """Why such a call cannot be served, None if it can."""
    heads = len(pattern.dilation)
    if max(pattern.dilation) > 1:
        return "pieces of neighbouring tokens have no dilation"
    return None if key_heads == heads else f"it does not group {heads} heads over {key_heads} keys'"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visibility,
    pattern: Pattern,
    seed: Tensor | None,
    slots: int | None = None,
) -> Tensor:
    """[batch, tokens, heads, head_dim], differentiable. Up to `slots` tokens of a row are global,
    None: as many as `seen` says, which is read back."""
    tokens = query.shape[1]
    side = max(pattern.left, pattern.right, 1)
    # To whole windows, as transformers pads its input. Nobody sees what is added.
    extra = (0, 0, 0, 0, 0, -tokens % (2 * side))
    query, key, value = (pad(_valid(t, seen), extra) for t in (query, key, value))
    scaled = query / (1.0 / pattern.scale)
    places, filled = _global_keys(query, seen, slots)
    columns = torch.einsum("blhd,bshd->blhs", scaled, _take(key, places))
    scores = torch.cat((columns, _band(scaled, key, side)), dim=-1)

    here = torch.arange(query.shape[1], device=query.device).expand(query.shape[:2])
    offset = torch.arange(-side, side + 1, device=query.device)
    at = here[..., None] + offset
    near = (offset >= -pattern.left) & (offset <= pattern.right) & (at >= 0) & (at < tokens)
    at = at.clamp(0, tokens - 1)
    chosen = seen.is_global()
    if chosen is not None:
        near = near & ~_look_up(chosen, at)  # they have columns of their own
    at = torch.cat((places[:, None].expand(-1, here.shape[1], -1), at), dim=-1)
    visible = torch.cat((filled[:, None].expand(-1, here.shape[1], -1), near), dim=-1)
    visible = visible & (here < tokens)[..., None]
    visible = visible & _together(here.clamp(max=tokens - 1), at, seen, pattern.causal)
    weights = _weights(scores, visible, here, at, pattern.dropout_p, seed)

    global_weights, weights = weights.split((places.shape[1], 2 * side + 1), dim=-1)
    far = global_weights.transpose(1, 2) @ _take(value, places).transpose(1, 2)
    out = (far.transpose(1, 2) + _weighed(weights, value, side))[:, :tokens]
    if chosen is None:
        return out
    if not pattern.global_rows:
        return out.masked_fill(chosen[..., None, None], 0.0)
    rows = attend_rows(
        _take(query, places), key[:, :tokens], value[:, :tokens],
        places.masked_fill(~filled, -1), seen, causal=pattern.causal, scale=pattern.scale,
        dropout_p=pattern.dropout_p, seed=seed,
    )  # fmt: skip
    return put_rows(out, rows, places.masked_fill(~filled, -1))


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    seen: Visibility,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """Queries of the tokens at `positions` [batch, g] to keys of all tokens,
    [batch, g, heads, head_dim]. -1 gives a zero row."""
    key, value = _valid(key, seen), _valid(value, seen)
    batch, _, heads, _ = query.shape

    def turned(tensor: Tensor) -> Tensor:
        """[batch * heads, tokens, head_dim], in transformers' layout in memory."""
        return tensor.transpose(0, 1).flatten(1, 2).transpose(0, 1)

    scores = turned(query / (1.0 / scale)) @ turned(key).transpose(1, 2)
    scores = scores.unflatten(0, (batch, heads))
    at = torch.arange(key.shape[1], device=key.device).expand(len(key), 1, -1)
    visible = (positions >= 0)[..., None] & _together(positions.clamp(min=0), at, seen, causal)
    weights = _weights(scores.transpose(1, 2), visible, positions, at, dropout_p, seed)
    out = weights.transpose(1, 2).flatten(0, 1) @ turned(value)
    return out.unflatten(0, (batch, heads)).transpose(1, 2)


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, copied: bool = False) -> Tensor:
    """`linear` with tokens before batch rows, as transformers has them: how numbers are grouped
    into products decides on their last digits. `copied` into that order first, as the states of
    global tokens are, bias and product are one step."""
    turned = hidden.transpose(0, 1)
    return linear(turned.contiguous() if copied else turned, weight, bias).transpose(0, 1)


def laid_out(attended: Tensor) -> Tensor:
    """The same, with tokens before batch rows in memory, as transformers hands it on. Of several
    rows it is then not contiguous, and torch adds the bias of the next product behind it."""
    return attended.transpose(0, 1).contiguous().transpose(0, 1)


def _valid(tensor: Tensor, seen: Visibility) -> Tensor:
    """Without what stands in padding: it may be anything, and nothing times zero is not always
    nothing."""
    valid = seen.valid()
    return tensor if valid is None else tensor.masked_fill(~valid[..., None, None], 0.0)


def _global_keys(like: Tensor, seen: Visibility, slots: int | None) -> tuple[Tensor, Tensor]:
    """Where they are and which of the slots are filled, both [batch, slots]."""
    if seen.places is None or seen.rank is None:
        none = torch.zeros(len(like), 0, dtype=torch.long, device=like.device)
        return none, none.bool()
    slots = int(seen.rank[:, -1].max()) if slots is None else slots
    places = seen.places[:, :slots].long()  # fewer where there is more room than tokens
    return places, torch.arange(places.shape[1], device=like.device) < seen.rank[:, -1:]


def _take(tensor: Tensor, places: Tensor) -> Tensor:
    """[batch, tokens, heads, head_dim] -> [batch, g, heads, head_dim]."""
    return tensor.gather(1, places[..., None, None].expand(-1, -1, *tensor.shape[2:]))


def _look_up(table: Tensor, at: Tensor) -> Tensor:
    """[batch, tokens] at positions [batch, ...]."""
    return table.gather(1, at.flatten(1)).view(at.shape)


def _together(query: Tensor, key: Tensor, seen: Visibility, causal: bool) -> Tensor:
    """Bool, of positions [batch, queries] and [batch, queries or 1, keys]: tokens of one document,
    and nothing of the future if `causal`."""
    key = key.expand(-1, query.shape[1], -1)
    visible = key <= query[..., None] if causal else torch.ones_like(key, dtype=torch.bool)
    if seen.start is None or seen.stop is None:
        return visible
    start, stop = (_look_up(bound, query)[..., None] for bound in (seen.start, seen.stop))
    return visible & (key >= start) & (key < stop) & _look_up(seen.stop > 0, key)


def _weights(
    scores: Tensor,
    visible: Tensor,
    query: Tensor,
    key: Tensor,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """Softmax of [batch, queries, heads, keys] over what is visible [batch, queries, keys] at these
    positions; zero where nothing is."""
    batch, _, heads, _ = scores.shape
    visible = visible[:, :, None]
    blank = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~(visible | blank), -torch.inf)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=dtype).masked_fill(blank, 0.0)
    if seed is not None:
        stream = torch.arange(batch * heads, device=scores.device).view(batch, 1, heads, 1)
        kept = dropout.kept(seed, stream, query[..., None, None], key[:, :, None], dropout_p)
        weights = weights * kept / (1.0 - dropout_p)
    return weights.to(scores.dtype)


def _pieces(tensor: Tensor, length: int, step: int) -> Tensor:
    """[batch, tokens, heads, dim] -> overlapping pieces [batch * heads, pieces, length, dim]."""
    return tensor.transpose(1, 2).flatten(0, 1).unfold(1, length, step).transpose(2, 3)


def _band(query: Tensor, key: Tensor, side: int) -> Tensor:
    """Scores of each query and the keys around it, [batch, tokens, heads, 2 * side + 1]; numbers
    without meaning where these keys lie outside."""
    batch, tokens, heads, _ = query.shape
    query, key = _pieces(query, 2 * side, side), _pieces(key, 2 * side, side)
    whole = torch.einsum("bcxd,bcyd->bcxy", query, key).flatten(2)
    # Read as rows that are one longer, a piece has its diagonals as columns, its own key in the
    # middle. The first half of a piece sees all that lies ahead, the second all that lies behind.
    whole = pad(whole, (side, side)).unflatten(2, (2 * side, 2 * side + 1))
    behind = torch.cat((whole[:, :1, :side, :side], whole[:, :, side:, :side]), dim=1)
    ahead = torch.cat((whole[:, :, :side, side:], whole[:, -1:, side:, side:]), dim=1)
    band = torch.cat((behind, ahead), dim=-1)
    return band.reshape(batch, heads, tokens, -1).transpose(1, 2)


def _weighed(weights: Tensor, value: Tensor, side: int) -> Tensor:
    """Values around each token by their weights, [batch, tokens, heads, head_dim]."""
    batch, tokens, heads, _ = weights.shape
    rows = weights.transpose(1, 2).reshape(batch * heads, tokens // side, side, -1)
    # The same the other way round: three halves of a window, each row a step further to the right.
    whole = pad(rows, (0, side)).flatten(2)[:, :, :-side].unflatten(2, (side, 3 * side))
    around = pad(value, (0, 0, 0, 0, side, side))
    out = torch.einsum("bcxy,bcyd->bcxd", whole, _pieces(around, 3 * side, side))
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2)
