"""Classification of documents: one label each, or any number of them.

A document that is longer than the model is read in pieces if the recipe says so, and its scores
are the mean of theirs, in training as in prediction.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from transformers import PreTrainedModel

from longspan.data.examples import Skips, Splits, read_examples
from longspan.data.tables import Row
from longspan.models import LongspanForSequenceClassification
from longspan.tasks.base import DocumentReader, ExampleTask, check_measure, check_recipe
from longspan.tasks.documents import cut_off, reach, read_whole, token_ids
from longspan.tasks.measures import label_measures
from longspan.tasks.start import build_model, build_new, configure_new, load_tokenizer
from longspan.tasks.vocabulary import make_tokenizer
from longspan.train.finetuning import Finetuning, planned
from longspan.train.task import Goal, Loss

MEASURES = ("accuracy", "macro_f1", "micro_f1", "f1")
_EMPTY = "the text is empty"
_SHOWN = 20  # labels


class Labelled(NamedTuple):
    text: str
    labels: tuple[str, ...]


class Document(NamedTuple):
    ids: np.ndarray
    labels: tuple[str, ...]


class Classifier(DocumentReader):
    """Texts to scores by label: what prediction needs, and training builds on."""

    def collate(self, documents: Sequence[np.ndarray]) -> dict[str, Tensor]:
        pad_id = self.tokenizer.pad_token_id
        own, batch, _ = read_whole(documents, self.recipe, self.template, pad_id)
        counts = torch.tensor([len(group) for group in own])
        return batch | {"document": torch.arange(len(own)).repeat_interleave(counts)}

    def logits(self, model: Any, batch: dict[str, Tensor], documents: int) -> Tensor:
        """[documents, labels], the mean over the pieces of each."""
        given = {name: tensor for name, tensor in batch.items() if name != "document"}
        found = model(**given).logits.float()
        place = batch["document"]
        sums = found.new_zeros(documents, found.shape[1]).index_add(0, place, found)
        # Not bincount, for whose result a GPU is waited for.
        counts = found.new_zeros(documents).index_add(0, place, found.new_ones(len(place)))
        return sums / counts[:, None]

    @torch.no_grad()
    def predict(self, model: Any, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """For each row its label, or labels, and the probability of every label."""
        column = self.recipe.data.columns.get("text", "text")
        texts = [row.text(column) for row in rows]
        tokens = token_ids(self.tokenizer, [text if text.strip() else "" for text in texts])
        for row, own in zip(rows, tokens, strict=True):
            if len(own) > self.room and self.recipe.too_long == "refuse":
                raise ValueError(
                    f"{row.where}: {len(own):,} tokens, the model reads {self.room:,}; "
                    'with --too-long split (in Python too_long="split") it reads them in pieces'
                )
        wanted = [own for own in tokens if len(own)]
        found: Iterator[Any] = iter(())
        if wanted:
            batch = {k: v.to(model.device) for k, v in self.collate(wanted).items()}
            found = iter(self.probabilities(self.logits(model, batch, len(wanted))).tolist())
        return [
            {**self._describe(model, next(found)), **cut_off(own, self.recipe, self.template)}
            if len(own)
            else {"skipped": _EMPTY}
            for own in tokens
        ]

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.recipe.data.several else logits.softmax(dim=-1)

    def _describe(self, model: Any, scores: list[float]) -> dict[str, Any]:
        names = [model.config.id2label[place] for place in range(len(scores))]
        by_name = dict(zip(names, scores, strict=True))
        if self.recipe.data.several:
            return {"labels": [name for name in names if by_name[name] > 0.5], "scores": by_name}
        return {"label": max(by_name, key=lambda name: by_name[name]), "scores": by_name}


class Classify(Classifier, ExampleTask):
    """The task of a recipe: its examples, its model, and how well they are told apart.

    Everything that can be wrong with a recipe or its examples is found here, before training.
    """

    def __init__(self, recipe: Finetuning) -> None:
        if recipe.model.new is None:
            tokenizer = load_tokenizer(check_recipe(recipe, MEASURES))
        else:
            check_measure(recipe, MEASURES)
            tokenizer = make_tokenizer(recipe.model.new.vocabulary)
            configure_new(recipe.model, recipe.attention, tokenizer)  # reading examples takes long
        super().__init__(recipe, tokenizer)
        self.skips = Skips()
        documents = read_examples(recipe.data, self._understand, self.skips, encode=self._encode)
        self.documents = self._learnable(documents)
        self.labels = _labels(self.documents, recipe)
        self.goal = Goal(recipe.measure, recipe.measure.replace("_", " "))
        self._settle(recipe)

    def _settle(self, recipe: Finetuning) -> None:
        Classifier.__init__(self, recipe, self.tokenizer)
        lengths = [len(one.ids) for split in self.documents for one in split]
        self.reach = reach(lengths, self.room)
        self.reach.check(recipe.too_long)
        self.recipe = planned(recipe, len(self.documents.train))
        self._order = self.draw(recipe)

    def notes(self) -> list[str]:
        """What a user should know before training begins."""
        sizes = ", ".join(f"{len(own):,} {name}" for name, own in self.documents._asdict().items())
        found = [f"{sizes} examples; labels: {_listed(self.labels)}", *self.skips.lines()]
        counts = Counter(label for one in self.documents.train for label in one.labels)
        rare = sorted(label for label, count in counts.items() if count == 1)
        if rare:
            found.append(f"labels that a single training example has: {_listed(rare)}")
        return [*found, *([self.reach.share(self.recipe.too_long)] if self.reach.too_long else [])]

    def lengths(self, split: str) -> np.ndarray:
        """Tokens of each document."""
        return np.array([len(one.ids) for one in getattr(self.documents, split)])

    def _understand(self, row: Row) -> Iterator[Labelled]:
        columns = self.recipe.data.columns
        text = row.text(columns.get("text", "text"))
        labels = self._labels_of(row, columns.get("label", "label"))
        if not text.strip():
            self.skips.add(_EMPTY, row.where)
        elif not labels and not self.recipe.data.several:
            self.skips.add("there is no label", row.where)
        else:
            yield Labelled(text, labels)

    def _learnable(self, documents: Splits[Document]) -> Splits[Document]:
        """Without documents whose label no training example is left with, where that is by chance:
        rare ones end up in splits that are drawn. A file of its own is taken at its word."""
        known = {label for one in documents.train for label in one.labels}
        for name in ("valid", "test"):
            if getattr(self.recipe.data, name) is not None:
                continue
            kept = []
            for one in getattr(documents, name):
                new = sorted(set(one.labels) - known)
                if new:
                    self.skips.add("no training example has the label", f"{new[0]!r} in {name}")
                else:
                    kept.append(one)
            if kept:
                documents = documents._replace(**{name: kept})
        return documents

    def _labels_of(self, row: Row, column: str) -> tuple[str, ...]:
        value = row.get(column)
        if self.recipe.data.several and isinstance(value, str):
            text = value.strip()
            if text.startswith("["):
                try:
                    value = json.loads(text)
                except ValueError as error:
                    raise ValueError(f"{row.where}, column {column!r}: not JSON: {error}") from None
            else:
                value = text.split(self.recipe.data.separator)
        if isinstance(value, list):
            if not self.recipe.data.several:
                raise ValueError(
                    f"{row.where}, column {column!r}: a list of labels; --several allows it"
                )
            names = [str(one).strip() for one in value]
        else:
            nothing = value is None or value != value  # not a number: how tables say none
            names = [] if nothing else [_name(value)]
        return tuple(dict.fromkeys(name for name in names if name))

    def _encode(self, examples: list[Labelled]) -> Iterator[Document]:
        tokens = token_ids(self.tokenizer, [one.text for one in examples])
        for one, ids in zip(examples, tokens, strict=True):
            if len(ids):
                yield Document(ids, one.labels)
            else:
                self.skips.add("the text has no tokens", repr(one.text[:20]))

    def build(self) -> PreTrainedModel:
        kind = "multi_label" if self.recipe.data.several else "single_label"
        settings = {
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
            "problem_type": f"{kind}_classification",
        }
        start, head = self.recipe.model, LongspanForSequenceClassification
        if start.new is not None:
            return build_new(start, self.recipe.attention, head, self.tokenizer, **settings)
        return build_model(start, head, self.tokenizer, **settings)

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        return self._batch([self.documents.train[p] for p in self._order.take(step, rows)]), True

    def _batch(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        targets = torch.zeros(len(documents), len(self.labels))
        for place, one in enumerate(documents):
            targets[place, [self.labels.index(label) for label in one.labels]] = 1.0
        return self.collate([one.ids for one in documents]) | {"targets": targets}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss:
        total = self._losses(*self._logits(model, batch)).mean()
        return Loss(total, total.detach())

    def _logits(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        given = dict(batch)
        targets = given.pop("targets")
        return self.logits(model, given, len(targets)), targets

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[documents]"""
        if self.recipe.data.several:
            return binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
        return cross_entropy(logits, targets, reduction="none")

    def evaluate(self, model: PreTrainedModel, split: str, limit: int = 0) -> dict[str, float]:
        logits, targets = self.scores(model, split, limit)
        sheet = self._sheet(logits, targets)
        return {**self._measures(sheet), "loss": float(self._losses(logits, targets).mean())}

    def sheet(self, model: Any, split: str) -> np.ndarray:
        return self._sheet(*self.scores(model, split))

    def mark(self, sheet: np.ndarray) -> float:
        return self._measures(sheet)[self.recipe.measure]

    def _sheet(self, logits: Tensor, targets: Tensor) -> np.ndarray:
        """The right labels, and behind them those that are found."""
        if self.recipe.data.several:
            found = (logits > 0).int()
        else:
            found = one_hot(logits.argmax(dim=1), logits.shape[1])
        return torch.cat([targets.int(), found.int()], dim=1).numpy()

    def _measures(self, sheet: np.ndarray) -> dict[str, float]:
        positive = self.recipe.data.positive
        return label_measures(
            *np.split(sheet, 2, axis=1),
            several=self.recipe.data.several,
            positive=None if positive is None else self.labels.index(positive),
        )

    @torch.no_grad()
    def scores(self, model: Any, split: str, limit: int = 0) -> tuple[Tensor, Tensor]:
        """Logits and targets of a split, [examples, labels] each."""
        model.eval()
        documents: list[Document] = getattr(self.documents, split)[: limit or None]
        size = self.recipe.evaluation.batch
        order = np.arange(len(documents))
        if not self.recipe.packed:  # batches of like length need less padding
            order = np.argsort([len(one.ids) for one in documents], kind="stable")
        found = []
        for first in range(0, len(documents), size):
            batch = self._batch([documents[place] for place in order[first : first + size]])
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            logits, targets = self._logits(model, batch)
            found.append((logits.cpu(), targets.cpu()))
        back = torch.from_numpy(np.argsort(order))
        logits, targets = zip(*found, strict=True)
        return torch.cat(logits)[back], torch.cat(targets)[back]

    def sample(self, model: PreTrainedModel) -> str:
        """What is said of a validation example."""
        document = self.documents.valid[0]
        model.eval()
        with torch.no_grad():
            batch = {k: v.to(model.device) for k, v in self.collate([document.ids]).items()}
            scores = self.probabilities(self.logits(model, batch, 1))[0].tolist()
        shown = ", ".join(f"{n} {s:.2f}" for n, s in zip(self.labels, scores, strict=True))
        return f"{self.tokenizer.decode(document.ids[:40])} ...: {shown}"


def _name(value: Any) -> str:
    """A label as text: JSON's true is "true", and a table's 1.0 is what stands in it."""
    return json.dumps(value) if isinstance(value, bool) else str(value).strip()


def _listed(labels: Iterable[str]) -> str:
    """The first of them, and how many there are: a wrong column may have thousands."""
    names = list(labels)
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _labels(documents: Splits[Document], recipe: Finetuning) -> list[str]:
    """The labels that training examples have; one that is only in others cannot be learned."""
    known = {label for one in documents.train for label in one.labels}
    for name in ("valid", "test"):
        for one in getattr(documents, name):
            for label in one.labels:
                if label not in known:
                    raise ValueError(
                        f"the {name} examples have the label {label!r}, which no training example "
                        f"has; those have {_listed(map(repr, sorted(known)))}"
                    )
    if len(known) < (1 if recipe.data.several else 2):
        raise ValueError(
            f"the training examples have {f'one label, {min(known)!r}' if known else 'no labels'}: "
            "there is nothing to tell apart"
        )
    positive = recipe.data.positive
    if positive is not None and positive not in known:
        raise ValueError(
            f"data.positive={positive!r} is none of {_listed(map(repr, sorted(known)))}"
        )
    if recipe.measure == "f1" and positive is None:
        raise ValueError("measure=f1 is that of one label: say which by data.positive=LABEL")
    return sorted(known)
