"""FlexAttention is told the blocks that it would find itself."""

import pytest
import torch
from torch import Tensor

from longspan.bench.flex import block_mask

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tokens", "band", "first"),
    [
        (1024, (256, 256), 0),
        (1000, (128, 128), 16),
        (1536, (32, 32), 300),
        (100, (256, 256), 0),
        (1500, (512, 0), 0),
    ],
)
def test_flex_gets_the_blocks_it_would_find(tokens: int, band: tuple[int, int], first: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    ours = block_mask(tokens, *band, CPU, first=first)
    theirs = create_block_mask(ours.mask_mod, None, None, tokens, tokens, device="cpu")
    assert ours.shape == theirs.shape

    def blocks(count: Tensor | None, order: Tensor | None) -> list[set[int]]:
        assert count is not None
        assert order is not None
        rows = zip(count[0, 0].tolist(), order[0, 0].tolist(), strict=True)
        return [set(row[:many]) for many, row in rows]

    for kind in ("kv", "full_kv", "q", "full_q"):
        names = f"{kind}_num_blocks", f"{kind}_indices"
        found, wanted = ([getattr(mask, name) for name in names] for mask in (ours, theirs))
        assert blocks(*found) == blocks(*wanted)
