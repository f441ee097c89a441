"""Who is measured. A contender turns a case into a `Workload`: an encoder and its batch.

All have random weights of one seed, no dropout, no pooler, and the same token ids. What is timed
is what a user calls: ids and masks in, hidden states of every token out. On a GPU all but
transformers' Longformer, which waits for the device in every layer, are compiled; layer by layer,
since one graph then serves all layers.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor, nn

from longspan.bench.benchmark import Contenders, Workload
from longspan.bench.models.cases import ModelCase

CONTENDERS = Contenders()
contender = CONTENDERS.register

_PADDING = 1


class _Batch(NamedTuple):
    """All tensors are [batch, tokens]; there is no mask of a batch without padding."""

    ids: Tensor
    mask: Tensor | None
    global_mask: Tensor


def _batch(case: ModelCase, device: torch.device) -> _Batch:
    shape = (case.batch, case.tokens)
    ids = torch.randint(3, case.vocab, shape, generator=torch.Generator().manual_seed(0))
    place = torch.arange(case.tokens)
    real = place < torch.tensor(case.lengths)[:, None]
    global_mask = (place < case.globals).expand(shape).long()
    mask = None if case.shortest is None else real.long().to(device)
    return _Batch(torch.where(real, ids, _PADDING).to(device), mask, global_mask.to(device))


def _sizes(case: ModelCase) -> dict[str, Any]:
    """What BERT's descendants call the same things."""
    return {
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "intermediate_size": 4 * case.hidden,
        "max_position_embeddings": case.tokens + 2,  # RoBERTa reserves two
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": _PADDING,
    }


def _make(config: Any, case: ModelCase, device: torch.device, **options: Any) -> nn.Module:
    from transformers import AutoModel

    torch.manual_seed(0)
    with device:
        # Drawn in float32: in every precision it is then the same model.
        model: Any = AutoModel.from_config(config, **options).to(getattr(torch, case.dtype))
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # without dropout this only lets checkpointing happen


def _compile(
    parts: Iterable[nn.Module],
    device: torch.device,
    *,
    fullgraph: bool = False,
    budget: float = 1.0,
) -> None:
    """Compile each part on a GPU. Layers are alike, so the first one's graph serves them all.

    `budget` is the share of the activations that may be kept for the backward pass; torch chooses
    which of the others are cheapest to compute again.
    """
    if device.type != "cuda":
        return
    torch.compiler.reset()  # graphs of earlier cases would count towards dynamo's limit
    torch._functorch.config.activation_memory_budget = budget  # read when a graph is first run
    for part in parts:
        part.compile(fullgraph=fullgraph, dynamic=False)


def _workload(
    case: ModelCase, model: nn.Module, forward: Callable[[], Tensor], *, waits: bool = False
) -> Workload:
    weights: list[Tensor] = list(model.parameters())
    kept = model.state_dict().values()  # int8 weights are no parameters
    resident = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    shape = (case.batch, case.tokens, case.hidden)
    # Its shape is all that is used of it, so it takes no memory.
    output = weights[0].detach().flatten()[0].expand(shape)
    # Checkpointing looks at the generator's state, which waits for the device.
    return Workload(forward, weights, output, resident, waits or case.checkpointing)


def _ours(case: ModelCase, device: torch.device, budget: float = 1.0) -> nn.Module:
    from longspan.models import LongspanConfig

    config = LongspanConfig(**_sizes(case), attention={"window": case.window})
    model: Any = _make(config, case, device, add_pooling_layer=False)
    _compile([model.embeddings, *model.layers], device, fullgraph=True, budget=budget)
    return model


def _our_workload(case: ModelCase, model: nn.Module, device: torch.device) -> Workload:
    batch = _batch(case, device)

    def forward() -> Tensor:
        return model(
            batch.ids,
            attention_mask=batch.mask,
            global_attention_mask=batch.global_mask,
            max_global_tokens=case.globals,
        ).last_hidden_state

    return _workload(case, model, forward)


@contender("longspan", "longspan")
def _longspan(case: ModelCase, device: torch.device) -> Workload:
    return _our_workload(case, _ours(case, device), device)


@contender("longspan-captured", "longspan, captured", devices=("cuda",))
def _longspan_captured(case: ModelCase, device: torch.device) -> Workload:
    """As a user has it: `longspan.capture(model)`, called from Python."""
    from longspan.models import capture

    workload = _our_workload(case, capture(_ours(case, device)), device)
    return replace(workload, waits=True)  # no graph contains another


@contender("longspan-bfloat16", "longspan, bfloat16", devices=("cpu",))
def _longspan_bfloat16(case: ModelCase, device: torch.device) -> Workload:
    """In turns with the same model in float32."""
    return _longspan(replace(case, dtype="bfloat16"), device)


@contender("longspan-int8", "longspan, int8", devices=("cpu",))
def _longspan_int8(case: ModelCase, device: torch.device) -> Workload:
    from longspan.models import quantize

    model: Any = _ours(case, device)
    return _our_workload(case, quantize(model), device)


@contender("longspan-lean", "longspan, lean", devices=("cuda",))
def _longspan_lean(case: ModelCase, device: torch.device) -> Workload:
    return _our_workload(case, _ours(case, device, budget=0.6), device)


@contender("longspan-unpadded", "longspan, unpadded")
def _longspan_unpadded(case: ModelCase, device: torch.device) -> Workload:
    from longspan.models import pad, unpad

    model, batch = _ours(case, device), _batch(case, device)
    mask = torch.ones_like(batch.ids) if batch.mask is None else batch.mask

    def forward() -> Tensor:
        packing, (ids, global_mask) = unpad(
            mask, batch.ids, batch.global_mask, total=case.real_tokens
        )
        hidden = model(
            ids,
            global_attention_mask=global_mask,
            cu_seqlens=packing.cu_seqlens,
            max_global_tokens=case.globals * case.batch,
        ).last_hidden_state
        return pad(packing, hidden)

    return _workload(case, model, forward)


def _their_longformer(case: ModelCase, device: torch.device) -> nn.Module:
    from transformers import LongformerConfig

    config = LongformerConfig(**_sizes(case), attention_window=case.window, type_vocab_size=1)
    return _make(config, case, device, add_pooling_layer=False)


def _longformer_workload(case: ModelCase, model: nn.Module, device: torch.device) -> Workload:
    batch = _batch(case, device)

    def forward() -> Tensor:
        return model(
            batch.ids, attention_mask=batch.mask, global_attention_mask=batch.global_mask
        ).last_hidden_state

    return _workload(case, model, forward, waits=True)


@contender("longspan-patch", "Longformer, patched")
def _longspan_patch(case: ModelCase, device: torch.device) -> Workload:
    from longspan.hub.patch import patch

    return _longformer_workload(case, patch(_their_longformer(case, device)), device)


@contender("longformer", "transformers Longformer")
def _longformer(case: ModelCase, device: torch.device) -> Workload:
    return _longformer_workload(case, _their_longformer(case, device), device)


@contender("roberta", "RoBERTa, SDPA")
def _roberta(case: ModelCase, device: torch.device) -> Workload:
    from transformers import RobertaConfig

    config = RobertaConfig(**_sizes(case), type_vocab_size=1)
    model: Any = _make(config, case, device, add_pooling_layer=False, attn_implementation="sdpa")
    _compile([model.embeddings, *model.encoder.layer], device)
    batch = _batch(case, device)
    # It looks for padding in a batch without a mask, to warn.
    return _workload(
        case,
        model,
        lambda: model(batch.ids, attention_mask=batch.mask).last_hidden_state,
        waits=True,
    )


@contender("modernbert", "ModernBERT, SDPA")
def _modernbert(case: ModelCase, device: torch.device) -> Workload:
    """In the proportions of ModernBERT-base: as many weights, in more and slimmer layers."""
    from transformers import ModernBertConfig

    config = ModernBertConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        num_hidden_layers=round(case.layers * 22 / 12),
        num_attention_heads=case.heads,
        intermediate_size=case.hidden * 3 // 2,
        max_position_embeddings=case.tokens,
        pad_token_id=_PADDING,
        # Its own ids would lie outside a small vocabulary.
        bos_token_id=0,
        cls_token_id=0,
        eos_token_id=2,
        sep_token_id=2,
    )
    model: Any = _make(config, case, device, attn_implementation="sdpa")
    _compile([model.embeddings, *model.layers], device)
    batch = _batch(case, device)
    return _workload(
        case,
        model,
        lambda: model(batch.ids, attention_mask=batch.mask).last_hidden_state,
        waits=True,
    )
