"""Every head as one graph: `torch.compile(fullgraph=True)`, and `torch.export` for any length."""

import pytest
import torch
from models.small import HEADS, MODERN, VOCAB, batch, build, labels, results
from packaging.version import Version

KINDS = pytest.mark.parametrize("changes", [{}, MODERN], ids=["bert", "modern"])
# A graph takes seconds: every head once, and of the other kind what its options are for.
HEADS_OF_KINDS = pytest.mark.parametrize(
    ("head", "changes"),
    [
        *((head, {}) for head in HEADS),
        ("ForMaskedLM", MODERN),
        ("ForSequenceClassification", MODERN),
    ],
    ids=[*HEADS, "modern-ForMaskedLM", "modern-ForSequenceClassification"],
)


@HEADS_OF_KINDS
def test_compiles_without_a_graph_break(head, changes):
    """The preset of global tokens included, and the gradients."""
    model, given = build(head, max_global_tokens=64, **changes), batch(head)
    given |= labels(head, given)
    given.pop("global_attention_mask")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for call in (model, compiled):
        model.zero_grad()
        output = call(**given)
        loss = output.last_hidden_state.square().mean() if head == "Model" else output.loss
        loss.backward()
        # The bare model's pooler is not part of the loss: a graph gives it zeros.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append([loss, *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@HEADS_OF_KINDS
def test_exports_with_any_length(head, changes):
    if head == "ForMultipleChoice" and Version(torch.__version__) < Version("2.12"):
        pytest.skip("torch 2.11 cannot see that min(n, 2 n) is n, and gives up on any n")
    model = build(head, max_global_tokens=64, **changes)
    given, *others = (
        {k: v for k, v in batch(head, lengths).items() if k != "global_attention_mask"}
        for lengths in ((37, 20), (51, 30), (64, 9))
    )
    length = torch.export.Dim("length", min=8, max=64)
    shapes = {name: {tensor.dim() - 1: length} for name, tensor in given.items()}
    exported = torch.export.export(model, (), kwargs=given, dynamic_shapes=shapes).module()
    for other in others:
        for name, value in results(model(**other), other).items():
            found = results(exported(**other), other)[name]
            torch.testing.assert_close(found, value, rtol=1e-4, atol=2e-5)


def test_exports_with_a_given_global_mask():
    model, given = build("Model", max_global_tokens=64), batch("Model")
    length = torch.export.Dim("length", min=8, max=64)
    exported = torch.export.export(
        model, (), kwargs=given, dynamic_shapes={name: {1: length} for name in given}
    ).module()
    other = batch("Model", (50, 31), seed=3)
    torch.testing.assert_close(exported(**other)[0], model(**other)[0], rtol=1e-4, atol=2e-5)


def test_rounded_as_transformers_rounds_it_is_one_graph():
    """Padding to whole windows included, at the lengths it was made for."""
    model = build("ForSequenceClassification", max_global_tokens=64)
    model.set_backend("chunks")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths in ((37, 20), (40, 20), (51, 30)):
        given = batch("ForSequenceClassification", lengths)
        exported = torch.export.export(model, (), kwargs=given).module()
        for call in (compiled, exported):
            torch.testing.assert_close(call(**given).logits, model(**given).logits)


def test_a_graph_must_know_how_many_tokens_are_global():
    """Unless it needs no list of them: rotary models compute their rows with all others."""
    given = batch("Model")
    with pytest.raises(Exception, match="max_global_tokens"):
        torch.compile(build("Model"), fullgraph=True, backend="aot_eager")(**given)
    model = build("Model", **MODERN)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(**given)
    torch.testing.assert_close(found[0], model(**given)[0], rtol=1e-4, atol=2e-5)


@KINDS
def test_packed_documents_compile(changes):
    tokens = torch.randint(4, VOCAB, (1, 30), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, 11, 30])
    model = build("ForSequenceClassification", **changes)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    wanted = model(tokens, cu_seqlens=bounds).logits
    torch.testing.assert_close(compiled(tokens, cu_seqlens=bounds).logits, wanted)


@KINDS
@pytest.mark.parametrize("head", HEADS)
def test_checkpointing_gives_the_same_gradients(head, changes):
    model, given = build(head, **changes).train(), batch(head)
    given |= labels(head, given)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        output = model(**given)
        loss = output.last_hidden_state.square().mean() if head == "Model" else output.loss
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
