"""Tiny models of transformers and of ours, and batches to feed them."""

from typing import Any

import torch
import transformers

import longspan

VOCAB, SEP = 60, 2
HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForTokenClassification",
    "ForMultipleChoice",
)


def short_sizes(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    } | changes


def spread(model: Any) -> Any:
    """Weights far enough from zero, biases included, that a mix-up shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def longformer(head, **changes):
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        **short_sizes(max_position_embeddings=150, attention_window=[8, 4], **changes),
        pad_token_id=1,
        sep_token_id=SEP,
    )
    return spread(getattr(transformers, f"Longformer{head}")(config))


def modernbert(head, **changes):
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "local_attention": 8,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "cls_token_id": 0,
        "eos_token_id": SEP,
        "sep_token_id": SEP,
    }
    config = transformers.ModernBertConfig(**(settings | changes))
    return spread(getattr(transformers, f"ModernBert{head}")(config))


# What ModernBERT has and BERT has not, on an encoder of ours.
MODERN: dict[str, Any] = {
    "position": "rotary",
    "position_offset": 0,
    "type_vocab_size": 0,
    "norm_first": True,
    "gated": True,
    "bias": False,
    "classifier_norm": True,
    "classifier_pooling": "mean",
}


def build(head, **changes):
    """A model of ours."""
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 66, "attention": {"window": 8}, "sep_token_id": SEP}
    config = longspan.LongspanConfig(**short_sizes(**(settings | changes)))
    return spread(getattr(longspan, f"Longspan{head}")(config))


def batch(head, lengths=(37, 20), seed=0) -> dict[str, Any]:
    """Inputs of uneven length: ids, masks, and for question answering three separators each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, VOCAB, shape, generator=generator)
    for row, length in enumerate(lengths):
        ids[row, [5 + row, 6 + row, length - 1]] = SEP
    ids = torch.where(mask.bool(), ids, 1)
    chosen = (torch.rand(shape, generator=generator) < 0.1).long() * mask
    given = {"input_ids": ids, "attention_mask": mask, "global_attention_mask": chosen}
    if head == "ForMultipleChoice":
        return {name: torch.stack([tensor, tensor.flip(0)]) for name, tensor in given.items()}
    return given


def labels(head, given) -> dict[str, Any]:
    ids = given["input_ids"]
    if head == "ForQuestionAnswering":
        return {"start_positions": torch.tensor([3, 5]), "end_positions": torch.tensor([7, 900])}
    if head == "ForSequenceClassification" or head == "ForMultipleChoice":
        return {"labels": torch.tensor([0, 1])}
    if head in ("ForTokenClassification", "ForMaskedLM"):
        return {"labels": torch.where(given["attention_mask"].bool(), ids % 2, -100)}
    return {}


def results(outputs, given):
    """What to compare of a model's output: the loss, and numbers of real tokens."""
    real = given["attention_mask"].bool()
    found = {}
    for name in ("loss", "logits", "start_logits", "end_logits", "last_hidden_state"):
        value = outputs.get(name)
        if value is None:
            continue
        per_token = value.shape[: real.dim()] == real.shape and value.dim() >= real.dim()
        found[name] = value[real] if per_token and real.dim() == 2 else value
    if outputs.get("pooler_output") is not None:
        found["pooler_output"] = outputs["pooler_output"]
    return found


def largest_difference(one, other):
    assert one.keys() == other.keys()
    assert one
    return max(float((one[name] - other[name]).abs().max().detach()) for name in one)
