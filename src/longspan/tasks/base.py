"""What tasks on examples have in common."""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from longspan.data.examples import Order, Splits
from longspan.data.tables import Row
from longspan.tasks.documents import Reach, make_template
from longspan.tasks.start import check_freeze
from longspan.train.finetuning import Finetuning, check, planned
from longspan.train.recipe import Phase


class DocumentReader:
    """What prediction needs of a task that reads one document at a time; training builds on it."""

    needs: tuple[str, ...] = ("text",)

    def __init__(self, recipe: Finetuning, tokenizer: Any) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        self.template = make_template(tokenizer, pair=False)
        self.room = recipe.model.length - self.template.size
        if self.room < 1:
            raise ValueError(f"model.length={recipe.model.length} leaves no room for a document")

    @staticmethod
    def unfold(row: Row, columns: Mapping[str, str]) -> Iterator[Row]:
        """What a row holds: one document."""
        yield row


class ExampleTask:
    """Examples that were read and tokenised once, for one recipe or several.

    A subclass has `_settle`, which takes a recipe for the examples it has, `sheet` and `mark`.
    """

    recipe: Finetuning
    tokenizer: Any
    varies: bool = True

    def _settle(self, recipe: Finetuning) -> None:
        raise NotImplementedError

    def lengths(self, split: str) -> np.ndarray:
        """Tokens of each document, or of what is asked about."""
        raise NotImplementedError

    def about(self, split: str) -> Sequence[Hashable]:
        """What each example is about; several may be about the same."""
        return range(len(self.lengths(split)))

    def draw(self, recipe: Finetuning) -> Order:
        """Which training examples each step takes."""
        lengths = self.lengths("train")
        return Order(len(lengths), recipe.batch, recipe.seed, lengths, recipe.alike)

    def sheet(self, model: Any, split: str) -> np.ndarray:
        """[examples, columns]: what each example adds to the measure."""
        raise NotImplementedError

    def mark(self, sheet: np.ndarray) -> float:
        """The recipe's measure over the rows of a sheet, all of them or a choice."""
        raise NotImplementedError

    def again(self, recipe: Finetuning) -> Self:
        """The same task by another recipe with the same data and tokenizer."""
        old = self.recipe
        if (recipe.data, recipe.model.source, recipe.answers.blanks) != (
            *(old.data, old.model.source, old.answers.blanks),
        ):
            raise ValueError(
                "another recipe for the same examples: data, model and answers must be the same"
            )
        check(recipe)
        made = copy.copy(self)
        made._settle(recipe)
        return made

    def before(self) -> Self | None:
        """The task of an earlier stage, which is carried out first and then given to `take`."""
        return None

    def take(self, first: Any, model: Any) -> None:
        """Go on from an earlier stage and its model."""
        raise NotImplementedError

    def enter(self, model: PreTrainedModel, phase: Phase) -> None:
        """One phase, one set-up."""

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def accompany(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def pack(self, state: Any) -> dict[str, Tensor]:
        """Nothing: steps do not build on one another."""
        return {}

    def unpack(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> Any:
        return None


class QuestionTask(ExampleTask):
    """Questions, in `asked`, about texts. A subclass builds on what prediction needs of it, its
    `reader`."""

    reader: ClassVar[Any]
    asked: Splits[Any]

    def check_length(self, asked: Sequence[Any]) -> Reach:
        """How many texts are beyond the model; an error if they are to be refused."""
        raise NotImplementedError

    def _settle(self, recipe: Finetuning) -> None:
        self.reader.__init__(self, recipe, self.tokenizer)
        self.reach = self.check_length([one for split in self.asked for one in split])
        self.recipe = planned(recipe, len(self.asked.train))
        self._order = self.draw(recipe)


def check_measure(recipe: Finetuning, measures: Sequence[str]) -> None:
    """Raise if the recipe cannot be carried out, whatever it starts from."""
    check(recipe)
    if recipe.measure not in measures:
        raise ValueError(f"measure={recipe.measure}: choose from {', '.join(measures)}")


def check_recipe(recipe: Finetuning, measures: Sequence[str]) -> str:
    """The checkpoint to start from; an error if the recipe cannot be carried out."""
    check_measure(recipe, measures)
    if recipe.model.new is not None:
        raise ValueError(f"model.new: {recipe.task} starts from a checkpoint; classify need not")
    if recipe.model.source is None:
        raise ValueError("there is no model to start from: give --model FOLDER or a hub name")
    if recipe.task != "summarize":  # whose models cannot be frozen in part at all
        check_freeze(recipe.model)
    return recipe.model.source
