"""Summaries: a whole document in, a text about it out, by teacher forcing and beam search.

What is asked of a document, if anything, stands before it, and its tokens are global; else the
first token is.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel, TextStreamer

from longspan.data.examples import Order, Skips, Splits, read_examples
from longspan.data.tables import Row
from longspan.tasks.base import ExampleTask, check_recipe
from longspan.tasks.documents import (
    Piece,
    collate,
    make_template,
    pieces,
    reach,
    token_ids,
)
from longspan.tasks.start import build_writer, load_tokenizer
from longspan.tasks.summaries import (
    ROUGE,
    Request,
    Rouge,
    read_question,
    read_requests,
    read_text,
    unfold_requests,
)
from longspan.train.finetuning import Finetuning, planned
from longspan.train.task import Goal, Loss

MEASURES = (*ROUGE, "loss")
_IGNORED = -100
_SHORTEST = 512  # of the lengths that are compiled for


class Document(NamedTuple):
    ids: np.ndarray  # without special tokens
    question: np.ndarray


class Example(NamedTuple):
    document: Document
    target: np.ndarray  # special tokens included
    summary: str


class Teller(TextStreamer):
    """Gives each piece of a text that is being generated to `say`, and a line break at its end."""

    def __init__(self, tokenizer: Any, say: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.say, self.said = say, False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.said = self.said or bool(text.strip())
        if stream_end and not self.said:
            text = "(nothing was written)"
        self.say(text + "\n" if stream_end else text)


class Summarizer:
    """Documents to texts: what prediction needs, and training builds on."""

    needs = ("text",)
    unfold = staticmethod(unfold_requests)

    def __init__(self, recipe: Finetuning, tokenizer: Any) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        self.template = make_template(tokenizer, pair=True)
        if not self.template.after:
            raise ValueError("the tokenizer puts nothing behind a text, so none would ever end")
        if recipe.too_long == "split":
            raise ValueError(
                "too_long=split: no summary is put together from pieces; choose refuse or head"
            )

    def size(self, document: Document) -> int:
        """Tokens that the model has to read."""
        between = len(document.question) + len(self.template.between)
        between = between if len(document.question) else 0
        return len(document.ids) + between + len(self.template.before) + len(self.template.after)

    def collate(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        """What the encoder takes."""
        own = [self._read(one) for one in documents]
        asked = [len(one.question) > 0 for one in documents]
        batch, _ = collate(own, packed=False, pad_id=self.tokenizer.pad_token_id)
        if any(asked) and self.recipe.model.global_tokens is None:
            place = torch.arange(batch["input_ids"].shape[1])
            most = [piece.begin if some else 1 for piece, some in zip(own, asked, strict=True)]
            batch["global_attention_mask"] = (place < torch.tensor(most)[:, None]).long()
        return batch

    def _read(self, document: Document) -> Piece:
        """As much of it as fits behind its question; an error if that leaves no room."""
        question = document.question if len(document.question) else None
        length = self.recipe.model.length
        return pieces(document.ids, length, self.template, "head", question=question)[0]

    @torch.no_grad()
    def write(
        self, model: Any, documents: Sequence[Document], say: Callable[[str], object] | None = None
    ) -> list[str]:
        """A text about each, by beam search. `say` is given the words of a single one as they
        come, which are the likeliest each time: beams know only at the end which of them wins."""
        batch = {name: tensor.to(model.device) for name, tensor in self.collate(documents).items()}
        writing = self.recipe.writing
        how: dict[str, Any] = {
            "num_beams": writing.beams,
            "length_penalty": writing.length_penalty,
        }
        if say is not None:
            how = {"num_beams": 1, "streamer": Teller(self.tokenizer, say)}
        made = model.generate(
            **batch,
            **how,
            no_repeat_ngram_size=writing.no_repeat,
            max_new_tokens=writing.longest,
            min_length=0,
            do_sample=False,
        )
        return [one.strip() for one in self.tokenizer.batch_decode(made, skip_special_tokens=True)]

    def predict(
        self, model: Any, rows: Sequence[Row], say: Callable[[str], object] | None = None
    ) -> list[dict[str, Any]]:
        """For each row what was written, and how many of its tokens were not read, if any; words
        are given to `say`, as they come, of one text after the other."""
        columns = self.recipe.data.columns
        texts = token_ids(self.tokenizer, [read_text(row, columns) for row in rows])
        asked = token_ids(self.tokenizer, [read_question(row, columns) for row in rows])
        documents = [Document(*both) for both in zip(texts, asked, strict=True)]
        length = self.recipe.model.length
        for row, one in zip(rows, documents, strict=True):
            if self.size(one) > length and self.recipe.too_long == "refuse":
                raise ValueError(
                    f"{row.where}: {self.size(one):,} tokens, the model reads {length:,}; "
                    'with --too-long head (in Python too_long="head") it reads the beginning only'
                )
            try:
                self._read(one)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from None
        wanted = [one for one in documents if len(one.ids)]
        groups = [wanted] if say is None and wanted else [[one] for one in wanted]
        written = iter([text for own in groups for text in self.write(model, own, say)])
        found = []
        for one in documents:
            if not len(one.ids):
                found.append({"skipped": "the text is empty"})
                continue
            unread = max(0, self.size(one) - length)
            found.append({"summary": next(written)} | ({"unread": unread} if unread else {}))
        return found


class Summarize(Summarizer, ExampleTask):
    """The task of a recipe: its documents, its model, and how near it comes to what was written.

    Everything that can be wrong with a recipe or its examples is found here, before training.
    """

    varies = False  # where compiled, see `_round_up`

    def __init__(self, recipe: Finetuning) -> None:
        source = check_recipe(recipe, MEASURES)
        super().__init__(recipe, load_tokenizer(source))
        lower = recipe.measure == "loss"
        self.goal = Goal(recipe.measure, recipe.measure, lower_is_better=lower)
        self.rouge = None if lower else Rouge()
        self.skips = Skips()
        examples = read_examples(
            recipe.data, self._understand, self.skips, about=lambda one: one.text
        )
        self._known: dict[str, np.ndarray] = {}
        self.examples = Splits(*(self._encode(split) for split in examples))
        self._settle(recipe)

    def _understand(self, row: Row) -> Iterator[Request]:
        return read_requests(row, self.recipe.data.columns, self.skips)

    def _encode(self, requests: list[Request]) -> list[Example]:
        # Queries about one document share its tokens.
        new = list({one.text for one in requests} - self._known.keys())
        self._known |= zip(new, token_ids(self.tokenizer, new), strict=True)
        asked = token_ids(self.tokenizer, [one.question for one in requests])
        written = token_ids(self.tokenizer, [one.summary for one in requests])
        found = []
        for one, question, target in zip(requests, asked, written, strict=True):
            ids = self._known[one.text]
            if not len(ids) or not len(target):
                self.skips.add("the text or the summary has no tokens", one.id)
                continue
            whole = np.concatenate([self.template.before, target, self.template.after])
            found.append(Example(Document(ids, question), whole.astype(np.int64), one.summary))
        return found

    def _settle(self, recipe: Finetuning) -> None:
        Summarizer.__init__(self, recipe, self.tokenizer)
        for name, own in self.examples._asdict().items():
            if not own:
                raise ValueError(f"the {name} examples have no tokens")
        documents = [one.document for own in self.examples for one in own]
        self.reach = reach([self.size(one) for one in documents], recipe.model.length)
        if self.reach.too_long and recipe.too_long == "refuse":
            raise ValueError(
                f"{self.reach.share('refuse')}: a larger model.length reads more, --too-long head "
                "reads their beginning only"
            )
        self._read(max(documents, key=lambda one: len(one.question)))
        self.recipe = planned(recipe, len(self.examples.train))
        self._order = Order(len(self.examples.train), recipe.batch, recipe.seed)

    def notes(self) -> list[str]:
        """What a user should know before training begins."""
        sizes = ", ".join(f"{len(own):,} {name}" for name, own in self.examples._asdict().items())
        found = [f"{sizes} examples", *self.skips.lines()]
        if self.reach.too_long:
            found.append(self.reach.share(self.recipe.too_long))
        longest = self.recipe.writing.longest
        cut = sum(len(one.target) > longest for one in self.examples.train)
        if cut:
            found.append(
                f"{cut:,} of {len(self.examples.train):,} summaries to learn from have more than "
                f"{longest:,} tokens (writing.longest); their beginning is learned"
            )
        return found

    def build(self) -> PreTrainedModel:
        return build_writer(
            self.recipe.model,
            self.tokenizer,
            self.template.after,
            self.recipe.writing.longest,
            label_smoothing=self.recipe.writing.smoothing,
        )

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        return self._batch([self.examples.train[p] for p in self._order.take(step, rows)]), True

    def _batch(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        targets = [one.target[: self.recipe.writing.longest] for one in examples]
        compiled = self.recipe.compile != "no"
        most = self.recipe.writing.longest if compiled else max(map(len, targets))
        labels = np.full((len(targets), most), _IGNORED)
        for row, own in enumerate(targets):
            labels[row, : len(own)] = own
        batch = self.collate([one.document for one in examples])
        if compiled:
            batch = self._round_up(batch)
        return batch | {"labels": torch.from_numpy(labels)}

    def _round_up(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """More padding, up to one of a few lengths: each that occurs is compiled for."""
        tokens = batch["input_ids"].shape[1]
        room = min(max(_SHORTEST, 1 << (tokens - 1).bit_length()), self.recipe.model.length)
        fill = {"input_ids": self.tokenizer.pad_token_id}
        return {
            name: pad(tensor, (0, room - tokens), value=fill.get(name, 0))
            for name, tensor in batch.items()
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss:
        total = model(**batch).loss
        return Loss(total, total.detach())

    @torch.no_grad()
    def evaluate(self, model: Any, split: str, limit: int = 0) -> dict[str, float]:
        """The loss per token, without smoothing; and by ROUGE what the model writes, and what the
        beginning of each document would score, as long as summaries are ("lead")."""
        model.eval()
        examples: list[Example] = getattr(self.examples, split)[: limit or None]
        total, tokens = 0.0, 0
        for group in self._groups(examples):
            batch = {name: tensor.to(model.device) for name, tensor in self._batch(group).items()}
            logits, labels = model(**batch).logits.float(), batch["labels"]
            total += float(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            tokens += int((labels != _IGNORED).sum())
        found = {"loss": total / tokens, "perplexity": math.exp(min(total / tokens, 50.0))}
        if self.rouge is None:
            return found
        right = [one.summary for one in examples]
        written = ("", self.texts(model, examples)), ("lead_", self.leads(examples))
        for prefix, texts in written:
            means = self.rouge(right, texts).mean(axis=0)
            found |= {prefix + n: float(value) for n, value in zip(ROUGE, means, strict=True)}
        return found

    def sheet(self, model: Any, split: str) -> np.ndarray:
        if self.rouge is None:
            raise ValueError("measure=loss is not one of single examples; choose a ROUGE")
        model.eval()
        examples: list[Example] = getattr(self.examples, split)
        return self.rouge([one.summary for one in examples], self.texts(model, examples))

    def mark(self, sheet: np.ndarray) -> float:
        return float(sheet[:, ROUGE.index(self.recipe.measure)].mean())

    def leads(self, examples: Sequence[Example]) -> list[str]:
        """The beginning of each document, as long as summaries are."""
        lead = int(statistics.median(len(one.target) for one in self.examples.train))
        return [self.tokenizer.decode(one.document.ids[:lead]) for one in examples]

    def texts(self, model: Any, examples: Sequence[Example]) -> list[str]:
        """What the model writes about each document."""
        groups = self._groups(examples)
        return [
            one
            for own in groups
            for one in self.write(model, [example.document for example in own])
        ]

    def _groups(self, examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
        size = self.recipe.evaluation.batch
        for first in range(0, len(examples), size):
            yield examples[first : first + size]

    def sample(self, model: Any) -> str:
        """What is written about a validation example."""
        model.eval()
        example = self.examples.valid[0]
        return f"{example.summary[:200]} ...\n-> {self.write(model, [example.document])[0]}"
