"""The recipe of a task on examples: from which checkpoint, on which data, for how long."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from longspan.data.examples import Examples
from longspan.train.recipe import Optimizer, Phase, Plan, unknown

TooLong = Literal["refuse", "split", "head"]


def _columns(*names: str, **others: str) -> dict[str, str]:
    return {name: name for name in names} | others | {"id": "id"}


# What each task calls the values of a row, and the column that each is in by default.
COLUMNS = {
    "classify": _columns("text", "label"),
    "spans": _columns("text", "question", "answers", "qas"),
    "choice": _columns("text", "question", "choices", "answers"),
    "multihop": _columns("text", "question", "answers", "evidence"),
    "coref": _columns("text", "sentences", "speakers", "genre", "clusters"),
    "mlm": _columns("text"),
    "summarize": _columns("text", "question", answers="summary"),
}


@dataclass(frozen=True)
class New:
    """A model that starts from nothing, where there is no checkpoint.

    Args:
        vocabulary: "bytes" of the text, or the symbols of "listops".
        config: settings of `LongspanConfig`; attention, vocabulary and length come from elsewhere.
        kinds: what is meant by a kind of attention, or by a name of your own, beside the defaults
            of its options: {"linformer": {"rank": 256}, "dense": {"kind": "window", ...}}.
    """

    vocabulary: Literal["bytes", "listops"]
    config: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, Any] = field(default_factory=dict)

    def setting(self, attention: Any) -> Any:
        """What `LongspanConfig.attention` takes, for a name, a setting, or one of either per
        layer."""
        if isinstance(attention, list | tuple):
            return [self.setting(one) for one in attention]
        given = {"kind": attention} if isinstance(attention, str) else dict(attention or {})
        kind = given.pop("kind", "window")
        return {"kind": kind, **self.kinds.get(kind, {}), **given}


@dataclass(frozen=True)
class Start:
    """The model that training starts from.

    Args:
        source: a folder, or a name on the hub: one of ours, or what `longspan.convert` takes.
        length: tokens that the model reads at once, special ones included.
        window: of a checkpoint that is converted.
        global_tokens: as in `LongspanConfig.global_preset`; None leaves it to the task.
        pooling: what a document's scores come from, as in `LongspanConfig.classifier_pooling`;
            None as the checkpoint has it.
        positions: what learned positions begin as that the checkpoint lacks: "copied" from those
            it has, or "random", to see what copying is worth.
        head: what is on top of the encoder: "new", or "kept" as the source has it, which was then
            trained for the same task; one for masked tokens is kept in any case.
        freeze: which weights stay as they are: "nothing"; "all-but-head": the encoder; or
            "all-but-positions": everything but the positions that the checkpoint lacks.
        new: a model to begin with in place of a source, for classification.
    """

    source: str | None = None
    length: int = 4096
    window: int = 512
    global_tokens: Literal["none", "first", "question"] | None = None
    pooling: Literal["first", "mean"] | None = None
    positions: Literal["copied", "random"] = "copied"
    head: Literal["new", "kept"] = "new"
    freeze: Literal["nothing", "all-but-head", "all-but-positions"] = "nothing"
    new: New | None = None


@dataclass(frozen=True)
class Answers:
    """How answers are found in a text, by tasks that do.

    Args:
        longest: of an answer, in tokens.
        best: candidates to keep.
        threshold: by how much the best candidate must beat "there is no answer"; None finds the
            best on the validation examples.
        style: of the measures: "squad" or "triviaqa", which normalise differently; the latter
            also takes the best of all documents given for one question.
        blanks: questions without an answer that are trained on, for each that has one, drawn at
            random; None takes all. Where most have none, a model else learns little but that.
    """

    longest: int = 30
    best: int = 20
    threshold: float | None = None
    style: Literal["squad", "triviaqa"] = "squad"
    blanks: float | None = None


@dataclass(frozen=True)
class Mentions:
    """How mentions are found and linked, by the task that does.

    Args:
        longest: of a mention, in words.
        keep: spans that are kept for linking, for each word of a document.
        antecedents: earlier spans that each span is compared with in full, the best by a coarser
            comparison with all of them.
        size: of the head's layers.
        dropout: in the head.
        singletons: whether mentions that nothing else refers to are to be found; None if the
            training examples have any.
    """

    longest: int = 30
    keep: float = 0.4
    antecedents: int = 50
    size: int = 256
    dropout: float = 0.3
    singletons: bool | None = None


@dataclass(frozen=True)
class Hops:
    """How an answer is put together from several paragraphs.

    Args:
        stages: 1 reads all paragraphs. 2 trains a first model to choose some of them, in the
            folder "chooser" of the run, and a second one that reads no others.
        keep: paragraphs to choose, at most.
        above: the score that a paragraph must have to be chosen; the two best are in any case.
        weights: of the losses of answer, kind of answer, paragraphs and sentences. Longformer's
            are unpublished.
    """

    stages: Literal[1, 2] = 1
    keep: int = 5
    above: float = -3.0
    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden, by tasks that do.

    Args:
        share: of the tokens that a model has to find.
        masked, random: of those, what part is replaced by the mask, and what by any word; the
            rest is shown as it is.
    """

    share: float = 0.15
    masked: float = 0.8
    random: float = 0.1


@dataclass(frozen=True)
class Writing:
    """How texts are learned and written, by the task that does.

    Args:
        longest: of a text, in tokens, special ones included; the decoder must have positions for
            as many.
        smoothing: how much of the loss asks for all words alike.
        beams: that are searched; 1 takes the likeliest word every time.
        length_penalty: above 0 favours long texts, below 0 short ones.
        no_repeat: so many words in a row are not written twice; 0 allows it.
    """

    longest: int = 256
    smoothing: float = 0.1
    beams: int = 4
    length_penalty: float = 1.0
    no_repeat: int = 0


@dataclass(frozen=True)
class Checks:
    """When and how validation examples are scored.

    Args:
        every: steps; None = once in each pass over the examples, 0 = only at the end.
        batch: examples at a time.
        limit: examples to score while training; 0 = all.
    """

    every: int | None = None
    batch: int = 8
    limit: int = 0


@dataclass(frozen=True)
class Finetuning(Plan):
    """One run on examples.

    Args:
        task: "classify": labels of documents. "spans": answers within documents. "choice": the
            best of given answers. "multihop": answers with their evidence, over several paragraphs.
            "coref": who and what a document speaks of, and where. "mlm": tokens hidden in
            documents. "summarize": texts about documents.
        attention: of the layers of a new model: a kind ("performer"), its setting ({"kind":
            "performer", "features": 64}), or one per layer.
        epochs: passes over the training examples.
        updates: of the weights; 0 = as many as the epochs take. A setting of `epochs` alone
            makes it 0.
        warmup: the share of the steps, or from 1 on the steps, over which the learning rate rises.
        too_long: what to do with a document beyond `model.length`. "refuse": stop with an error.
            "split": read it in pieces; labels and choices take the mean of their scores, answers
            within are chosen among all of them, and mentions are linked across them. "head": read
            its beginning only, and say of how many.
        overlap: of neighbouring pieces, in tokens.
        packed: documents of a batch in one row, without padding; not worth it where many tokens
            of each are global.
        alike: so many batches are drawn at a time and made of documents of like length, which
            spares padding where they are not packed; 0 = each batch by itself, at random.
        measure: which decides what checkpoint is the best.
        seed: of the head's weights, data order and dropout.
        phases: follow from all this once the examples are counted, see `planned`.

    The rest is as in `Recipe`.
    """

    name: str
    task: Literal["classify", "spans", "choice", "multihop", "coref", "mlm", "summarize"]
    measure: str
    model: Start = Start()
    attention: Any = None
    data: Examples = field(default_factory=Examples)
    answers: Answers = Answers()
    mentions: Mentions = Mentions()
    hops: Hops = Hops()
    masking: Masking = Masking()
    writing: Writing = Writing()
    epochs: float = 3.0
    updates: int = 0
    batch: int = 32
    learning_rate: float = 3e-5
    warmup: float = 0.1
    too_long: TooLong = "refuse"
    overlap: int = 0
    packed: bool = True
    alike: int = 0
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(clip=1.0, schedule="linear"))
    evaluation: Checks = Checks()
    precision: Literal["no", "bf16"] = "bf16"
    accumulate: int = 1
    checkpointing: bool = False
    compile: Literal["no", "model", "layers", "auto"] = "no"
    minutes: float = 0.0
    log_every: int = 10
    save_every: int = 0
    sample_every: int = 0
    seed: int = 0
    phases: tuple[Phase, ...] = ()


def check_columns(task: str, columns: Mapping[str, str]) -> None:
    """Raise for a column of something that the task does not read."""
    for name in columns:
        if name not in COLUMNS[task]:
            raise ValueError(unknown(f"data.columns.{name}", name, COLUMNS[task]))


def check(recipe: Finetuning) -> None:
    """Columns that the task has not, and numbers that no run can do with."""
    check_columns(recipe.task, recipe.data.columns)
    for name in ("batch", "accumulate", "log_every"):
        if getattr(recipe, name) < 1:
            raise ValueError(f"{name}={getattr(recipe, name)} must be at least 1")
    for name in ("epochs", "learning_rate"):
        value = getattr(recipe, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} must be above 0")
    for name in ("updates", "warmup", "overlap", "alike", "seed", "minutes"):
        if getattr(recipe, name) < 0:
            raise ValueError(f"{name}={getattr(recipe, name)} must not be negative")
    for name, limit in (("data", recipe.data.limit), ("evaluation", recipe.evaluation.limit)):
        if limit < 0:
            raise ValueError(f"{name}.limit={limit} must not be negative; 0 = all")
    for name in ("longest", "best"):
        if getattr(recipe.answers, name) < 1:
            raise ValueError(f"answers.{name}={getattr(recipe.answers, name)} must be at least 1")
    blanks = recipe.answers.blanks
    if blanks is not None and not 0.0 <= blanks < math.inf:
        raise ValueError(f"answers.blanks={blanks} must be a number that is not negative, or none")
    for name in ("longest", "antecedents", "size", "keep"):
        if not getattr(recipe.mentions, name) > 0:
            raise ValueError(f"mentions.{name}={getattr(recipe.mentions, name)} must be above 0")
    if recipe.hops.keep < 2:
        raise ValueError(f"hops.keep={recipe.hops.keep}: evidence comes from two paragraphs")
    for name in ("longest", "beams"):
        if getattr(recipe.writing, name) < 1:
            raise ValueError(f"writing.{name}={getattr(recipe.writing, name)} must be at least 1")
    if not 0.0 <= recipe.writing.smoothing < 1.0:
        raise ValueError(f"writing.smoothing={recipe.writing.smoothing} must be in [0, 1)")
    if recipe.evaluation.batch < 1:
        raise ValueError(f"evaluation.batch={recipe.evaluation.batch} must be at least 1")
    if recipe.model.new is not None and recipe.model.source is not None:
        raise ValueError(
            f"model.source={recipe.model.source}: {recipe.name} starts from nothing; "
            "`longspan train classify` starts from a checkpoint"
        )
    if recipe.attention is not None and recipe.model.new is None:
        raise ValueError(
            f"attention={recipe.attention!r} is for a model that starts from nothing, as those of "
            "lra-listops and lra-text; a checkpoint has its own"
        )
    if recipe.alike and recipe.task in ("mlm", "summarize"):
        raise ValueError(f"alike={recipe.alike}: {recipe.task} draws its rows by itself")
    decay = recipe.optimizer.weight_decay
    if recipe.model.freeze == "all-but-positions" and decay > 0:
        raise ValueError(
            f"optimizer.weight_decay={decay} would change the positions that are to stay as they "
            "are, since they are in one table with the new ones: set it to 0"
        )


def planned(recipe: Finetuning, examples: int) -> Finetuning:
    """The recipe with its steps: one phase over so many training examples."""
    steps = recipe.updates or max(1, math.ceil(recipe.epochs * examples / recipe.batch))
    warmup = round(recipe.warmup * steps) if recipe.warmup < 1 else min(int(recipe.warmup), steps)
    phase = Phase(steps, recipe.model.length, recipe.batch, recipe.learning_rate, warmup)
    every = recipe.evaluation.every
    if every is None:
        every = max(1, math.ceil(examples / recipe.batch))
    return replace(recipe, phases=(phase,), evaluation=replace(recipe.evaluation, every=every))
