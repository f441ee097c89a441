"""Weights from a checkpoint: safetensors only, whole, and complete."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging


def load_weights(
    load: Any, source: str | Path, *arguments: Any, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """(model, loading info) from a `from_pretrained`, with its failures put in plain words."""
    options |= {"use_safetensors": True, "output_loading_info": True}
    spoken = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing or left over is reported by us
    try:
        return load(source, *arguments, **options)
    except OSError as error:
        folder = Path(source)
        if folder.is_dir() and not any(folder.rglob("*.safetensors")):
            found = [path.name for path in folder.glob("*.bin")]
            if not found:
                raise ValueError(f"{source} holds no weights: no .safetensors is there") from error
            raise ValueError(
                f"{source} has no safetensors, but {found}. Pickled weights can run code when "
                "they are loaded, so they never are: have their owner save them as safetensors"
            ) from error
        raise
    except SafetensorError as error:
        raise ValueError(f"the weights in {source} are damaged or cut off: {error}") from error
    finally:
        logging.set_verbosity(spoken)


def refuse_missing(source: str | Path, name: str, missing: Iterable[str]) -> None:
    """Raise if any are: transformers would go on with random numbers in their place."""
    lost = sorted(missing)
    if lost:
        raise ValueError(
            f"{source} calls itself {name}, but lacks {len(lost)} of its weights, among them "
            f"{lost[:4]}"
        )


def refuse_surplus(source: str | Path, name: str, unexpected: Iterable[str]) -> None:
    """Raise if weights of whole layers are left over: the model would go on without them. Other
    weights may be left over, one model's being another's head."""
    over = sorted(key for key in unexpected if re.search(r"(^|\.)layers?\.\d+\.", key))
    if over:
        raise ValueError(
            f"{source} holds {len(over)} weights of layers that its config.json does not describe "
            f"and {name} has no place for, among them {over[:4]}"
        )
