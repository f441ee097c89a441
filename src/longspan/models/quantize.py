"""A model made smaller: the weights of its layers as int8."""

import copy
from typing import cast

from longspan.layers.quantized import quantize_layers
from longspan.models.config import LongspanConfig
from longspan.models.encoder import LongspanModel, LongspanPreTrainedModel
from longspan.models.seq2seq_config import LongspanSeq2SeqConfig


def quantize(model: LongspanPreTrainedModel) -> LongspanPreTrainedModel:
    """A copy of an encoder, with its head if it has one, for inference on a CPU.

    The weights of its layers become int8, one scale for each row of them; embeddings, norms and
    the head become float32. Where the CPU multiplies int8 (AVX-512 VNNI), inputs are rounded too,
    token by token. It is saved and loaded as any other model; in the file, what came in half
    precision is in half precision.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, LongspanConfig) or isinstance(config, LongspanSeq2SeqConfig):
        raise TypeError(
            f"cannot quantize {type(model).__name__}: only longspan's encoders can be; "
            "longspan.convert makes one"
        )
    if config.quantize is not None:
        raise ValueError(f"the weights of this model are {config.quantize} already")
    made = copy.deepcopy(model).float().eval()
    encoder = cast(LongspanModel, made.base_model)
    for one in (made.config, encoder.config):
        one.quantize = "int8"
        one.check_quantize()
    quantize_layers(encoder.layers)
    encoder.requires_grad_(False)
    return made
