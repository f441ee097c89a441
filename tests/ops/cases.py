"""Random calls of `window_attention`: one strategy for every backend's tests."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from longspan import window_attention
from longspan.ops.window import Pattern, native, reference

# For tests that run on the session's device, which must be the CPU.
_CANNOT = "the device is a GPU" if torch.cuda.is_available() else native.unavailable()
NATIVE = pytest.param("native", marks=pytest.mark.skipif(_CANNOT is not None, reason=str(_CANNOT)))


@dataclass(frozen=True)
class Case:
    """Everything that defines a call but the tensors, which follow from the seed."""

    batch: int
    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    window: tuple[int, int]
    dilation: tuple[int, ...]
    padding: str = "none"  # none, left, right, holes, all
    global_share: float | None = None
    documents: int | None = None
    dropout_p: float = 0.0
    global_rows: bool = True
    strided: bool = False
    seed: int = 0

    def inputs(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Tensors in float64 first, so that every dtype sees the same numbers."""
        draw = torch.Generator().manual_seed(self.seed)

        def normal(heads: int) -> Tensor:
            shape = (self.batch, self.tokens, heads, self.head_dim)
            if not self.strided:
                return torch.randn(shape, generator=draw, dtype=torch.float64)
            # [batch, heads, tokens, 2 * dim], every second number: nothing is contiguous.
            wide = (self.batch, heads, self.tokens, 2 * self.head_dim)
            wide = torch.randn(wide, generator=draw, dtype=torch.float64)
            return wide.transpose(1, 2)[..., ::2]

        query, key, value = normal(self.heads), normal(self.key_heads), normal(self.key_heads)
        grad = normal(self.heads)
        masks: dict[str, Any] = {}
        if self.padding != "none":
            masks["attention_mask"] = self._attention_mask(draw).to(device)
        if self.global_share is not None:
            chosen = torch.rand(self.batch, self.tokens, generator=draw) < self.global_share
            masks["global_mask"] = chosen.to(torch.int64).to(device)
        if self.documents is not None:
            cuts = torch.randint(0, self.tokens + 1, (self.documents - 1,), generator=draw)
            ends = torch.tensor([0, self.tokens])
            masks["cu_seqlens"] = torch.cat([ends, cuts]).sort().values.to(torch.int32)
        return {
            "tensors": [t.to(device, dtype) for t in (query, key, value)],
            "grad": grad.to(device, dtype),
            "masks": masks,
        }

    def _attention_mask(self, draw: torch.Generator) -> Tensor:
        if self.padding == "holes":
            return (torch.rand(self.batch, self.tokens, generator=draw) < 0.6).to(torch.int64)
        if self.padding == "all":
            return torch.zeros(self.batch, self.tokens, dtype=torch.int64)
        length = torch.randint(0, self.tokens + 1, (self.batch, 1), generator=draw)
        position = torch.arange(self.tokens)
        if self.padding == "left":
            position = position.flip(0)
        return (position < length).to(torch.int64)

    def options(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "dilation": self.dilation,
            "dropout_p": self.dropout_p,
            "global_rows": self.global_rows,
        }

    def with_(self, **changes: Any) -> "Case":
        return replace(self, **changes)


FEATURES = ("window", "padding", "global", "packed", "everything")


@st.composite
def cases(
    draw: st.DrawFn,
    feature: str = "everything",
    most_tokens: int = 90,
    most_heads: int = 4,
    head_dims: tuple[int, ...] = (16, 24),
) -> Case:
    """Calls that use one feature on top of windows and dilation, or all of them at once."""

    def has(name: str) -> bool:
        return feature in (name, "everything")

    heads = draw(st.sampled_from([h for h in (1, 2, 4) if h <= most_heads]))
    packed = feature == "packed" or (feature == "everything" and draw(st.booleans()))
    side = st.one_of(st.integers(0, 12), st.integers(0, 2 * most_tokens))
    left = draw(side)
    right = draw(st.one_of(st.just(0), side))
    padding = st.sampled_from(["none", "left", "right", "holes", "all"])
    share = st.sampled_from([None, 0.0, 0.05, 0.3, 1.0])
    return Case(
        batch=1 if packed else draw(st.integers(1, 2)),
        tokens=draw(st.integers(1, most_tokens)),
        heads=heads,
        key_heads=draw(st.sampled_from([h for h in (1, 2, 4) if heads % h == 0])),
        head_dim=draw(st.sampled_from(head_dims)),
        window=(left, right),
        dilation=tuple(draw(st.lists(st.integers(1, 5), min_size=heads, max_size=heads))),
        padding=draw(padding) if has("padding") else "none",
        global_share=draw(share) if has("global") else None,
        documents=draw(st.integers(1, 6)) if packed else None,
        dropout_p=draw(st.sampled_from([0.0, 0.3])) if has("everything") else 0.0,
        global_rows=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


def run(case: Case, backend: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Output and the three gradients of one call."""
    given = case.inputs(dtype, device)
    tensors = [t.requires_grad_() for t in given["tensors"]]
    torch.manual_seed(case.seed)  # every backend draws the same dropout seed
    out = window_attention(*tensors, **given["masks"], **case.options(), backend=backend)
    assert (out.shape, out.dtype) == (tensors[0].shape, dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, given["grad"])]


def assert_within_budget(
    case: Case, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """At most twice as far from the float64 oracle as plain PyTorch in the same dtype.

    Both run on numbers that `dtype` can hold, so only the arithmetic differs.
    """
    exact = run_rounded(case, "reference", torch.float64, dtype, device)
    plain = run_rounded(case, "reference", dtype, dtype, device)
    ours = run_rounded(case, backend, dtype, dtype, device)
    tiny = torch.finfo(dtype).eps
    for name, truth, baseline, got in zip(
        ("out", "dq", "dk", "dv"), exact, plain, ours, strict=True
    ):
        assert torch.isfinite(got).all(), f"{name} is not finite: {case}"
        allowed = 2 * (baseline.double() - truth).abs().max() + tiny * truth.abs().max() + 1e-5
        if name in ("dq", "dk"):
            # Where a row has few keys the softmax gradient is a difference of nearly equal
            # numbers, each rounded to dtype; its own size says nothing about their rounding.
            allowed = allowed + 2 * tiny * max(t.abs().max() for t in exact)
        error = (got.double() - truth).abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}: {case}"
    mask = visible(case, device)
    lonely = ~mask.any(dim=3).transpose(1, 2)  # [batch, query, heads]: sees nothing
    unseen = ~mask.any(dim=2).unflatten(1, (case.key_heads, -1)).any(dim=2).transpose(1, 2)
    for name, rows, got in zip(
        ("out", "dq", "dk", "dv"), (lonely, lonely, unseen, unseen), ours, strict=True
    ):
        assert (got[rows] == 0).all(), f"{name}: rows that must be exactly zero: {case}"


def visible(case: Case, device: torch.device) -> Tensor:
    """Bool [batch, heads, query, key], by the oracle."""
    given = case.inputs(torch.float32, device)
    masks = given["masks"]
    together = reference.together_from_masks(
        given["tensors"][0], masks.get("attention_mask"), masks.get("cu_seqlens")
    )
    chosen = masks["global_mask"].bool() if "global_mask" in masks else None
    pattern = Pattern(*case.window, case.dilation, 1.0, 0.0, case.global_rows)
    return reference.visible(given["tensors"][0], pattern, together, chosen)


def run_rounded(
    case: Case, backend: str, dtype: torch.dtype, via: torch.dtype, device: torch.device
) -> list[Tensor]:
    given = case.inputs(via, device)
    tensors = [t.to(dtype).requires_grad_() for t in given["tensors"]]
    torch.manual_seed(case.seed)
    out = window_attention(*tensors, **given["masks"], **case.options(), backend=backend)
    grads = torch.autograd.grad(out, tensors, given["grad"].to(dtype))
    return [out.detach(), *grads]
