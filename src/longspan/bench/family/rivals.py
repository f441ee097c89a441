"""The best public implementations of mechanisms of the family, on the same work as ours.

Each is the self-attention module of its package with its projections to queries, keys and values;
output projections are taken off, as ours have none. Packages are installed for this alone:
pip install '.[bench-rivals]'.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from longspan.bench.family.cases import FamilyCase


class Rival(NamedTuple):
    label: str
    ours: str  # the contender that does the same
    package: str  # to be imported
    make: Callable[[FamilyCase], nn.Module]


class _First(nn.Module):
    """A module that is called with arguments of its own, and whose first output counts."""

    def __init__(self, inner: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.inner, self.arguments = inner, arguments

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.inner(hidden, **self.arguments)
        return made[0] if isinstance(made, tuple) else made


def _without_output(module: Any) -> nn.Module:
    module.to_out = nn.Identity()
    return module


def _performer(case: FamilyCase) -> nn.Module:
    from performer_pytorch import SelfAttention  # pyright: ignore[reportMissingImports]

    return _without_output(
        SelfAttention(
            case.hidden,
            causal=case.causal,
            heads=case.heads,
            dim_head=case.hidden // case.heads,
            nb_features=case.reach // 2,
        )
    )


def _linformer(case: FamilyCase) -> nn.Module:
    from linformer import LinformerSelfAttention  # pyright: ignore[reportMissingImports]

    rank = min(case.tokens, case.reach // 2)
    return _without_output(
        LinformerSelfAttention(case.hidden, case.tokens, k=rank, heads=case.heads)
    )


def _reformer(case: FamilyCase) -> nn.Module:
    from reformer_pytorch import LSHSelfAttention  # pyright: ignore[reportMissingImports]

    made = LSHSelfAttention(
        case.hidden,
        causal=case.causal,
        heads=case.heads,
        bucket_size=case.reach // 8,
        n_hashes=ROUNDS,
    )
    return _without_output(made)


def _routing(case: FamilyCase) -> nn.Module:
    from routing_transformer.routing_transformer import (  # pyright: ignore[reportMissingImports]
        SelfAttention,
    )

    made = SelfAttention(
        *(case.hidden, 1, case.tokens, case.heads),
        causal=case.causal,
        local_attn_heads=0,
        window_size=min(case.tokens, case.reach // 2),
    )
    return _First(_without_output(made))  # a loss beside it


def _transformers_bigbird(case: FamilyCase) -> nn.Module:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import (
        BigBirdBlockSparseAttention,
        BigBirdModel,
    )

    block = case.reach // 8
    config = BigBirdConfig(
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        block_size=block,
        num_random_blocks=3,
        max_position_embeddings=case.tokens,
    )
    mask = torch.ones(case.batch, case.tokens, dtype=getattr(torch, case.dtype))
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(mask, block)
    made = BigBirdBlockSparseAttention(config, seed=0)
    return _Masked(made, from_blocked_mask=blocked, band_mask=band, from_mask=rows, to_mask=columns)


class _Masked(nn.Module):
    """BigBird's, with masks that go along to a device; both sides have the same blocks."""

    def __init__(self, inner: nn.Module, **masks: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        for name, mask in masks.items():
            self.register_buffer(name, mask)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        masks = dict(self.named_buffers(recurse=False))
        return self.inner(hidden, to_blocked_mask=masks["from_blocked_mask"], **masks)[0]


def _transformers_reformer(case: FamilyCase) -> nn.Module:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    chunk = case.reach // 8
    config = ReformerConfig(
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        attention_head_size=case.hidden // case.heads,
        lsh_attn_chunk_length=chunk,
        num_hashes=ROUNDS,
        num_buckets=_buckets(case.tokens // chunk),
        max_position_embeddings=case.tokens,
        is_decoder=case.causal,
        lsh_attention_probs_dropout_prob=0.0,
    )
    return _First(LSHSelfAttention(config))


def _buckets(chunks: int) -> int | list[int]:
    """Twice as many as chunks; factored, as transformers wants it where there are many."""
    count = 2 * max(1, chunks)
    power = count.bit_length() - 1
    if count <= 256:
        return count
    return [2 ** (power // 2), 2 ** (power - power // 2)]


ROUNDS = 4  # of hashing
RIVALS = {
    "performer-pytorch": Rival("performer-pytorch", "performer", "performer_pytorch", _performer),
    "causal-performer-pytorch": Rival(
        "performer-pytorch", "causal-performer", "performer_pytorch", _performer
    ),
    "linformer-package": Rival("linformer (package)", "linformer", "linformer", _linformer),
    "transformers-bigbird": Rival(
        "transformers BigBird", "bigbird", "transformers", _transformers_bigbird
    ),
    "reformer-pytorch": Rival("reformer-pytorch", "reformer", "reformer_pytorch", _reformer),
    "transformers-reformer": Rival(
        "transformers Reformer", "reformer", "transformers", _transformers_reformer
    ),
    "causal-reformer-pytorch": Rival(
        "reformer-pytorch", "causal-reformer", "reformer_pytorch", _reformer
    ),
    "causal-transformers-reformer": Rival(
        "transformers Reformer", "causal-reformer", "transformers", _transformers_reformer
    ),
    "routing-transformer": Rival(
        "routing-transformer", "routing-matched", "routing_transformer", _routing
    ),
    "causal-routing-transformer": Rival(
        "routing-transformer", "causal-routing-matched", "routing_transformer", _routing
    ),
}
