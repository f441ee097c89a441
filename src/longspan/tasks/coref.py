"""Coreference: which spans of a document mean the same person, place or thing.

The encoder reads the whole document, or, where it is longer than the model, pieces that end with a
sentence; mentions are found and linked over all of it either way, so that nothing is lost at a
piece's edge but what the words of the other pieces would have told.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.data.examples import Skips, Splits, read_examples
from longspan.data.tables import Row
from longspan.models.coreference import Links, LongspanForCoreference
from longspan.tasks.base import DocumentReader, ExampleTask, check_recipe
from longspan.tasks.coref_measures import NAMES, coref_counts, coref_measures
from longspan.tasks.documents import Piece, beyond, collate, reach, tokenize
from longspan.tasks.embed import Span
from longspan.tasks.mentions import EMPTY, Clusters, Words, cuts, read_words
from longspan.tasks.start import build_model, load_tokenizer
from longspan.train.finetuning import Finetuning, planned
from longspan.train.task import Goal, Loss

MEASURES = ("conll", *NAMES)


class Document(NamedTuple):
    """Words with the tokens that they are read as."""

    words: Words
    ids: np.ndarray
    first: np.ndarray  # of each word, its first token
    last: np.ndarray  # and its last


class Resolver(DocumentReader):
    """Documents to clusters: what prediction needs, and training builds on."""

    needs = ()  # words of sentences, or a text

    def encode(self, words: Sequence[Words]) -> list[Document]:
        found = []
        for own, tokens in zip(
            words, tokenize(self.tokenizer, [w.text for w in words]), strict=True
        ):
            # The tokens that the first and the last character of a word are in.
            first = np.searchsorted(tokens.offsets[:, 1], own.offsets[:, 0], side="right")
            first = np.minimum(first, len(tokens.ids) - 1)
            last = np.searchsorted(tokens.offsets[:, 0], own.offsets[:, 1], side="left") - 1
            found.append(Document(own, tokens.ids, first, np.maximum(first, last)))
        return found

    def pieces(self, document: Document) -> list[Piece]:
        sentence = document.words.sentence
        begins = np.flatnonzero(np.diff(sentence, prepend=-1))
        borders = (document.first[begins], document.first)
        spans = cuts(borders, len(document.ids), self.room)
        spans = spans[:1] if self.recipe.too_long == "head" else spans
        front, back = self.template.before, self.template.after
        return [
            Piece(
                np.concatenate([front, document.ids[start:stop], back]).astype(np.int64),
                len(front),
                (start, stop),
                (start, stop),
            )
            for start, stop in spans
        ]

    def collate(
        self, documents: Sequence[Document], genres: dict[str, int], *, right: bool
    ) -> dict[str, Tensor]:
        """What the model takes, with the right mentions if they are asked for."""
        own = [self.pieces(one) for one in documents]
        batch, begins = collate(
            [piece for group in own for piece in group],
            packed=self.recipe.packed,
            pad_id=self.tokenizer.pad_token_id,
        )
        made = []
        for document, group in zip(documents, own, strict=True):
            at, begins = begins[: len(group)], begins[len(group) :]
            made.append(self._columns(document, group, at))
        joined = {name: np.concatenate([one[name] for one in made]) for name in made[0]}
        given = {
            "words": [len(one["first"]) for one in made],
            "genre": [genres.get(one.words.genre, 0) for one in documents],
            **joined,
        }
        if right:
            given["counts"] = [len(one["mentions"]) for one in made]
        else:
            del given["mentions"]
        return batch | {name: torch.as_tensor(values) for name, values in given.items()}

    def _columns(
        self, document: Document, found: Sequence[Piece], begins: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """What is known of each word that is read, and the right mentions among those."""
        places = [
            np.arange(*piece.span) + begin + piece.begin - piece.span[0]
            for begin, piece in zip(begins, found, strict=True)
        ]
        place, words = np.concatenate(places), document.words
        size = int((document.last < len(place)).sum())  # "head" may leave some unread
        if size == 0:
            raise ValueError(
                f"{words.id}: its first word has more tokens than the model reads, {self.room}"
            )
        mentions = [
            (*mention, number)
            for number, cluster in enumerate(words.clusters)
            for mention in cluster
            if mention[1] < size
        ]
        return {
            "first": place[document.first[:size]],
            "last": place[document.last[:size]],
            "sentence": words.sentence[:size],
            "speaker": words.speaker[:size],
            "form": words.form[:size],
            "mentions": np.array(mentions, dtype=np.int64).reshape(-1, 3),
        }

    @torch.no_grad()
    def resolve(self, model: Any, document: Document) -> Clusters:
        """The clusters of a document, as first and last word of each mention."""
        settings = model.config.coreference
        batch = self.collate([document], _numbered(settings["genres"]), right=False)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        links = Links(*(tensor.cpu() for tensor in model(**batch).links[0]))
        return decode(links, singletons=settings["singletons"])

    def predict(self, model: Any, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """For each row its clusters: of every mention the text, characters and words."""
        made: list[dict[str, Any]] = []
        for row in rows:
            words = read_words(row, self.recipe.data.columns)
            documents = [] if words is None else self.encode([words])
            if not documents or not len(documents[0].ids):
                made.append({"skipped": EMPTY})
                continue
            try:
                self.check_length(documents)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from None
            found = describe(documents[0].words, self.resolve(model, documents[0]))
            cut_off = beyond(len(documents[0].ids), self.pieces(documents[0]))
            made.append({"clusters": found, **cut_off})
        return made

    def check_length(self, documents: Sequence[Document]) -> Any:
        """How many documents do not fit, or an error if all have to."""
        found = reach([len(one.ids) for one in documents], self.room)
        found.check(self.recipe.too_long)
        return found


class Coref(Resolver, ExampleTask):
    """The task of a recipe: its documents, its model, and how well mentions are linked."""

    def __init__(self, recipe: Finetuning) -> None:
        source = check_recipe(recipe, MEASURES)
        super().__init__(recipe, load_tokenizer(source))
        self.skips = Skips()
        self.goal = Goal(
            recipe.measure, "CoNLL F1" if recipe.measure == "conll" else recipe.measure
        )
        examples = read_examples(recipe.data, self._understand, self.skips)
        self.documents = Splits(*(self._encode(split) for split in examples))
        self.genres = sorted({one.words.genre for one in self.documents.train} - {""})
        alone = any(len(c) == 1 for one in self.documents.train for c in one.words.clusters)
        asked = recipe.mentions.singletons
        self.singletons = alone if asked is None else asked
        if not any(one.words.clusters for one in self.documents.train):
            raise ValueError("no training document has a mention: there is nothing to learn")
        self._settle(recipe)

    def _settle(self, recipe: Finetuning) -> None:
        Resolver.__init__(self, recipe, self.tokenizer)
        self.reach = self.check_length([one for split in self.documents for one in split])
        self.recipe = planned(recipe, len(self.documents.train))
        self._order = self.draw(recipe)

    def notes(self) -> list[str]:
        """What a user should know before training begins."""
        sizes = ", ".join(
            f"{len(own):,} {name} ({sum(len(one.words.offsets) for one in own):,} words)"
            for name, own in self.documents._asdict().items()
        )
        longest = self.recipe.mentions.longest
        unreachable = [
            last - first >= longest or one.words.sentence[first] != one.words.sentence[last]
            for split in self.documents
            for one in split
            for cluster in one.words.clusters
            for first, last in cluster
        ]
        alone = "found" if self.singletons else "left out"
        found = [f"documents: {sizes}; singletons are {alone}", *self.skips.lines()]
        if any(unreachable):
            lost, share = sum(unreachable), sum(unreachable) / len(unreachable)
            found.append(
                f"{lost:,} of {len(unreachable):,} mentions ({share:.1%}) have more than {longest} "
                "words or leave their sentence, and cannot be found"
            )
        return [*found, *([self.reach.share(self.recipe.too_long)] if self.reach.too_long else [])]

    def lengths(self, split: str) -> np.ndarray:
        """Tokens of each document."""
        return np.array([len(one.ids) for one in getattr(self.documents, split)])

    def _understand(self, row: Row) -> Iterator[Words]:
        columns = self.recipe.data.columns
        row.get(columns.get("clusters", "clusters"))  # must be there to learn from
        words = read_words(row, columns, self.skips)
        if words is None:
            self.skips.add(EMPTY, row.where)
        else:
            yield words

    def _encode(self, examples: list[Words]) -> list[Document]:
        found = []
        for one in self.encode(examples):
            if len(one.ids):
                found.append(one)
            else:
                self.skips.add("the text has no tokens", one.words.id)
        return found

    def build(self) -> PreTrainedModel:
        given = self.recipe.mentions
        settings = {
            "longest": given.longest,
            "keep": given.keep,
            "antecedents": given.antecedents,
            "size": given.size,
            "dropout": given.dropout,
            "genres": self.genres,
            "singletons": self.singletons,
        }
        return build_model(
            self.recipe.model, LongspanForCoreference, self.tokenizer, coreference=settings
        )

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        chosen = [self.documents.train[place] for place in self._order.take(step, rows)]
        return self.collate(chosen, _numbered(self.genres), right=True), True

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss:
        total = model(**batch).loss
        return Loss(total, total.detach())

    def evaluate(self, model: PreTrainedModel, split: str, limit: int = 0) -> dict[str, float]:
        return self._measures(self._sheet(model, split, limit))

    def sheet(self, model: Any, split: str) -> np.ndarray:
        return self._sheet(model, split)

    def mark(self, sheet: np.ndarray) -> float:
        return self._measures(sheet)[self.recipe.measure]

    def _sheet(self, model: Any, split: str, limit: int = 0) -> np.ndarray:
        """What each document counts for in every measure."""
        model.eval()
        documents: list[Document] = getattr(self.documents, split)[: limit or None]
        return np.stack(
            [
                coref_counts(one.words.clusters, self.resolve(model, one)).flatten()
                for one in documents
            ]
        )

    def _measures(self, sheet: np.ndarray) -> dict[str, float]:
        return coref_measures(sheet.sum(axis=0).reshape(len(NAMES), 2, 2))

    def sample(self, model: PreTrainedModel) -> str:
        """The largest cluster of a validation document."""
        model.eval()
        document = self.documents.valid[0]
        largest = max(self.resolve(model, document), key=len, default=[])
        shown = describe(document.words, [largest])[0][:12]
        return f"{document.words.id}: {', '.join(one['text'] for one in shown) or 'nothing'}"


def decode(links: Links, *, singletons: bool) -> Clusters:
    """Every span joins its best antecedent, if that is better than none; what is left alone is a
    cluster of its own where those are wanted and its score says that it is a mention.

    Of two spans that cross one another the better stays, as mentions do not cross.
    """
    first, last = links.first.numpy(), links.last.numpy()
    stays = _uncrossed(first, last, links.mention.numpy())
    known = torch.from_numpy(stays)
    scores = links.scores.clone()
    scores[:, 1:][~known[links.antecedents]] = -torch.inf
    best = scores.argmax(dim=1).tolist()
    cluster_of: dict[int, int] = {}
    made: list[list[int]] = []
    for place in np.flatnonzero(stays).tolist():
        if best[place] == 0:
            continue
        before = int(links.antecedents[place, best[place] - 1])
        if before not in cluster_of:
            cluster_of[before] = len(made)
            made.append([before])
        cluster_of[place] = cluster_of[before]
        made[cluster_of[place]].append(place)
    if singletons:
        alone = np.flatnonzero(stays & (links.mention.numpy() > 0)).tolist()
        made += [[place] for place in alone if place not in cluster_of]
    return sorted([(int(first[one]), int(last[one])) for one in cluster] for cluster in made)


def _uncrossed(first: np.ndarray, last: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Which spans stay if, from the best to the worst, those that cross one before them go."""
    stays = np.zeros(len(first), dtype=bool)
    for place in np.argsort(-score, kind="stable"):
        a, b = first[place], last[place]
        crossed = ((first < a) & (a <= last) & (last < b)) | (
            (a < first) & (first <= b) & (b < last)
        )
        stays[place] = not (crossed & stays).any()
    return stays


def describe(words: Words, clusters: Sequence[Sequence[Span]]) -> list[list[dict[str, Any]]]:
    """Mentions as text[start:end], and as first and last word."""
    made = []
    for cluster in clusters:
        own = []
        for first, last in cluster:
            start, end = int(words.offsets[first, 0]), int(words.offsets[last, 1])
            text = words.text[start:end]
            own.append({"text": text, "start": start, "end": end, "words": [first, last]})
        made.append(own)
    return made


def _numbered(genres: Sequence[str]) -> dict[str, int]:
    """0 is left for genres that training did not have."""
    return {name: place for place, name in enumerate(genres, start=1)}
