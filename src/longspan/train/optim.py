"""Which optimiser updates which weights."""

import torch
from torch import nn

from longspan.train.recipe import Optimizer


def build_optimizers(
    model: nn.Module, settings: Optimizer, *, fused: bool = False
) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon for the matrices inside layers and AdamW for everything else.

    Biases, norms and other vectors are not decayed. Each group remembers in "scale" what to
    multiply the schedule's learning rate by; a head on an encoder may have another one. `fused` has
    all of an AdamW step in one kernel, for GPUs.
    """
    matrices, others, vectors = [], [], []
    head: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    prefix = getattr(model, "base_model_prefix", "")
    has_head = settings.head_scale != 1.0 and bool(prefix) and hasattr(model, prefix)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if has_head and not name.startswith(f"{prefix}."):
            head[parameter.dim() < 2].append(parameter)
        elif parameter.dim() < 2 or name.endswith(("content_bias", "position_bias")):
            vectors.append(parameter)
        elif (
            settings.kind == "muon"
            and parameter.dim() == 2
            and "layers" in name.split(".")
            and id(parameter) not in embeddings
        ):
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups = [
        {"params": others, "weight_decay": settings.weight_decay, "scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "scale": 1.0},
        {"params": head[0], "weight_decay": settings.weight_decay, "scale": settings.head_scale},
        {"params": head[1], "weight_decay": 0.0, "scale": settings.head_scale},
    ]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            fused=fused or None,  # False would also keep torch from its second best
        )
    ]
    if matrices:
        # "match_rms_adamw": its updates are as large as AdamW's at the same learning rate.
        muon = torch.optim.Muon(
            [{"params": matrices, "scale": settings.muon_scale}],
            lr=0.0,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        made.append(muon)
    return made


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
