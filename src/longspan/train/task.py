"""What the training loop asks of a task."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.train.recipe import Phase


class Loss(NamedTuple):
    total: Tensor  # to be minimised
    nats: Tensor  # of the predictions alone, per token
    state: Any = None  # what the next step goes on from


class Goal(NamedTuple):
    """The measure by which a checkpoint is the best."""

    name: str
    in_words: str
    lower_is_better: bool = False

    def is_better(self, value: float, than: float) -> bool:
        return value < than if self.lower_is_better else value > than


BITS = Goal("bits_per_character", "bits per character", lower_is_better=True)


class Task(Protocol):
    """Examples into batches, a model with its loss, and a measure of success."""

    goal: Goal
    varies: bool  # whether batches of a phase differ in length; they are compiled for any, then

    def build(self) -> PreTrainedModel:
        """A new model."""
        ...

    def enter(self, model: PreTrainedModel, phase: Phase) -> None:
        """Set the model up for a phase."""
        ...

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        """Some rows of a step of phase `number`, and whether earlier state is to be forgotten."""
        ...

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss: ...

    def evaluate(self, model: PreTrainedModel, split: str, limit: int) -> dict[str, float]:
        """Measures by name, that of the goal among them."""
        ...

    def sample(self, model: PreTrainedModel) -> str:
        """Something to look at."""
        ...

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds of a model's weights, by name."""
        ...

    def accompany(self, folder: Path) -> None:
        """Write into a checkpoint what is needed beside the weights to use them."""
        ...

    def pack(self, state: Any) -> dict[str, Tensor]: ...

    def unpack(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> Any:
        """Undo `pack`."""
        ...
