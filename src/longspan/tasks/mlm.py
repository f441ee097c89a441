"""Masked language modelling: hidden tokens of whole documents are found from what is around them.

Documents are packed into rows of the model's length, each seeing itself only, and one that reaches
beyond its row goes on in the next. Bits per token are the mean over hidden tokens of minus the
logarithm, to base 2, of the probability that the right one is given. Bits per character are that
times the tokens per character of the documents scored, special tokens not counted.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from longspan.data.examples import Skips, Splits, read_examples
from longspan.data.rows import Hiding, PackedRow, Rows, ShuffledRows, hide
from longspan.data.tables import Row
from longspan.models import LongspanForMaskedLM
from longspan.tasks.base import DocumentReader, ExampleTask, check_recipe
from longspan.tasks.documents import (
    collate,
    pieces,
    reach,
    token_ids,
    tokenize,
)
from longspan.tasks.start import build_model, has_head, load_tokenizer
from longspan.train.finetuning import Finetuning, planned
from longspan.train.task import Goal, Loss

MEASURES = ("bits_per_character", "bits_per_token")
_IGNORED = -100
_BEST = 5  # words to name for a mask
_FIXED = 0  # seed of what is hidden when measuring: the same in every run


class Document(NamedTuple):
    ids: np.ndarray  # without special tokens
    characters: int


class Filler(DocumentReader):
    """Texts with masks to the words that may stand there: what prediction needs, and training
    builds on."""

    def __init__(self, recipe: Finetuning, tokenizer: Any) -> None:
        if tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token: nothing can be hidden")
        super().__init__(recipe, tokenizer)

    @torch.no_grad()
    def predict(self, model: Any, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """For each mask of a row's text its characters, and the likeliest words for it."""
        column = self.recipe.data.columns.get("text", "text")
        return [self._fill(model, row.text(column), row.where) for row in rows]

    def _fill(self, model: Any, text: str, where: str) -> dict[str, Any]:
        tokens = tokenize(self.tokenizer, [text])[0]
        masks = np.flatnonzero(tokens.ids == self.tokenizer.mask_token_id)
        if not len(masks):
            return {"skipped": f"the text has no {self.tokenizer.mask_token}"}
        if len(tokens.ids) > self.room and self.recipe.too_long == "refuse":
            raise ValueError(
                f"{where}: {len(tokens.ids):,} tokens, the model reads {self.room:,}; "
                'with --too-long split (in Python too_long="split") it reads them in pieces'
            )
        length, policy = self.recipe.model.length, self.recipe.too_long
        # Each mask is looked at where it stands farthest from the edges of a piece.
        cuts = pieces(tokens.ids, length, self.template, policy, self.room // 2)
        batch, begins = collate(cuts, packed=True, pad_id=self.tokenizer.pad_token_id)
        places, kept = [], []
        for piece, begin in zip(cuts, begins, strict=True):
            own = masks[(masks >= piece.owned[0]) & (masks < piece.owned[1])]
            kept += own.tolist()
            places += (own + begin + piece.begin - piece.span[0]).tolist()
        given = {name: tensor.to(model.device) for name, tensor in batch.items()}
        keep = torch.tensor(places, device=model.device, dtype=torch.long)
        chances = model(**given, logits_to_keep=keep).logits[0].float().softmax(dim=-1)
        top = chances.topk(min(_BEST, chances.shape[1]), dim=-1)
        found = []
        for mask, values, words in zip(
            kept, top.values.tolist(), top.indices.tolist(), strict=True
        ):
            start, end = tokens.offsets[mask].tolist()
            named = [self.tokenizer.decode([word]) for word in words]
            likely = [{"word": w, "score": v} for w, v in zip(named, values, strict=True)]
            found.append({"start": start, "end": end, "words": likely})
        unread = len(masks) - len(kept)  # if only the beginning is read
        if unread:
            return {"masks": found, "unread": unread}
        return {"masks": found} | ({"pieces": len(cuts)} if len(cuts) > 1 else {})


class MaskedLM(Filler, ExampleTask):
    """The task of a recipe: its documents in rows, its model, and bits per character.

    Everything that can be wrong with a recipe or its documents is found here, before training.
    Documents that another task has read, with the same vocabulary, need not be read again.
    """

    varies = False

    def __init__(self, recipe: Finetuning, documents: Splits[Document] | None = None) -> None:
        source = check_recipe(recipe, MEASURES)
        super().__init__(recipe, load_tokenizer(source))
        if recipe.model.freeze != "all-but-head" and not has_head(source, LongspanForMaskedLM):
            raise ValueError(
                f"{source} has no head that scores words: `longspan train mlm-head` with the same "
                "--model and --data makes one; its run is then the --model"
            )
        self.goal = Goal(recipe.measure, recipe.measure.replace("_", " "), lower_is_better=True)
        self.skips = Skips()
        if documents is None:
            documents = read_examples(
                recipe.data, self._understand, self.skips, encode=self._encode
            )
        self.documents = documents
        self._settle(recipe)

    def _understand(self, row: Row) -> Iterator[str]:
        text = row.text(self.recipe.data.columns.get("text", "text"))
        if text.strip():
            yield text
        else:
            self.skips.add("the text is empty", row.where)

    def _encode(self, texts: list[str]) -> Iterator[Document]:
        for text, ids in zip(texts, token_ids(self.tokenizer, texts), strict=True):
            if len(ids):
                yield Document(ids, len(text))
            else:
                self.skips.add("the text has no tokens", repr(text[:20]))

    def _settle(self, recipe: Finetuning) -> None:
        Filler.__init__(self, recipe, self.tokenizer)
        self.hiding = _hiding(recipe, self.tokenizer)
        for name, own in self.documents._asdict().items():
            if not own:
                raise ValueError(f"the {name} documents have no tokens")
        lengths = [len(one.ids) for own in self.documents for one in own]
        self.reach = reach(lengths, self.room)
        self.reach.check(recipe.too_long)
        self._rows = {name: self._pack(own) for name, own in self.documents._asdict().items()}
        self.recipe = planned(recipe, self._rows["train"].count)
        self._order = ShuffledRows(self._rows["train"], recipe.batch, recipe.seed)
        self._hidden: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def _pack(self, documents: list[Document]) -> Rows:
        most = self.room if self.recipe.too_long == "head" else None
        return Rows(
            (one.ids[:most] for one in documents),
            self.recipe.model.length,
            before=self.template.before,
            after=self.template.after,
            padding=self.tokenizer.pad_token_id,
        )

    def notes(self) -> list[str]:
        """What a user should know before training begins."""
        sizes = [
            f"{len(own):,} {name} ({sum(len(one.ids) for one in own):,} tokens)"
            for name, own in self.documents._asdict().items()
        ]
        rows = self._rows["train"]
        share = rows.severed / rows.documents
        found = [
            f"documents: {', '.join(sizes)}",
            f"{rows.count:,} rows of {rows.length:,} tokens to train on; {rows.severed:,} of "
            f"{rows.documents:,} documents ({share:.1%}) reach beyond a row and go on in the next",
            *self.skips.lines(),
        ]
        cut = self.reach.too_long and self.recipe.too_long == "head"
        return [*found, *([self.reach.share("head")] if cut else [])]

    def build(self) -> PreTrainedModel:
        start = self.recipe.model
        model = build_model(start, LongspanForMaskedLM, self.tokenizer, keep_head=True)
        assert start.source is not None
        if not has_head(start.source, LongspanForMaskedLM):
            rows = self._rows["train"]
            _begin_head(model.lm_head, rows.ids[rows.ordinary])
        if not self._trains_global:
            for name, parameter in model.named_parameters():
                if ".qkv_global." in name:
                    parameter.requires_grad_(False)
        return model

    @property
    def _trains_global(self) -> bool:
        """Whether there are global tokens, from which alone their projections learn."""
        return self.recipe.model.global_tokens not in (None, "none")

    def export(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """What no global token has trained is a copy of the local projections, as they are now."""
        if self._trains_global or self.recipe.model.freeze != "nothing":
            return weights
        return {
            name: weights[name.replace(".qkv_global.", ".qkv.")].clone()
            if ".qkv_global." in name
            else tensor
            for name, tensor in weights.items()
        }

    def batch(self, number: int, step: int, rows: range) -> tuple[dict[str, Tensor], bool]:
        packed, made = self._rows["train"], []
        for row, random in self._order.take(step, rows):
            ids = packed.ids[row.source]
            made.append((row, *hide(ids, packed.ordinary[row.source], self.hiding, random), ids))
        # Always as many places, so that nothing is compiled twice; what is too many is ignored.
        most = len(rows) * self.hiding.most(packed.room)
        return self._collate(made, most), True

    def _collate(
        self, made: list[tuple[PackedRow, np.ndarray, np.ndarray, np.ndarray]], most: int = 0
    ) -> dict[str, Tensor]:
        """Rows one behind the other: (row, what is shown, places asked for, what is right)."""
        length = self.recipe.model.length
        bounds = [row.bounds[:-1] + place * length for place, (row, *_) in enumerate(made)]
        places = np.concatenate([asked + n * length for n, (_, _, asked, _) in enumerate(made)])
        right = np.concatenate([ids[asked] for _, _, asked, ids in made])
        spare = (0, max(0, most - len(places)))
        return {
            "input_ids": torch.from_numpy(np.concatenate([shown for _, shown, *_ in made]))[None],
            "cu_seqlens": torch.from_numpy(
                np.concatenate([*bounds, [len(made) * length]]).astype(np.int32)
            ),
            "places": torch.from_numpy(np.pad(places, spare)),
            "targets": torch.from_numpy(
                np.pad(right, spare, constant_values=_IGNORED).astype(np.int64)
            ),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor], state: Any) -> Loss:
        nats, count = self._nats(model, batch)
        total = nats / count.clamp(min=1)
        return Loss(total, total.detach())

    def _nats(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum over all hidden tokens, and how many there are."""
        targets = batch["targets"]
        logits = model(
            batch["input_ids"], cu_seqlens=batch["cu_seqlens"], logits_to_keep=batch["places"]
        ).logits[0]
        nats = cross_entropy(logits.float(), targets, ignore_index=_IGNORED, reduction="sum")
        return nats, (targets != _IGNORED).sum()

    @torch.no_grad()
    def evaluate(self, model: PreTrainedModel, split: str, limit: int = 0) -> dict[str, float]:
        """Bits of hidden tokens, the same ones in every evaluation, however long the rows are."""
        model.eval()
        rows = self._rows[split]
        if split not in self._hidden:
            random = np.random.default_rng(_FIXED)
            shown, asked = hide(rows.ids, rows.ordinary, self.hiding, random)
            is_asked = np.zeros(len(shown), dtype=bool)
            is_asked[asked] = True
            self._hidden[split] = shown, is_asked
        shown, is_asked = self._hidden[split]
        total = torch.zeros(2, dtype=torch.float64, device=model.device)
        last = min(rows.count, limit or rows.count)
        size = self.recipe.evaluation.batch
        for first in range(0, last, size):
            made = []
            for row in (rows.cut(index) for index in range(first, min(first + size, last))):
                places = np.flatnonzero(is_asked[row.source])
                made.append((row, shown[row.source], places, rows.ids[row.source]))
            batch = {name: own.to(model.device) for name, own in self._collate(made).items()}
            total += torch.stack(self._nats(model, batch)).double()
        nats, count = total.tolist()
        loss = nats / max(1.0, count)
        bits = loss / math.log(2)
        own = getattr(self.documents, split)
        ratio = sum(len(one.ids) for one in own) / sum(one.characters for one in own)
        return {"bits_per_character": bits * ratio, "bits_per_token": bits, "loss": loss}

    def sample(self, model: PreTrainedModel) -> str:
        """What is put for a word in the middle of a validation document's beginning."""
        model.eval()
        ids = self.documents.valid[0].ids[: min(40, self.room)].copy()
        place = len(ids) // 2
        right, ids[place] = ids[place], self.tokenizer.mask_token_id
        text = self.tokenizer.decode(ids)
        found = self._fill(model, text, "the sample")["masks"][0]["words"]
        words = ", ".join(f"{one['word'].strip()} {one['score']:.2f}" for one in found)
        return f"{text} ... for {self.tokenizer.decode([right]).strip()}: {words}"


@torch.no_grad()
def _begin_head(head: Any, ids: np.ndarray) -> None:
    """A new head begins with how common words are. What it makes of the context begins small beside
    that: embeddings that no head has shaped are long, and scores would be large and wrong."""
    counts = torch.from_numpy(np.bincount(ids, minlength=len(head.decoder.bias))) + 1.0
    head.decoder.bias.copy_((counts / counts.sum()).log())
    head.norm.weight.fill_(1.0 / head.decoder.weight.norm(dim=1).mean())


def _hiding(recipe: Finetuning, tokenizer: Any) -> Hiding:
    masking = recipe.masking
    if not 0 < masking.share <= 1:
        raise ValueError(f"masking.share={masking.share} must be above 0 and at most 1")
    if min(masking.masked, masking.random) < 0 or masking.masked + masking.random > 1:
        raise ValueError(
            f"masking.masked={masking.masked} and masking.random={masking.random} are shares, "
            "together at most 1"
        )
    if recipe.overlap or not recipe.packed:
        raise ValueError("mlm always packs its rows, without overlap: leave both settings out")
    special = set(tokenizer.all_special_ids)
    words = np.array([id for id in range(len(tokenizer)) if id not in special])
    return Hiding(masking.share, masking.masked, masking.random, tokenizer.mask_token_id, words)
