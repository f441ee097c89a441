"""A recipe is one run's whole configuration: plain values in typed, frozen dataclasses."""

import dataclasses
import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from longspan.data.text import Source


@dataclass(frozen=True)
class Phase:
    """A stretch of training.

    Args:
        steps: updates of the weights.
        length, batch: tokens per row, and rows per update, over all processes.
        learning_rate: the highest of the phase.
        warmup: steps over which it rises to that.
        windows: tokens to the left that each layer sees, for layers with windows; None = as the
            model has it.
    """

    steps: int
    length: int
    batch: int
    learning_rate: float
    warmup: int = 0
    windows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Optimizer:
    """How weights are updated.

    Args:
        kind: "adamw", or "muon": torch's Muon for the matrices inside layers, AdamW for the rest.
        muon_scale: Muon's learning rate, as a multiple of the phase's.
        head_scale: the learning rate of what is new on top of an encoder, as such a multiple.
        clip: the largest norm of the gradient; 0 = any.
        schedule: what follows warm-up; "rsqrt" falls with the root of the steps done.
        over: whether "cosine", "linear" and "polynomial" run their course within each phase, or
            over all.
        final: the fraction of the learning rate that they reach once all steps are done.
        power: of the part that is left to go, for "polynomial".
    """

    kind: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    muon_scale: float = 1.0
    head_scale: float = 1.0
    clip: float = 0.25
    schedule: Literal["constant", "cosine", "linear", "polynomial", "rsqrt"] = "constant"
    over: Literal["phase", "run"] = "phase"
    final: float = 0.0
    power: float = 3.0


@dataclass(frozen=True)
class Evaluation:
    """How bits per character are measured.

    Args:
        kind: "sliding": windows of `length` that overlap, each scoring only its last `stride`
            tokens. "streamed": segments of `length` one after the other, with state.
        batch: windows, or streams, at a time.
        attention: options of the attention layers to replace for evaluation, e.g. a longer memory.
        every: steps between evaluations while training; 0 = only at the end.
        limit: tokens to score while training; 0 = all.
    """

    kind: Literal["sliding", "streamed"] = "sliding"
    length: int = 2048
    stride: int = 1024
    batch: int = 8
    attention: dict[str, Any] = field(default_factory=dict)
    every: int = 1000
    limit: int = 500_000


class Plan:
    """What the loop reads of a recipe, whatever its task; `Recipe` explains the names."""

    name: str
    phases: tuple[Phase, ...]
    optimizer: Optimizer
    evaluation: Any  # with `every` and `limit`, as in `Evaluation`
    precision: Literal["no", "bf16"]
    accumulate: int
    checkpointing: bool
    compile: Literal["no", "model", "layers", "auto"]
    minutes: float
    log_every: int
    save_every: int
    sample_every: int
    seed: int

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def at(self, step: float) -> tuple[int, float]:
        """The number of the phase that a step belongs to, and the step within it."""
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                return number, step
            step -= phase.steps
        raise ValueError(f"the recipe has {self.steps} steps")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]

    def differing(self, known: dict[str, Any]) -> list[str]:
        """What is set otherwise than in a recipe that was written down; where that one is older
        than a setting, the setting was what it is by default."""
        theirs, ours = from_dict(known, type(self)).to_dict(), self.to_dict()
        return [name for name in ours if ours[name] != theirs[name]]


@dataclass(frozen=True)
class Recipe(Plan):
    """One run of a language model.

    Args:
        name: of the recipe.
        model: settings of `LongspanDecoderConfig`.
        data: where the text comes from.
        phases: carried out one after the other.
        precision: "bf16" computes in bfloat16 where that is safe and keeps weights in float32.
        accumulate: parts into which each process cuts its share of a batch.
        checkpointing: compute activations again in the backward pass rather than keep them.
        compile: through torch.compile: the "model" as a whole, or its "layers", each kind of them
            once; the latter is ready sooner, above all where memories grow. "no" = neither. "auto":
            the layers, on a GPU and in a run that is long enough to gain by it.
        minutes: of training; 0 = as many steps as the phases say. With it, steps are shares of
            the time: phases, warm-up, and what is due every so many steps. Steps then depend on
            the machine's speed, so that a run is not repeated exactly.
        log_every, save_every, sample_every: steps; 0 = never (samples), only at the end (saving).
            `log_every` counts the steps done, with `minutes` too.
        seed: of weights, data order and dropout.
    """

    name: str
    model: dict[str, Any]
    data: Source
    phases: tuple[Phase, ...]
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    precision: Literal["no", "bf16"] = "bf16"
    accumulate: int = 1
    checkpointing: bool = False
    compile: Literal["no", "model", "layers", "auto"] = "no"
    minutes: float = 0.0
    log_every: int = 10
    save_every: int = 1000
    sample_every: int = 1000
    seed: int = 0


_Kind = TypeVar("_Kind", bound=Plan)


def from_dict(values: Mapping[str, Any], kind: type[_Kind] = Recipe) -> _Kind:
    """A recipe from plain values, or an error that names what does not fit."""
    return fit(values, kind, "")


def parse(settings: Sequence[str]) -> dict[str, Any]:
    """["key=value", ...] as a mapping; values are JSON, and what is not is text."""
    found = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"{setting!r}: expected key=value, e.g. phases.0.steps=100")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    return found


_OPEN = (
    *(["model"], ["evaluation", "attention"], ["data", "columns"]),
    *(["attention"], ["model", "new", "config"], ["model", "new", "kinds"]),
)


def change(recipe: _Kind, settings: Mapping[str, Any]) -> _Kind:
    """A recipe with some values replaced, e.g. {"phases.0.steps": 10, "model.hidden_size": 64}."""
    values = _loose(recipe.to_dict())
    if "epochs" in settings and "updates" in values:
        values["updates"] = 0  # of two ways to say how long, the one that is asked for
    for key, value in settings.items():
        *path, last = key.split(".")
        inside: Any = values
        meant = None if path or last in values else find_setting(recipe, last)
        if meant is not None:
            raise ValueError(f"{key} is unknown; did you mean {meant[0]}?")
        if path == ["attention"] and isinstance(values.get("attention"), str):
            values["attention"] = {"kind": values["attention"]}  # which now gets an option
        for depth, name in enumerate(path):
            inside = inside[_place(inside, name, ".".join(path[: depth + 1]))]
        # Such settings are open: what is not given has a default.
        is_open = path in _OPEN or path[:2] == ["model", "attention"]
        inside[last if is_open and isinstance(inside, dict) else _place(inside, last, key)] = value
    return from_dict(values, type(recipe))


def _loose(inside: Any) -> Any:
    """The same with lists in place of tuples, whose parts can be set."""
    if isinstance(inside, Mapping):
        return {key: _loose(value) for key, value in inside.items()}
    return [_loose(one) for one in inside] if isinstance(inside, list | tuple) else inside


def leaves(inside: Any) -> Iterator[tuple[str, Any]]:
    """Every key that `change` takes of a recipe's values, with what stands there."""
    each = inside if isinstance(inside, Mapping) else dict(enumerate(inside))
    for key, value in each.items():
        if value and isinstance(value, Mapping | list | tuple):
            yield from ((f"{key}.{rest}", below) for rest, below in leaves(value))
        else:
            yield str(key), value


# What others call it, where a recipe has no setting of that name.
_ALSO = {"lr": "learning_rate", "steps": "updates"}
_FILLING = {"max", "num", "size", "train"}  # as in max_length, batch_size, num_train_epochs


def find_setting(recipe: Plan, name: str) -> tuple[str, Any] | None:
    """The key that a name is probably meant for, with its value: "model.window" for "window";
    None if there is none like it."""
    values = dict(_below(recipe.to_dict()))
    keys: dict[str, str] = {}  # by their last part: the uppermost, or of the first phase or layer
    for key in sorted(values, key=lambda key: "." in key):
        keys.setdefault(key.rpartition(".")[2], key)
    core = "_".join(word for word in name.split("_") if word not in _FILLING)
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.8)
    for own in (name, core, _ALSO.get(name), _ALSO.get(core), *near):
        key = own if own in values else keys.get(own or "")
        if key is not None:
            return key, values[key]
    return None


def _below(inside: Any) -> Iterator[tuple[str, Any]]:
    """Every key, those of parts included, with what stands there."""
    each = inside if isinstance(inside, Mapping) else dict(enumerate(inside))
    for key, value in each.items():
        yield str(key), value
        if isinstance(value, Mapping | list | tuple):
            yield from ((f"{key}.{rest}", below) for rest, below in _below(value))


def _place(inside: Any, name: str, key: str) -> Any:
    if isinstance(inside, Mapping):
        if name not in inside:
            raise ValueError(unknown(key, name, inside))
        return name
    if isinstance(inside, list | tuple):
        if not name.isdigit() or int(name) >= len(inside):
            above, _, last = key.rpartition(".")
            hint = "" if name.isdigit() else f", e.g. {above}.0.{last}"
            raise ValueError(f"{key}: there are {len(inside)}, numbered from 0{hint}")
        return int(name)
    raise ValueError(f"{key}: {inside!r} has no parts")


def unknown(key: str, name: str, known: Any) -> str:
    """What to say about a name that is not among those known."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
    return f"{key} is unknown; {hint}"


def fit(value: Any, kind: Any, where: str) -> Any:
    """`value` as the type `kind`, or an error that says where it does not fit."""
    origin, options = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _fit_dataclass(value, kind, where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return fit(value, next(o for o in options if o is not type(None)), where)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{where}={value!r}: choose from {', '.join(map(str, options))}")
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{where}={value!r}: expected a list")
        if options[-1] is not Ellipsis and len(value) != len(options):
            raise ValueError(f"{where}={value!r}: expected {len(options)} values")
        kinds = [options[0]] * len(value) if options[-1] is Ellipsis else options
        return tuple(
            fit(v, k, f"{where}.{i}") for i, (v, k) in enumerate(zip(value, kinds, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}={value!r}: expected settings by name")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{where}={value!r}: expected {kind.__name__}")
    return value


def _fit_dataclass(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected {kind.__name__}'s settings, got {value!r}")
    hints = get_type_hints(kind)
    for name in value:
        if name not in hints:
            raise ValueError(unknown(f"{where}.{name}".lstrip("."), name, hints))
    fitted = {n: fit(v, hints[n], f"{where}.{n}".lstrip(".")) for n, v in value.items()}
    try:
        return kind(**fitted)
    except TypeError as error:
        raise ValueError(f"{where or 'the recipe'}: {error}") from None
