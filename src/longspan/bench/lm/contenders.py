"""Who is measured. A contender turns a case into a `Workload`: a decoder and one training step.

A step is what the training loop does for each: forward, loss, backward, clipping, Muon and AdamW,
with weights in float32 that compute in the case's dtype. On a GPU the model is compiled as a whole.
All contenders are the same decoder with the same weights; only the attention differs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.bench.benchmark import Contenders, Pass, Workload, our_backend
from longspan.bench.flex import block_mask
from longspan.bench.lm.cases import LMCase
from longspan.layers.causal import Attended, CausalWindow
from longspan.train.optim import build_optimizers, set_learning_rate
from longspan.train.recipe import Optimizer

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CONTENDERS = Contenders()
contender = CONTENDERS.register


@dataclass
class Step(Workload):
    """One training step; its forward pass alone gives the loss."""

    update: Callable[[], None] = lambda: None

    def ready(self, kind: Pass) -> Callable[[], object]:
        if kind == "forward":
            return torch.no_grad()(self.forward)

        def step() -> None:
            self.forward().backward()
            self.update()

        return step


def _step(case: LMCase, model: nn.Module, device: torch.device) -> Step:
    model = model.to(device).train()
    optimizers = build_optimizers(model, Optimizer("muon"), fused=device.type == "cuda")
    set_learning_rate(optimizers, 1e-4)
    weights: list[Tensor] = list(model.parameters())
    drawn = torch.randint(
        256, (case.batch, case.tokens + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    ids, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    dtype = getattr(torch, case.dtype)
    half = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
    if device.type == "cuda":
        torch.compiler.reset()  # graphs of earlier cases would count towards dynamo's limit
        model.compile(dynamic=False)

    def forward() -> Tensor:
        with half:
            return model(ids, targets=targets).loss

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    resident = sum(weight.numel() * weight.element_size() for weight in weights)
    if device.type == "cuda":
        # Made by the first step, before the measured one: Muon's momentum, AdamW's two moments.
        for optimizer, moments in zip(optimizers, (2, 1), strict=True):
            groups = optimizer.param_groups
            resident += sum(4 * moments * p.numel() for group in groups for p in group["params"])
    # AdamW counts steps on the host, so the step is timed by the caller's clock: what a run gets.
    return Step(forward, weights, weights[0].detach().new_zeros(()), resident, True, update)


def _decoder(case: LMCase, attention: list[dict[str, Any]]) -> Any:
    from longspan.models import LongspanDecoderConfig, LongspanForCausalLM
    from longspan.recipes.books import skeleton

    torch.manual_seed(0)
    settings = skeleton(
        attention,
        layers=case.layers,
        hidden=case.hidden,
        heads=case.heads,
        feed_forward=case.feed_forward,
        dropout=0.0,
    )
    return LongspanForCausalLM(LongspanDecoderConfig(**settings))


def _windows(case: LMCase, **options: Any) -> list[dict[str, Any]]:
    longest = max(case.windows)
    return [
        {
            "left": left,
            "norm_keys": True,
            "dilation": [1] * (case.heads - case.dilated)
            + [2 if left == longest else 1] * case.dilated,
            **options,
        }
        for left in case.windows
    ]


@contender("longspan", "longspan")
def _longspan(case: LMCase, device: torch.device) -> Step:
    return _step(case, _decoder(case, _windows(case, backend=our_backend(device))), device)


@contender("flex", "FlexAttention", devices=("cuda",))
def _flex(case: LMCase, device: torch.device) -> Step:
    if case.dilated:
        raise ValueError("the FlexAttention contender has no dilation")
    model = _decoder(case, _windows(case))
    masks = {
        left: block_mask(case.tokens, min(left, case.tokens), 0, device)
        for left in set(case.windows)
    }
    for block, left in zip(model.layers, case.windows, strict=True):
        own = block.attention
        block.attention = FlexWindow(case.hidden, case.heads, left, norm_keys=True)
        block.attention.load_state_dict(own.state_dict())
        block.attention.mask = masks[left]
    return _step(case, model, device)


class FlexWindow(CausalWindow):
    """Our window layer around FlexAttention."""

    mask: BlockMask | None = None

    def forward(
        self, hidden: Tensor, first: int = 0, state: Any = None, keep_state: bool = False
    ) -> Attended:
        from torch.nn.attention.flex_attention import flex_attention

        query, key, value = self.project(hidden)
        query, key = self.turned(query, key, first=first)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        out: Any = flex_attention(query, key, value, block_mask=self.mask)
        return Attended(out.transpose(1, 2).flatten(2))


@contender("dense", "dense, SDPA")
def _dense(case: LMCase, device: torch.device) -> Step:
    return _step(case, _decoder(case, [{"kind": "full", "norm_keys": True}] * case.layers), device)
