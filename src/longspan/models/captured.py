"""A model whose calls are one launch each, for steps so short that Python is slower than a GPU."""

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from longspan import graphs
from longspan.layers.observing import Observing

Model = TypeVar("Model", bound=nn.Module)

_SIMPLE = (bool, int, float, str, type(None))
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_REMEMBERED = 256  # kinds of calls that were made once
_Where = tuple[int, torch.dtype, bool]  # address, and whether it learns


def capture(model: Model, *, most: int = 4) -> Model:
    """Record what a call of the model launches on a GPU, forward and backward, and launch it as a
    whole from then on; returns the same object.

    A call is recorded the second time that tensors of its shapes come, once for each of the `most`
    first kinds of call: shapes, options, training or not, with gradients or without, precision.
    All others run as ever, as do all calls on a CPU and those that cannot be recorded, which a
    warning tells. Outputs and gradients are the same, dropout included. Compile before, call
    optimisers and losses as usual, and mind that

    - the backward pass of a call has to come before the next call, and once;
    - where a loss comes out, gradients flow from it alone;
    - gradients of weights are written over by the next call, unless they still are a weight's
      `.grad`: clone what you keep of `torch.autograd.grad`, or beyond `zero_grad`;
    - activations stay allocated, for every kind of call;
    - gradient checkpointing is not recorded, as it looks at the state of random numbers;
    - a mask of global tokens needs `max_global_tokens`, or the model would have to look at it; a
      row that has more stops the device with an error;
    - hooks of its layers are not called, nor is any other Python of theirs;
    - whoever changes the model itself, its windows say, or loads weights with `assign=True`, calls
      `release` and `capture` again.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"capture takes a model, got {type(model).__name__}")
    if most < 1:
        raise ValueError(f"most={most} must be at least 1")
    reason = _why_not(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} {reason}")
    release(model)
    model.forward = _Captured(model, most)
    return model


def _why_not(model: nn.Module) -> str | None:
    """What a recording of this model would leave out; None if nothing."""
    if type(model).__name__ in _WRAPPERS:
        return (
            "does more in a call than a graph can: capture the model before "
            "DistributedDataParallel wraps it"
        )
    if any(hasattr(weight, "full_tensor") for weight in model.parameters()):  # a DTensor
        return "has weights that are sharded, and gathered by hooks: it cannot be captured"
    if any(isinstance(module, Observing) for module in model.modules()):
        return (
            "has layers that look at every batch to move their centroids, which a recording would "
            "leave out: it cannot be captured"
        )
    if model._compiled_call_impl is not None:
        return (
            "was compiled by its own compile(), whose calls go past what capture puts in place: "
            "capture torch.compile(model), or compile its layers"
        )
    return None


def release(model: Model) -> Model:
    """Forget the recordings of a captured model, and their memory; returns the same object."""
    own: Any = vars(model).get("forward")
    if isinstance(own, _Captured):
        del model.forward
        if own.instance:
            model.forward = own.plain
    return model


class _Captured:
    """In place of a model's `forward`."""

    def __init__(self, model: nn.Module, most: int) -> None:
        self.model, self.most = model, most
        self.instance = "forward" in vars(model)  # someone else's wrapper, to be put back
        self.plain = model.forward
        functools.update_wrapper(self, self.plain)
        self._modules: list[nn.Module] = []
        self._weights: list[Tensor] = []
        self._where: list[_Where] | None = None  # not looked at yet
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, _Recording | None] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        call = _Call.of(args, options)
        if call is None:
            return self.plain(*args, **options)
        self._look_at_weights()
        key = (
            *call.key,
            tuple(module.training for module in self._modules),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        )
        recording = self._recordings.get(key)
        if recording is None:
            if key in self._recordings or len(self._recordings) >= self.most:
                return self.plain(*args, **options)
            if key not in self._seen:
                if len(self._seen) >= _REMEMBERED:
                    self._seen.clear()
                self._seen.add(key)
                return self.plain(*args, **options)
            recording = self._recordings[key] = self._record(call)
            if recording is None:
                return self.plain(*args, **options)
        return recording(call.tensors)

    def _look_at_weights(self) -> None:
        """Forget what was recorded of weights that are elsewhere now, or learn otherwise."""
        if self._where is None or _where(self._weights) != self._where:
            self._modules = list(self.model.modules())
            self._weights = [*self.model.parameters(), *self.model.buffers()]
            self._where = _where(self._weights)
            self._recordings.clear()

    def _record(self, call: "_Call") -> "_Recording | None":
        """None if no graph can do it, if it waits for the device say."""
        # Weights under other names: their own may be part of an earlier call, which somebody still
        # holds, and are then bound to that call's stream.
        named = dict(self.model.named_parameters())
        twins: dict[str, Tensor] = {
            f"model.{name}": nn.Parameter(weight.detach(), weight.requires_grad)
            for name, weight in named.items()
        }
        learning = [
            (weight, twin)
            for weight, twin in zip(named.values(), twins.values(), strict=True)
            if weight.requires_grad and torch.is_grad_enabled()
        ]
        plain = _Plain(self.model, self.plain)

        def forward(tensors: Sequence[Tensor]) -> Any:
            args, options = call.make(tensors)
            return functional_call(plain, twins, args, options)

        with graphs.trying(call.tensors[0].device):
            before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
            try:
                _refuse_several_devices([*call.tensors, *named.values()])
                if self.model.training and getattr(self.model, "is_gradient_checkpointing", False):
                    raise graphs.RecordingError(
                        "gradient checkpointing asks for the state of random numbers, which no "
                        "graph can give"
                    )
                recording = _Recording(forward, call.tensors, learning)
            except graphs.RecordingError as reason:
                recording = None
                warnings.warn(f"a call was not captured and runs as ever: {reason}", stacklevel=5)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # who knows what state the device is in
                raise RuntimeError(
                    "recording a call of the captured model failed: begin again without "
                    "longspan.capture"
                ) from error
            # A call to be counted, say, was made only to record it.
            for buffer, value in before:
                buffer.copy_(value)
            return recording

    def __reduce__(self) -> Any:
        return _same, (self.plain,)  # a copy has other weights


def _same(forward: Any) -> Any:
    return forward


def _where(weights: Sequence[Tensor]) -> list[_Where]:
    return [(weight.data_ptr(), weight.dtype, weight.requires_grad) for weight in weights]


def _refuse_several_devices(tensors: Sequence[Tensor]) -> None:
    """Memory of a second one would be given to others while a replay still reads it."""
    devices = {str(one.device) for one in tensors}
    if len(devices) > 1:
        raise graphs.RecordingError(
            f"its inputs and weights are on {' and '.join(sorted(devices))}, a graph is on one"
        )


class _Plain(nn.Module):
    """A model with the forward that it had before."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.own = model, forward

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.own(*args, **options)


class _Call(NamedTuple):
    """The tensors of a call, its arguments with others in their place, and all else that
    distinguishes it."""

    tensors: list[Tensor]
    make: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    key: tuple[Hashable, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], options: dict[str, Any]) -> "_Call | None":
        """None for calls that are never recorded: without a GPU, or with more than tensors."""
        names, given = list(options), [*args, *options.values()]
        at = [place for place, one in enumerate(given) if isinstance(one, Tensor)]
        tensors = [given[place] for place in at]
        if not at or not all(isinstance(one, (Tensor, *_SIMPLE)) for one in given):
            return None
        if not graphs.possible(tensors):
            return None
        key: list[Hashable] = [len(args), *names]
        for one in given:
            if isinstance(one, Tensor):
                key.append((one.shape, one.dtype, one.device, one.requires_grad))
            else:
                key.append((type(one), one))

        def make(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            others = list(given)
            for place, tensor in zip(at, tensors, strict=True):
                others[place] = tensor
            options = zip(names, others[len(args) :], strict=True)
            return tuple(others[: len(args)]), dict(options)

        return cls(tensors, make, tuple(key))


class _Recording:
    """One kind of call: tensors that stay where they are, and graphs that read and fill them."""

    def __init__(
        self,
        forward: Callable[[Sequence[Tensor]], Any],
        tensors: Sequence[Tensor],
        learning: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """`learning` has weights, and beside each the tensor that `forward` has in its place."""
        self.given = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        self.weights = [weight for weight, _ in learning]
        self.calls = 0
        wanted = [*(t for t in self.given if t.requires_grad), *(twin for _, twin in learning)]
        graphs.rehearse(lambda: _gradients(_found(forward(self.given)), wanted, None))
        pool = graphs.new_pool()
        self._forward, found = graphs.record(lambda: _found(forward(self.given)), pool)
        self.leaves, self.spec, self.learned = found
        self.grown = _with_gradients(self.leaves)
        self.cotangents = [torch.zeros_like(self.leaves[at]) for at in self.learned]
        made: list[Tensor | None] = [None] * len(wanted)
        if self.learned:
            backward = functools.partial(_gradients, found, wanted, self.cotangents)
            self._backward, made = graphs.record(backward, pool)
        # Of inputs, and of weights: in memory that the next replay forward may use for itself.
        each = iter(made)
        given = [next(each) if one.requires_grad else None for one in self.given]
        self._gradients = given, list(each)
        # Nothing else remembers the graph of autograd, whose tensors the recordings keep.
        self.leaves = [one.detach() if isinstance(one, Tensor) else one for one in self.leaves]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if self.learned:
            made = iter(_Replay.apply(self, *tensors, *self.weights))
        else:
            made = iter(self.read(tensors))
        leaves = [next(made) if isinstance(one, Tensor) else one for one in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of what comes out: the next replay writes there."""
        self.calls += 1
        for weight, gradient in zip(self.weights, self._gradients[1], strict=True):
            # That of an earlier call, to be added to, lies where this one is going to write.
            grad: Any = weight.grad
            if grad is not None and gradient is not None and _same_place(grad, gradient):
                weight.grad = grad.clone()
        for own, tensor in zip(self.given, tensors, strict=True):
            own.detach().copy_(tensor)
        self._forward.replay()
        return [one.clone() for one in self.leaves if isinstance(one, Tensor)]

    def learn(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of inputs and weights, where they lie: the next replay writes there."""
        for own, cotangent in zip(self.cotangents, cotangents, strict=True):
            if cotangent is None:
                own.zero_()
            else:
                own.copy_(cotangent)
        given, learned = self._gradients
        self._backward.replay()
        kept = [None if one is None else one.clone() for one in given]
        return [*kept, *(None if one is None else one.detach() for one in learned)]


def _same_place(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


class _Found(NamedTuple):
    """What a call returned: its parts, how they belong together, and which have gradients."""

    leaves: list[Any]
    spec: TreeSpec
    learned: list[int]


def _found(made: Any) -> _Found:
    leaves, spec = tree_flatten(made)
    for one in leaves:
        if not isinstance(one, (Tensor, *_SIMPLE)):
            raise graphs.RecordingError(
                f"it returns a {type(one).__name__}, which has memory of its own"
            )
    learned = _with_gradients(leaves)
    loss = getattr(made, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        learned = [n for n in learned if leaves[n] is loss]
    return _Found(leaves, spec, learned)


def _with_gradients(leaves: list[Any]) -> list[int]:
    return [n for n, one in enumerate(leaves) if isinstance(one, Tensor) and one.requires_grad]


def _gradients(
    found: _Found, wanted: list[Tensor], cotangents: list[Tensor] | None
) -> list[Tensor | None]:
    outputs = [found.leaves[at] for at in found.learned]
    if not outputs:
        return []
    if cotangents is None:
        cotangents = [torch.zeros_like(one) for one in outputs]
    made: list[Tensor | None] = list(
        torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
    )
    known: set[int] = set()
    for number, one in enumerate(made):
        if one is not None:
            # Weights that are added up have one gradient, and each scales its own in place.
            place = one.untyped_storage().data_ptr()
            made[number] = one.clone() if place in known else one
            known.add(place)
    return made


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _Recording, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = recording.read(tensors[: len(recording.given)])
        ctx.recording, ctx.call, ctx.done = recording, recording.calls, False
        ctx.set_materialize_grads(False)
        ctx.places = [n for n, one in enumerate(recording.leaves) if isinstance(one, Tensor)]
        each = zip(ctx.places, made, strict=True)
        ctx.mark_non_differentiable(*(one for at, one in each if at not in recording.grown))
        return tuple(made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        recording: _Recording = ctx.recording
        if ctx.call != recording.calls:
            raise RuntimeError(
                "the captured model was called again before this backward pass, and has written "
                "over what it needs: call backward after each call, or longspan.release(model)"
            )
        if ctx.done:
            raise RuntimeError(
                "a second backward pass of one call of the captured model: the first has written "
                "over what it needs; add losses up before backward, or longspan.release(model)"
            )
        given = dict(zip(ctx.places, gradients, strict=True))
        wanted = [given.pop(at) for at in recording.learned]
        if any(one is not None for one in given.values()):
            raise RuntimeError(
                "gradients flow into the captured model from more than its loss, and were recorded "
                "for that alone: call it without labels, or longspan.release(model)"
            )
        ctx.done = True
        found = recording.learn(wanted)
        return None, *found
