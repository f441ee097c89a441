"""What a model asks of an attention layer."""

from collections.abc import Sequence

from torch import Tensor, nn

from longspan.ops.window import Visibility
from longspan.ops.window.maps import AttentionMap


class AttentionLayer(nn.Module):
    """[batch, tokens, dim] -> [batch, tokens, dim], before the output projection.

    A layer is called with hidden states and, by keyword, what the model made of its input once for
    all layers: `seen` (padding, documents, global tokens), `positions` of the global tokens
    [batch, g] if any layer asked for them, and `position_ids` [batch, tokens], where each token
    stands in its document.
    """

    # Above 1 it returns one for so many tokens, and is told by `pools` which.
    shortens = 1
    needs_positions = False  # of the global tokens; a compiled model must know how many there are
    # Where numbers are rounded as transformers rounds them: how many tokens it pads a batch to a
    # multiple of. All products around such a layer are torch's own, of all tokens at once.
    whole_window: int | None = None

    def follow(self, before: "Sequence[AttentionLayer]") -> None:
        """Take from the model's layers before this one what is to be shared with them; called
        once, when a model is built. What another layer owns is not registered here again."""

    def map(
        self,
        hidden: Tensor,
        *,
        seen: Visibility,
        positions: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> AttentionMap:
        """The attention weights of a call, without n x n memory."""
        raise NotImplementedError(
            f"{type(self).__name__} has no attention map: call the model without output_attentions"
        )
