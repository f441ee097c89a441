"""Coreference, coarse to fine: which spans of words are mentions, and which earlier ones they name
again.

A span is first scored by its first and its last word alone, so that there are as many numbers as
words and widths but no vectors. Of all spans the best are kept, some for each word; they alone get
vectors. A bilinear form compares each with all before it, some rows at a time, and the best of
those are compared in full, by a feed-forward layer that also knows distance, speakers, genre and
equal words. Everything that is kept is linear in the document's length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu, logsigmoid, pad
from transformers.utils.generic import ModelOutput

from longspan.models.config import LongspanConfig
from longspan.models.encoder import mean_tokens
from longspan.models.heads import Transform, _Head

_DISTANCES = 12  # buckets, of which each is twice as wide as the one before
_ROWS = 1024  # spans that are compared with all others at a time


class Links(NamedTuple):
    """A document's kept spans, in their order, and how well they go together.

    Column 0 of `scores` [spans, 1 + antecedents] is 0: that a span names nothing that came before,
    or is no mention at all. Places that hold no antecedent are -inf.
    """

    first: Tensor  # [spans], words
    last: Tensor
    mention: Tensor  # [spans]: scores
    antecedents: Tensor  # [spans, antecedents]: which spans
    scores: Tensor


@dataclass
class LongspanCoreferenceOutput(ModelOutput):
    """The loss where the right mentions were given, else the links of every document."""

    loss: Tensor | None = None
    links: Any = None


class LongspanForCoreference(_Head):
    """Mentions and their antecedents; no token is global unless a mask says so.

    `config.coreference` has the head's settings: "longest", "keep", "antecedents", "size" and
    "dropout" as in `train.finetuning.Mentions`, and the names of the "genres". `genre` 0 is any
    other.
    """

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.linker = Linker(config, **getattr(config, "coreference", {}))
        self.post_init()
        # Of some twenty spans that begin with a word, hardly one is a mention.
        nn.init.constant_(self.linker.opens.bias, -4.0)

    def forward(
        self,
        input_ids: Tensor,
        first: Tensor,
        last: Tensor,
        sentence: Tensor,
        speaker: Tensor,
        form: Tensor,
        words: Tensor,
        genre: Tensor,
        mentions: Tensor | None = None,
        counts: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> LongspanCoreferenceOutput:
        """Of every word of all documents, one after the other: the places of its `first` and its
        `last` token in the flattened `input_ids`, its `sentence`, `speaker` (0 = unknown) and
        `form`. Of every document its number of `words` and its `genre`; `mentions` [mentions, 3]
        are first word, last word and cluster, `counts` of them in each document."""
        encoded = self._encode(
            input_ids,
            global_attention_mask,
            None,
            cu_seqlens,
            None,
            attention_mask=attention_mask,
        )
        assert encoded.last_hidden_state is not None
        states = _centered(encoded.last_hidden_state, attention_mask, cu_seqlens).flatten(0, 1)
        sizes = words.tolist()
        right = None if mentions is None or counts is None else mentions.split(counts.tolist())
        links, losses, begin = [], [], 0
        for number, size in enumerate(sizes):
            own = slice(begin, begin + size)
            begin += size
            found = self.linker(
                states[first[own]],
                states[last[own]],
                sentence[own],
                speaker[own],
                form[own],
                genre[number],
                None if right is None else right[number],
            )
            (links if right is None else losses).append(found)
        if right is None:
            return LongspanCoreferenceOutput(links=links)
        return LongspanCoreferenceOutput(loss=torch.stack(losses).mean())


class Linker(nn.Module):
    """The head, on one document."""

    def __init__(
        self,
        config: LongspanConfig,
        longest: int = 30,
        keep: float = 0.4,
        antecedents: int = 50,
        size: int = 256,
        dropout: float = 0.3,
        genres: Sequence[str] = (),
        **rest: Any,
    ) -> None:
        super().__init__()
        self.longest, self.keep, self.antecedents = longest, keep, antecedents
        self.dropout = nn.Dropout(dropout)
        self.start, self.end = (Transform(config, size, "gelu") for _ in range(2))
        self.opens, self.closes = nn.Linear(size, 1), nn.Linear(size, 1, bias=False)
        self.spans = nn.Linear(size, size, bias=False)
        self.width = nn.Embedding(longest, 1)

        self.inside, self.weight = nn.Linear(config.hidden_size, size), nn.Linear(size, 1)
        self.widths = nn.Embedding(longest, size)
        self.join = nn.Linear(3 * size, size)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)

        self.coarse = nn.Linear(size, size, bias=False)
        self.mine, self.other = nn.Linear(size, size), nn.Linear(size, size, bias=False)
        self.both = nn.Linear(size, size, bias=False)
        self.distance = nn.Embedding(_DISTANCES, size)
        self.speaker, self.same = nn.Embedding(3, size), nn.Embedding(3, size)
        self.genre = nn.Embedding(len(genres) + 1, size)
        self.fine = nn.Linear(size, 1)

    def forward(
        self,
        firsts: Tensor,
        lasts: Tensor,
        sentence: Tensor,
        speaker: Tensor,
        form: Tensor,
        genre: Tensor,
        right: Tensor | None,
    ) -> Any:
        """States of words' first and last tokens [words, hidden] -> `Links`, or the loss."""
        start, end = self.dropout(self.start(firsts)), self.dropout(self.end(lasts))
        scores = self._candidates(start, end, sentence)
        flat = scores.flatten()
        possible = flat > -torch.inf
        count = min(math.ceil(self.keep * len(sentence)), int(possible.sum()))
        chosen = flat.detach().topk(count).indices.sort().values
        first, width = chosen // self.longest, chosen % self.longest
        last, mention = first + width, flat[chosen]
        vectors = self._vectors(start, end, self.inside(lasts), first, width)
        # Chances of being a mention, not scores: however sure two mentions are, that is no reason
        # to link them.
        chance = logsigmoid(mention)
        antecedents, known = self._best(vectors, chance)
        features = _features(first, last, speaker, form, antecedents)
        pairs = self._pairs(vectors, antecedents, genre, *features)
        paired = chance[:, None] + chance[antecedents] + pairs
        paired = pad(paired.masked_fill(~known, -torch.inf), (1, 0))
        found = Links(first, last, mention, antecedents, paired)
        return found if right is None else self._loss(found, flat, possible, chosen, right)

    def _candidates(self, start: Tensor, end: Tensor, sentence: Tensor) -> Tensor:
        """[words, widths]: scores of all spans; -inf where one leaves its sentence."""
        words, scale = len(sentence), start.shape[-1] ** -0.5
        left, right = self.spans(start).float() * scale, end.float()
        opens, closes = self.opens(start).float()[:, 0], self.closes(end).float()[:, 0]
        made = []
        for width in range(self.longest):
            stop = max(0, words - width)
            # The products are summed at once: autograd keeps views of the factors alone.
            score = (left[:stop] * right[width:]).sum(dim=-1) + opens[:stop] + closes[width:]
            inside = sentence[:stop] == sentence[width:]
            score = score + self.width.weight[width]
            score = score.masked_fill(~inside, -torch.inf)
            made.append(pad(score, (0, words - stop), value=-torch.inf))
        return torch.stack(made, dim=1)

    def _vectors(
        self, start: Tensor, end: Tensor, inside: Tensor, first: Tensor, width: Tensor
    ) -> Tensor:
        """[spans, size]: from the edges, a weighted mean of the words, and the width."""
        steps = torch.arange(self.longest, device=first.device)
        covered = steps <= width[:, None]
        place = (first[:, None] + steps).clamp(max=len(start) - 1)
        weight = self.weight(inside).float()[:, 0][place].masked_fill(~covered, -torch.inf)
        mean = torch.einsum("sw,swd->sd", weight.softmax(dim=1).to(inside.dtype), inside[place])
        edges = torch.cat([start[first], end[first + width], mean.to(start.dtype)], dim=-1)
        return self.dropout(self.norm(gelu(self.join(edges) + self.widths(width))))

    def _best(self, vectors: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
        """[spans, antecedents]: the best spans before each, and whether there are that many."""
        count = len(vectors)
        most = min(self.antecedents, count)
        places = torch.arange(count, device=vectors.device)
        chosen, known = [], []
        with torch.no_grad():
            left = self.coarse(vectors) * vectors.shape[-1] ** -0.5
            for begin in range(0, count, _ROWS):
                rows = places[begin : begin + _ROWS, None]
                scores = (left[begin : begin + _ROWS] @ vectors.T).float() + chance.detach()
                best = scores.masked_fill(places >= rows, -torch.inf).topk(most, dim=1)
                chosen.append(best.indices)
                known.append(best.values > -torch.inf)
        return torch.cat(chosen), torch.cat(known)

    def _pairs(
        self,
        vectors: Tensor,
        antecedents: Tensor,
        genre: Tensor,
        distance: Tensor,
        speaker: Tensor,
        same: Tensor,
    ) -> Tensor:
        """[spans, antecedents]: how well two go together, whatever they are by themselves."""
        others = vectors[antecedents]
        coarse = (self.coarse(vectors)[:, None] * others).float().sum(dim=-1)
        inner = self.mine(vectors)[:, None] + self.other(vectors)[antecedents]
        inner = inner + self.both(vectors[:, None] * others)
        inner = inner + self.distance(distance) + self.speaker(speaker) + self.same(same)
        inner = inner + self.genre(genre)
        fine = self.fine(self.dropout(gelu(inner))).float()[..., 0]
        return coarse * vectors.shape[-1] ** -0.5 + fine

    def _loss(
        self, found: Links, flat: Tensor, possible: Tensor, chosen: Tensor, right: Tensor
    ) -> Tensor:
        """That each kept span names any right antecedent, or none if there is none; and that each
        candidate is a mention or not. Both for each span that is kept."""
        first, last, cluster = right.unbind(dim=1)
        fits = last - first < self.longest
        labels = torch.zeros_like(flat, dtype=torch.long)
        place = (first * self.longest + last - first)[fits]
        labels[place] = cluster[fits] + 1
        own = labels[chosen]
        equal = (own[:, None] == own[found.antecedents]) & (own > 0)[:, None]
        equal = equal & (found.scores[:, 1:] > -torch.inf)
        among = torch.cat([~equal.any(dim=1, keepdim=True), equal], dim=1)
        marginal = found.scores.masked_fill(~among, -torch.inf).logsumexp(dim=1)
        links = (found.scores.logsumexp(dim=1) - marginal).sum()
        mentions = binary_cross_entropy_with_logits(
            flat[possible], (labels > 0)[possible].float(), reduction="sum"
        )
        return (links + mentions) / len(chosen)


def _centered(hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """States without what all tokens of a piece share, which tells none from another; in encoders
    that were trained to embed whole texts it is nearly all of them."""
    means = mean_tokens(hidden, attention_mask, cu_seqlens)
    if cu_seqlens is None:
        return hidden - means[:, None]
    places = torch.arange(hidden.shape[1], device=hidden.device, dtype=cu_seqlens.dtype)
    piece = torch.searchsorted(cu_seqlens, places, right=True) - 1
    return hidden - means[piece]


def _features(
    first: Tensor, last: Tensor, speaker: Tensor, form: Tensor, antecedents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[spans, antecedents] each: what is known of a pair beside its vectors.

    Distance: in words, by powers of two; 0 where one lies within the other. Speakers: 0 = one is
    unknown, 1 = the same, 2 = two. Words: 2 = the same first and last and as many, 1 = the same
    last, 0 = neither.
    """
    gap = (first[:, None] - last[antecedents]).clamp(min=0)
    distance = (gap + 1).float().log2().long().clamp(max=_DISTANCES - 1)
    spoken = speaker[first]
    mine, other = spoken[:, None], spoken[antecedents]
    speakers = torch.where((mine > 0) & (other > 0), 2 - (mine == other).long(), 0)
    begin, end, size = form[first], form[last], last - first
    ends = end[:, None] == end[antecedents]
    whole = ends & (begin[:, None] == begin[antecedents]) & (size[:, None] == size[antecedents])
    return distance, speakers, ends.long() + whole.long()
