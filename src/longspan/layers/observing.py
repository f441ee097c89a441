"""Layers that keep more than weights: centroids that follow the tokens of training.

A call changes nothing that another call reads. While training, a layer notes the hidden states it
was given, those of its last call: so a call may be repeated (by gradient checkpointing, say) and
counts once. `auxiliary_loss(model)`, called before the backward pass of every part of a batch, is
what layers add to its loss; `end_part(model)`, called after it, lays the states by;
`refresh(model)`, called once after every step of the optimiser, lets layers take in those of all
parts. The training loop does all of it; without parts, `refresh` is enough to take in. All that
was taken in stands in buffers, saved with the weights, and between steps nothing else is left: a
run that goes on from a checkpoint goes on to the same numbers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize

from longspan.layers.document import DocumentAttention
from longspan.ops.centroids import nearest, spherical_kmeans, sums_of
from longspan.ops.window import Visibility


def auxiliary_loss(model: nn.Module) -> Tensor | float:
    """What the layers of an encoder add to the loss of its last call; a decoder returns its own."""
    own = (module.cost() for module in model.modules() if isinstance(module, Observing))
    return sum(own, 0.0)


def end_part(model: nn.Module) -> None:
    """Let the layers of a model lay by what they saw; to be called after each part of a batch."""
    for module in model.modules():
        if isinstance(module, Observing):
            module.end_part()


def refresh(model: nn.Module) -> None:
    """Let the layers of a model take in what they saw; to be called after each optimiser step."""
    for module in model.modules():
        if isinstance(module, Refreshed):
            module.refresh()


class Refreshed(nn.Module):
    """Mixed into a layer that has something to do after each step of the optimiser."""

    def refresh(self) -> None:
        raise NotImplementedError


class Observing(Refreshed):
    """Mixed into a layer: it calls `note` with what it is given, and has `take_in`."""

    _noted: tuple[Tensor, Tensor | None] | None = None
    _parts: tuple[Tensor, ...] = ()  # of the step: states [any number, dim]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has seen nothing yet; what this one noted hangs on a graph, which has none."""
        return {n: own for n, own in self.__dict__.items() if n not in ("_noted", "_parts")}

    def note(self, hidden: Tensor, valid: Tensor | None = None) -> None:
        """[batch, tokens, dim] and which of these are no padding; nothing outside training."""
        if self.training:
            self._noted = hidden, valid

    def noted(self) -> tuple[Tensor, ...]:
        """The hidden states of the last call, none outside training."""
        return () if self._noted is None or not self.training else self._noted[:1]

    def note_again(self, hidden: Tensor) -> None:
        """The same numbers, through which gradients take another way."""
        assert self._noted is not None
        self._noted = hidden, self._noted[1]

    def cost(self) -> Tensor | float:
        """What is to be added to the loss of the call that was noted."""
        return 0.0

    def take_in(self, states: Tensor) -> None:
        """Change buffers by hidden states [any number, dim]."""
        raise NotImplementedError

    def end_part(self) -> None:
        if self._noted is not None:
            hidden, valid = self._noted
            states = hidden.flatten(0, 1) if valid is None else hidden[valid]
            self._noted, self._parts = None, (*self._parts, states.detach())

    @torch.no_grad()
    def refresh(self) -> None:
        self.end_part()
        if not self._parts:
            return
        states, self._parts = torch.cat(self._parts), ()
        if states.shape[0] > 0:
            self.take_in(states)
        for module in self.modules():
            if isinstance(module, Centroids):
                same_everywhere(module.directions)


def same_everywhere(buffer: Tensor) -> None:
    """That of the main process, in all of a run's."""
    if dist.is_available() and dist.is_initialized():
        dist.broadcast(buffer, 0)


class ObservingDocument(Observing, DocumentAttention):
    """An encoder's layer that notes its input, but for padding."""

    def forward(
        self,
        hidden: Tensor,
        *,
        seen: Visibility | None = None,
        positions: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        self.note(hidden, None if seen is None else seen.valid())
        return super().forward(hidden, seen=seen, positions=positions, position_ids=position_ids)


class Centroids(nn.Module):
    """Directions [heads, clusters, dim] of length 1; tokens belong to the nearest."""

    directions: Tensor
    steps: Tensor  # how often something was taken in

    def __init__(self, heads: int, clusters: int, dim: int) -> None:
        super().__init__()
        if clusters < 1:
            raise ValueError(f"clusters={clusters} must be at least 1")
        drawn = normalize(torch.randn(heads, clusters, dim), dim=-1)
        self.register_buffer("directions", drawn)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, points: Tensor) -> Tensor:
        """[batch, tokens, heads, dim] -> [batch, tokens, heads]: the number of each's cluster."""
        return nearest(points, self.directions)


class OnlineCentroids(Centroids):
    """They follow the mean of their tokens, by a little at every step.

    Args:
        decay: how much of a centroid is left after a step.
    """

    def __init__(self, heads: int, clusters: int, dim: int, *, decay: float) -> None:
        super().__init__(heads, clusters, dim)
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay} must be from 0 to 1")
        self.decay = decay

    def distance(self, points: Tensor, clusters: Tensor, valid: Tensor | None = None) -> Tensor:
        """The mean square of what is between points [batch, tokens, heads, dim] and the centroids
        of their clusters [batch, tokens, heads]; `valid` [batch, tokens] marks those that count."""
        head = torch.arange(points.shape[2], device=points.device)
        own = self.directions[head, clusters]
        far = (points.float() - own.float()).square().mean((2, 3))
        return far.mean() if valid is None else (far * valid).sum() / valid.sum().clamp(min=1)

    def take_in(self, points: Tensor) -> None:
        """[points, heads, dim] of length 1. The first ones are clustered: centroids drawn at
        random would be near to none."""
        clusters = self.directions.shape[1]
        if int(self.steps) == 0:
            self.directions.copy_(spherical_kmeans(points, clusters))
        else:
            points = points.to(torch.promote_types(points.dtype, torch.float32))
            sums, counts = sums_of(points, nearest(points[None], self.directions)[0], clusters)
            old = self.directions.to(sums.dtype)
            moved = old.lerp(normalize(sums, dim=-1), 1.0 - self.decay)
            # A centroid without tokens waits where it is.
            moved = torch.where(counts[..., None] > 0, normalize(moved, dim=-1), old)
            self.directions.copy_(moved)
        self.steps += 1


class BankCentroids(Centroids):
    """Found every so many steps, by k-means over a bank of the last tokens, from where they were.
    Until there are any, all tokens belong to the first.

    Args:
        bank: how many tokens, as many of each of the steps before.
        every: steps. The first k-means comes after 3/8 of them: where training ends or is
            evaluated, mostly at round numbers, a model shall know its centroids for some steps.
    """

    bank: Tensor

    def __init__(self, clusters: int, dim: int, *, bank: int, every: int) -> None:
        super().__init__(1, clusters, dim)
        if bank < clusters or every < 1:
            raise ValueError(
                f"bank={bank} must hold a token for each of clusters={clusters}, every={every} be "
                "at least 1"
            )
        self.every = every
        self.first = max(1, 3 * every // 8)
        self.register_buffer("bank", torch.zeros(bank, dim))

    def forward(self, points: Tensor) -> Tensor:
        # Checkpoints of another schedule may have more steps, and a bank that was never full.
        found = (self.steps >= self.first) & self.bank[-1].any()
        return torch.where(found, super().forward(points), 0)

    def take_in(self, points: Tensor) -> None:
        """[points, dim], of which some are drawn by torch's generator."""
        room, device = self.bank.shape[0], points.device
        share = -(-room // self.first)
        drawn = torch.randint(points.shape[0], (share,), device=device)
        at = (self.steps * share + torch.arange(share, device=device)) % room
        self.bank[at] = points[drawn].to(self.bank.dtype)
        self.steps += 1
        since = int(self.steps) - self.first
        if since % self.every == 0:
            clusters = self.directions.shape[1]
            start = self.directions if since > 0 else None
            self.directions.copy_(spherical_kmeans(self.bank[:, None], clusters, start))
