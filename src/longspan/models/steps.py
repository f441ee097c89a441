"""Generation token by token: keys and values that stay where they are, so that on a GPU a step is
one launch, however many kernels it has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from longspan import graphs

# Capturing takes as long as some ten steps launched from Python; shorter texts are not worth it.
_WORTH = 32
_WARM = 2  # steps before the capture: whatever is set up on first use is set up by then


class TargetCache(DynamicCache):
    """The keys and values of a target, with room for `positions` tokens."""

    def __init__(self, layers: int, positions: int, device: torch.device) -> None:
        super().__init__()
        self._layers = layers
        # Some of PyTorch's kernels want masks of such sizes.
        self.positions = -(-positions // 8) * 8
        self.count = 0
        # Where the next token stands: on the device, so that a captured step finds it there.
        self.next = torch.zeros(1, dtype=torch.long, device=device)
        self._place = torch.arange(self.positions, device=device)
        self._at = self.next
        self._kept: Tensor | None = None  # [2 * layers, rows, heads, positions, head_dim]

    @property
    def is_croppable(self) -> bool:
        return False  # no token is taken back

    def check_room(self, tokens: int) -> None:
        """Raise before anything would be written behind the end, which a GPU does not survive."""
        if self.count + tokens > self.positions:
            raise ValueError(
                f"past_key_values holds {self.count} tokens and was made by generate for "
                f"{self.positions}, too few for {tokens} more: go on with decoder_input_ids alone"
            )

    def take(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Positions [1, tokens] of the tokens to come, and who is seen by each [1, 1, tokens,
        positions]: what stands behind them is not yet written."""
        self.check_room(tokens)
        self._at = self.next if tokens == 1 else self.next + self._place[:tokens]
        return self._at[None], (self._place <= self._at[:, None])[None, None]

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, tokens, head_dim] where `take` said; all there is comes back."""
        if self._kept is None:
            rows, heads, _, head_dim = key_states.shape
            self._kept = key_states.new_zeros(
                2 * self._layers, rows, heads, self.positions, head_dim
            )
        keys, values = self._kept[2 * layer_idx], self._kept[2 * layer_idx + 1]
        keys.index_copy_(2, self._at, key_states)
        values.index_copy_(2, self._at, value_states)
        return keys, values

    def advance(self, tokens: int) -> None:
        self.next.add_(tokens)
        self.count += tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Each row takes over what row `beam_idx` of it has; all layers at once."""
        if self._kept is not None:
            written = self._kept[:, :, :, : self.count]
            written.copy_(written.index_select(1, beam_idx.to(written.device)))


class StepCache(EncoderDecoderCache):
    """What `generate` keeps of a target and its source, and the step that adds a token."""

    self_attention_cache: TargetCache
    # Kept here: a captured step reads it where it was when captured.
    source_mask: Tensor | None = None

    def __init__(self, layers: int, positions: int, device: torch.device, *, capture: bool) -> None:
        super().__init__(TargetCache(layers, positions, device), DynamicCache())
        self._captures = capture and device.type == "cuda" and positions >= _WORTH
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self, write: Callable[[Tensor], Tensor], token: Tensor) -> Tensor:
        """The scores `write` gives for one token more [rows, 1]; on a GPU it is captured once, as a
        CUDA graph, and replayed from then on."""
        self._steps += 1
        if not self._captures or self._steps <= _WARM:
            return write(token)
        if self._graph is None:
            self._token = token.clone()
            self._graph = self._capture(write)
        self.self_attention_cache.check_room(1)
        self._token.copy_(token)
        self._graph.replay()
        self.self_attention_cache.count += 1
        return self._scores.clone()  # the next replay writes there

    def _capture(self, write: Callable[[Tensor], Tensor]) -> torch.cuda.CUDAGraph:
        count = self.self_attention_cache.count
        # Of several devices, the one that the model is on.
        with torch.cuda.device(self._token.device):
            graph, self._scores = graphs.record(lambda: write(self._token))
        self.self_attention_cache.count = count  # a capture computes nothing yet
        return graph
