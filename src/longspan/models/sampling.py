"""Choosing the next token from its logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """How to choose; the defaults take the likeliest token.

    Args:
        temperature: 0 takes the likeliest; below 1 prefers likely tokens, above 1 evens them out.
        top_k: only among the k likeliest; None = all.
        top_p: only among the likeliest that together reach this probability; 1 = all.
        seed: of the random numbers; None draws one.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1; None = all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must not be negative, and below 2**63")

    def generator(self, device: torch.device) -> torch.Generator:
        made = torch.Generator(device)
        if self.seed is None:
            made.seed()
        else:
            made.manual_seed(self.seed)
        return made

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """[batch] tokens from logits [batch, vocabulary]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        chances = self.chances(logits)
        return torch.multinomial(chances, 1, generator=generator)[:, 0]

    def chances(self, logits: Tensor) -> Tensor:
        """[batch, vocabulary]: the probabilities that tokens are drawn with."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = chances.sort(dim=-1, descending=True, stable=True)
            # A token is needed if those before it fall short of top_p: the first always is.
            needed = ordered.cumsum(-1) - ordered < self.top_p
            kept = torch.zeros_like(needed).scatter(-1, order, needed)
            chances = chances * kept
        return chances / chances.sum(-1, keepdim=True)
