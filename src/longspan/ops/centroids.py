"""Which of several directions tokens are nearest to, and directions that many tokens are near to.

Products are formed for a few tokens or directions at a time, so that memory does not grow with
their number times the number of tokens. On a GPU fused kernels compare them. Nothing here has a
gradient.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from longspan.ops.operator import operator
from longspan.ops.window.api import refuse_triton

# Products that are formed at a time; on a GPU every time has to be launched, for many rows.
_SCORES = 2**24
_SCORES_ON_GPU = 2**27
_SCORES_ON_CPU = 2**19  # of what is compared at once, so that it stays in its caches


def serves(tensor: Tensor) -> bool:
    """Whether the fused kernels do, which take heads of any size."""
    if not tensor.is_cuda or tensor.numel() == 0:
        return False
    return refuse_triton(tensor.device, tensor.dtype, 0) is None


@torch.no_grad()
def nearest(points: Tensor, directions: Tensor) -> Tensor:
    """[batch, tokens, heads, dim], [heads, count, dim] -> [batch, tokens, heads]: the direction
    with the largest product, the first of equals."""
    if serves(points) and directions.dtype != torch.float64:
        return _nearest(points, directions[None], False)[..., 0]
    found = [_place(scores, scores.amax(-1)) for scores in _products(points, directions)]
    return torch.cat(found, dim=2).transpose(1, 2)


@torch.no_grad()
def hashed(points: Tensor, directions: Tensor) -> Tensor:
    """[batch, tokens, heads, dim], [rounds, heads, count, dim] -> [batch, tokens, heads, rounds]:
    in each round, the nearest of the directions and, numbered behind these, their opposites."""
    if serves(points) and directions.dtype != torch.float64:
        return _nearest(points, directions, True)
    rounds, _, count, _ = directions.shape
    found = []
    for scores in _products(points, directions.transpose(0, 1).flatten(1, 2)):
        scores = scores.unflatten(-1, (rounds, count))
        most, least = scores.amax(-1), scores.amin(-1)
        opposite = -least > most
        found.append(_place(scores, torch.where(opposite, least, most)) + opposite * count)
    return torch.cat(found, dim=2).transpose(1, 2)


@torch.no_grad()
def strongest(points: Tensor, directions: Tensor, size: int, valid: Tensor | None) -> Tensor:
    """[batch, tokens, heads, dim], [heads, count, dim] -> [batch, count, heads, up to size]: for
    each direction the places of the tokens with the largest products, in their order, -1 where
    there are none left. Of equals the earlier ones; `valid` [batch, tokens] marks those that can
    be chosen."""
    points, directions = _wide(points, directions)
    batch, heads, tokens, _ = points.shape
    size = min(size, tokens)
    found = []
    with torch.autocast(points.device.type, enabled=False):
        most = _SCORES_ON_GPU if serves(points) else _SCORES
        some = max(1, most // max(1, batch * heads * tokens))
        for part in directions.split(some, dim=1):
            scores = (part @ points.mT).float()
            if valid is not None:
                scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
            found.append((_select if serves(scores) else _largest)(scores, size))
    return (found[0] if len(found) == 1 else torch.cat(found, dim=2)).transpose(1, 2)


@torch.no_grad()
def spherical_kmeans(
    points: Tensor, clusters: int, start: Tensor | None = None, rounds: int = 10
) -> Tensor:
    """[points, heads, dim] -> [heads, clusters, dim] of length 1: directions that the points are
    near to, found from `clusters` of them drawn by torch's generator, or from `start`, of which
    only those are drawn that are nearest to no point. A direction that comes to be nearest to none
    stays as it is; with fewer points than clusters some begin as the same."""
    points = normalize(points.to(torch.promote_types(points.dtype, torch.float32)), dim=-1)
    count = points.shape[0]
    drawn = torch.randperm(count, device=points.device)
    directions = points[drawn[torch.arange(clusters, device=drawn.device) % count]].transpose(0, 1)
    if start is not None:
        start = start.to(directions.dtype)
        _, counts = sums_of(points, nearest(points[None], start)[0], clusters)
        directions = torch.where(counts[..., None] > 0, start, directions)
    for _ in range(rounds):
        sums, counts = sums_of(points, nearest(points[None], directions)[0], clusters)
        directions = torch.where(counts[..., None] > 0, normalize(sums, dim=-1), directions)
    return directions


def sums_of(points: Tensor, assigned: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """[points, heads, dim], [points, heads] -> the sum of each cluster's points [heads, clusters,
    dim] and their number [heads, clusters]."""
    _, heads, dim = points.shape
    row = assigned + torch.arange(heads, device=points.device) * clusters
    sums = points.new_zeros(heads * clusters, dim).index_add(0, row.flatten(), points.flatten(0, 1))
    counts = torch.bincount(row.flatten(), minlength=heads * clusters)
    return sums.unflatten(0, (heads, clusters)), counts.view(heads, clusters)


def _products(points: Tensor, directions: Tensor) -> Iterator[Tensor]:
    """[batch, heads, some tokens, count], for all tokens in turn."""
    points, directions = _wide(points, directions)
    batch, heads, _, _ = points.shape
    most = _SCORES_ON_CPU if points.device.type == "cpu" else _SCORES
    some = max(1, most // max(1, batch * heads * directions.shape[1]))
    with torch.autocast(points.device.type, enabled=False):
        for part in points.split(some, dim=2):
            yield part @ directions.mT


def _place(scores: Tensor, value: Tensor) -> Tensor:
    """[..., count], [...] -> where the value comes first. Overwrites the scores: on a CPU argmax
    takes five times as long. NaN, which is equal to nothing, is found at the end."""
    count = scores.shape[-1]
    behind = torch.arange(count, 0, -1, dtype=scores.dtype, device=scores.device)
    found = scores.eq_(value[..., None]).mul_(behind).amax(-1)
    return (count - found.long()).clamp_(max=count - 1)


def _wide(points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, heads, tokens, dim] and [heads, count, dim], in at least float32."""
    dtype = torch.promote_types(points.dtype, torch.float32)
    return points.transpose(1, 2).to(dtype), directions.to(dtype)


def _largest(scores: Tensor, size: int) -> Tensor:
    """[..., tokens] -> [..., size]: the places of the largest, by place, -1 for one of -inf.

    Which of equals topk takes is undefined. Those above the least that it takes are all among
    them, whatever it does; of those equal to the least the earlier ones are looked for.
    """
    tokens = scores.shape[-1]
    top = scores.topk(size)
    least = top.values[..., -1:]
    above = (top.values > least).sum(-1, keepdim=True)
    early = tokens - torch.arange(tokens, device=scores.device, dtype=torch.int32)
    equal = tokens - torch.where(scores == least, early, 0).topk(size).values.long()
    slot = torch.arange(size, device=scores.device)
    chosen = torch.where(slot < above, top.indices, equal.gather(-1, (slot - above).clamp(min=0)))
    found = scores.gather(-1, chosen) > -torch.inf
    ordered = torch.where(found, chosen, tokens).sort(-1).values
    return torch.where(ordered < tokens, ordered, -1)


def _found(points, directions, opposites):
    batch, tokens, heads, _ = points.shape
    found = points.new_empty((batch, heads, directions.shape[0], tokens), dtype=torch.long)
    return found.permute(0, 3, 1, 2)


@operator("nearest", fake=_found)
def _nearest(points: Tensor, directions: Tensor, opposites: bool) -> Tensor:
    """See `hashed`."""
    from longspan.ops import centroid_kernels  # on first use: the package can be imported without

    points = points if points.stride(3) == 1 else points.contiguous()
    directions = directions.contiguous()
    batch, tokens, heads, dim = points.shape
    rounds, _, count, _ = directions.shape
    found = _found(points, directions, opposites)
    own = 64 if points.is_cuda else 16
    wide = max(16, min(64, 1 << (dim - 1).bit_length()))
    centroid_kernels.nearest[(-(-tokens // own) * rounds * batch * heads,)](
        points, directions, found, *points.stride()[:3], tokens, heads, rounds, count, dim,
        OPPOSITES=opposites, BM=own, BN=own, BK=wide, PRECISION="tf32x3", num_warps=4,
    )  # fmt: skip
    return found


def _selected(scores, size):
    return scores.new_empty((*scores.shape[:-1], size), dtype=torch.long)


@operator("largest", fake=_selected)
def _select(scores: Tensor, size: int) -> Tensor:
    """See `_largest`, of float32."""
    from longspan.ops import centroid_kernels

    scores, found = scores.contiguous(), _selected(scores, size)
    tokens = scores.shape[-1]
    block = min(4096, max(256, 1 << (tokens - 1).bit_length()))
    centroid_kernels.select[(scores.numel() // tokens,)](
        scores, found, tokens, size, BLOCK=block, num_warps=8
    )
    return found
