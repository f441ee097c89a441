"""Captured models give what they gave before: on a GPU by CUDA graphs, elsewhere with stand-ins for
graphs that compute again, into the same memory, what they recorded."""

import copy
import inspect
import pickle
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.graphs import RecordingError
from longspan.models import (
    LongspanConfig,
    LongspanForMaskedLM,
    LongspanForSequenceClassification,
    captured,
)

MODULE: Any = captured  # some of it is its own


class Forward:
    def __init__(self, run: Any) -> None:
        self.run, self.replays, self.learns = run, 0, torch.is_grad_enabled()
        self.made = self.last = run()

    def replay(self) -> None:
        self.replays += 1
        with torch.set_grad_enabled(self.learns):
            self.last = self.run()
        _fill(self.made.leaves, self.last.leaves)


class Backward:
    def __init__(self, forward: Forward, run: Any) -> None:
        self.forward, self.run = forward, run
        self.made = run()

    def replay(self) -> None:
        _, wanted, cotangents = self.run.args
        _fill(self.made, MODULE._gradients(self.forward.last, wanted, cotangents))


def _fill(old: list[Any], new: list[Any]) -> None:
    for one, other in zip(old, new, strict=True):
        if isinstance(one, Tensor):
            one.detach().copy_(other.detach())


class Graphs:
    """In place of `longspan.graphs`, where there is no GPU."""

    RecordingError = RecordingError

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.waits = False

    def possible(self, tensors: Any) -> bool:
        return True

    def trying(self, device: Any) -> Any:
        return torch.random.fork_rng(devices=())

    def rehearse(self, run: Any) -> None:
        if self.waits:
            raise RecordingError("called a synchronizing CUDA operation")
        run()

    def new_pool(self) -> None: ...

    def record(self, run: Any, pool: Any) -> tuple[Any, Any]:
        if getattr(run, "func", None) is MODULE._gradients:
            graph: Any = Backward(self.forwards[-1], run)
        else:
            graph = Forward(run)
            self.forwards.append(graph)
        return graph, graph.made


@pytest.fixture
def graphs(device, monkeypatch):
    """None on a GPU: the real ones are used."""
    if device.type == "cuda":
        return None
    made = Graphs()
    monkeypatch.setattr(MODULE, "graphs", made)
    return made


def build(device: torch.device, kind: Any = LongspanForMaskedLM, dropout: float = 0.0) -> Any:
    config = LongspanConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=66,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attention={"window": 8},
        max_global_tokens=1,
    )
    torch.manual_seed(0)
    return kind(config).to(device).train()


def batch(device: torch.device, number: int, tokens: int = 24) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 60, (2, tokens), generator=drawn)
    global_mask = torch.zeros_like(ids)
    global_mask[:, number % tokens] = 1
    given = {"input_ids": ids, "labels": ids.flip(1), "global_attention_mask": global_mask}
    return {name: tensor.to(device) for name, tensor in given.items()}


def steps(model: Any, count: int, *, parts: int = 1, autocast: bool = False) -> list[Tensor]:
    """Losses, then gradients of the last step, of a plain training loop."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(count):
        optimizer.step()
        optimizer.zero_grad()
        for part in range(parts):
            torch.manual_seed(step)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
                loss = model(**batch(model.device, parts * step + part)).loss
            losses.append(loss.detach())
            loss.backward()
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]


def _assert_same(ours: list[Tensor], theirs: list[Tensor], error: float = 1e-4) -> None:
    """Kernels may add up in another order when they are recorded."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error / 10)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_the_same(device, graphs, parts, autocast):
    plain, captured = build(device), longspan.capture(build(device))
    theirs, ours = (steps(m, 5, parts=parts, autocast=autocast) for m in (plain, captured))
    assert len(theirs) == len(ours) > 20
    _assert_same(ours, theirs, 2e-2 if autocast else 1e-4)
    if graphs is not None:
        assert [graph.replays for graph in graphs.forwards] == [5 * parts - 1]


def test_dropout_follows_the_seed_and_a_recording_draws_nothing(device, graphs):
    plain, captured = build(device, dropout=0.2), longspan.capture(build(device, dropout=0.2))
    _assert_same(steps(captured, 4), steps(plain, 4))
    # Neither has drawn more than the other.
    ours, theirs = [], []
    for model, drawn in ((captured, ours), (plain, theirs)):
        torch.manual_seed(7)
        for number in range(3):
            model(**batch(device, number, tokens=16))
            drawn.append(torch.rand(3, device=device))
    assert all(map(torch.equal, ours, theirs))


def test_compiled_layers_are_compiled_once(device, graphs):
    model = build(device)
    for layer in model.encoder.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    longspan.capture(model)
    model(**batch(device, 0)).loss.backward()
    stats = import_module("torch._dynamo.utils").counters["stats"]
    before = stats["unique_graphs"]
    losses = [model(**batch(device, 0)).loss for _ in range(3)]
    losses[-1].backward()
    assert stats["unique_graphs"] == before > 0


def test_what_fails_while_it_is_recorded_is_an_error(device, graphs, monkeypatch):
    def fail(run, pool):
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(MODULE.graphs, "record", fail)
    model = longspan.capture(build(device))
    model(**batch(device, 0)).loss.backward()
    with pytest.raises(RuntimeError, match="begin again without"):
        model(**batch(device, 0))


def test_results_are_not_written_over(device, graphs):
    model = longspan.capture(build(device)).eval()
    plain = build(device).eval()
    with torch.no_grad():
        found = [model(**batch(device, n)).logits for n in range(4)]
        for number, logits in enumerate(found):
            torch.testing.assert_close(logits, plain(**batch(device, number)).logits)


def test_gradients_flow_into_inputs(device, graphs):
    model = longspan.capture(build(device, LongspanForSequenceClassification))
    weights = model.get_input_embeddings().weight
    given, first = batch(device, 0), []
    for _ in range(3):
        embeds = weights.detach()[given["input_ids"]].requires_grad_()
        out = model(
            inputs_embeds=embeds,
            global_attention_mask=given["global_attention_mask"],
            labels=torch.tensor([0, 1], device=device),
        )
        (found,) = torch.autograd.grad(out.loss, embeds)
        first.append(found)
        torch.testing.assert_close(found, first[0])


def test_every_kind_of_call_is_recorded_once(device, graphs):
    model = longspan.capture(build(device), most=2)
    for tokens in (8, 16, 24) * 3:
        model(**batch(device, 1, tokens)).loss.backward()
    recordings = vars(model)["forward"]._recordings
    assert len(recordings) == 2
    assert all(recordings.values())


def test_backward_after_another_call_is_refused(device, graphs):
    model = longspan.capture(build(device))
    model(**batch(device, 0)).loss.backward()
    first, second = (model(**batch(device, n)).loss for n in range(2))
    second.backward()
    with pytest.raises(RuntimeError, match="called again before this backward pass"):
        first.backward()


def test_a_second_backward_pass_is_refused(device, graphs):
    model = longspan.capture(build(device))
    model(**batch(device, 0)).loss.backward()
    loss = model(**batch(device, 1)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass of one call"):
        loss.backward()


def test_weights_that_moved_or_were_frozen_are_noticed(device, graphs):
    model, plain = longspan.capture(build(device)), build(device)
    steps(model, 3)
    model.zero_grad()
    model.load_state_dict(plain.state_dict())
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    _assert_same(steps(model, 3), steps(plain, 3))
    model.zero_grad()
    model.get_input_embeddings().weight.requires_grad_(False)
    for _ in range(3):
        model(**batch(device, 0)).loss.backward()
    assert model.get_input_embeddings().weight.grad is None


class Added(nn.Module):
    """Two weights that have the same gradient, and a layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.one + self.other


def test_gradients_of_two_weights_are_apart(device, graphs):
    model: Any = longspan.capture(Added().to(device))
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 3, device=device)).sum().backward()
        model.one.grad.mul_(2)
        assert model.other.grad.tolist() == [[1.0] * 3] * 2


def test_a_recording_leaves_buffers_alone(device, graphs):
    plain, captured = Added().to(device), longspan.capture(Added().to(device))
    for number in range(3):
        for model in (plain, captured):
            torch.manual_seed(number)
            model(torch.randn(2, 3, device=device))
    for one, other in zip(plain.buffers(), captured.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_part_that_does_not_train_is_noticed(device, graphs):
    model = longspan.capture(build(device))
    steps(model, 3)
    model.encoder.eval()
    steps(model, 3)
    assert len(vars(model)["forward"]._recordings) == 2


def test_gradients_from_more_than_the_loss_are_refused(device, graphs):
    model = longspan.capture(build(device, LongspanForSequenceClassification))
    given = batch(device, 0) | {"labels": torch.tensor([0, 1], device=device)}
    for step in range(2):
        out = model(**given)
        assert out.logits.requires_grad
        loss = out.loss + out.logits.square().mean()
        if step == 0:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="from more than its loss"):
                loss.backward()


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * float(x.sum())


def test_what_waits_for_the_device_runs_as_ever(device, graphs):
    if graphs is not None:
        graphs.waits = True
    model, x = longspan.capture(Waiting().to(device)), torch.ones(3, device=device)
    model(x).sum().backward()
    with pytest.warns(UserWarning, match="not captured and runs as ever: .*synchroniz"):
        model(x).sum().backward()
    for _ in range(2):
        assert model(x).tolist() == [3.0] * 3
    assert torch.rand(3, device=device).shape == (3,)  # the generator was left in order


class Apart(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.elsewhere = nn.Parameter(torch.ones(1, device="meta"))


@pytest.mark.usefixtures("graphs")
def test_what_is_on_several_devices_runs_as_ever(device):
    model, x = longspan.capture(Apart()), torch.ones(3, device=device)
    model.weight.data, model.bias.data = model.weight.data.to(device), model.bias.data.to(device)
    first = model(x)
    with pytest.warns(UserWarning, match=f"are on {device}.* and meta, a graph is on one"):
        assert torch.equal(model(x), first)


def test_what_has_no_weights_is_recorded_once(device, graphs):
    model, x = longspan.capture(nn.Tanh()), torch.ones(3, device=device)
    made = []
    for _ in range(4):
        model(x)
        made += vars(model)["forward"]._recordings.values()
    assert len(made) == 3
    assert len(set(made)) == 1


def test_checkpointing_runs_as_ever(device, graphs):
    model = longspan.capture(build(device))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch(device, 0)).loss.backward()
    with pytest.warns(UserWarning, match="runs as ever: gradient checkpointing"):
        model(**batch(device, 0)).loss.backward()


def test_release_and_copies(device, graphs):
    model = build(device)
    before = inspect.signature(model.forward)
    longspan.capture(model)
    assert inspect.signature(model.forward) == before
    steps(model, 2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    given = batch(device, 0)
    assert not torch.equal(other(**given).logits, model(**given).logits)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    assert not isinstance(vars(loaded).get("forward"), MODULE._Captured)
    assert longspan.release(model) is model
    assert "forward" not in vars(model)
    model.forward = wrapper = lambda **given: given
    longspan.release(longspan.capture(model))
    assert model.forward is wrapper


@pytest.fixture
def alone():
    """A group of processes that has one."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_captured_model_trains_with_others_of_its_kind(device, graphs):
    plain, captured = build(device), longspan.capture(build(device))
    whole = DistributedDataParallel(captured)
    _assert_same(steps(whole, 4, parts=2), steps(plain, 4, parts=2))
    assert all(vars(captured)["forward"]._recordings.values())
    with pytest.raises(ValueError, match="capture the model before DistributedDataParallel"):
        longspan.capture(DistributedDataParallel(build(device)))
    with pytest.raises(ValueError, match="weights that are sharded"):
        longspan.capture(fully_shard(build(device)))


def test_on_a_cpu_nothing_is_recorded():
    model = longspan.capture(build(torch.device("cpu")))
    steps(model, 3)
    assert not vars(model)["forward"]._recordings


def test_wrong_input_is_refused():
    with pytest.raises(TypeError, match="capture takes a model, got list"):
        longspan.capture([])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="most=0 must be at least 1"):
        longspan.capture(Waiting(), most=0)
    whole = Waiting()
    whole.compile()
    with pytest.raises(ValueError, match=r"Waiting was compiled by its own compile\(\)"):
        longspan.capture(whole)
    observing = LongspanConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=66,
        attention={"kind": "clusterformer"},
    )
    with pytest.raises(ValueError, match="cannot be captured"):
        longspan.capture(longspan.LongspanModel(observing))
