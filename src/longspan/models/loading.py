"""Weights from a checkpoint, safetensors only, whole, and complete; and on their way into one."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Those options of `from_pretrained` that say where on the hub, or in its cache, a file is.
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def load_weights(
    load: Any, source: str | Path, *arguments: Any, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """(model, loading info) from a `from_pretrained`, with its failures put in plain words."""
    refuse_file(source)
    resize = options.pop("ignore_mismatched_sizes", False)
    options |= {"use_safetensors": True, "output_loading_info": True}
    spoken = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing or left over is reported by us
    try:
        model, info = load(source, *arguments, ignore_mismatched_sizes=True, **options)
    except OSError as error:
        folder = Path(source)
        if folder.is_dir():
            lacking = not any(folder.rglob("*.safetensors"))
        else:  # transformers would have us load a pickle
            lacking = "safetensors" in str(error).replace(str(source), "")
        if not lacking:
            raise
        found = [path.name for path in folder.glob("*.bin")]
        if folder.is_dir() and not found:
            raise ValueError(f"{source} holds no weights: no .safetensors is there") from error
        raise ValueError(
            f"{source} has no safetensors{f', but {found}' if found else ''}. Pickled weights can "
            "run code when they are loaded, so they never are: have their owner save them as "
            "safetensors"
        ) from error
    except SafetensorError as error:
        raise ValueError(f"the weights in {source} are damaged or cut off: {error}") from error
    finally:
        logging.set_verbosity(spoken)
    if info["mismatched_keys"] and not resize:
        name, held, wanted = min(info["mismatched_keys"])
        raise ValueError(
            f"{source}: {len(info['mismatched_keys'])} weights have other sizes than the config "
            f"says, among them {name}: {tuple(held)} in the file, {tuple(wanted)} by the config. "
            "from_pretrained(..., ignore_mismatched_sizes=True) draws them anew: a head of other "
            "labels, say"
        )
    return model, info


def refuse_file(source: str | Path) -> None:
    """Raise if it is one: transformers would take it for pickled weights."""
    if Path(source).is_file():
        raise ValueError(
            f"{source} is a file; give the folder that holds config.json and the weights"
        )


def read_config(source: str | Path, *, strict: bool = False, **options: Any) -> dict[str, Any]:
    """The config.json in a folder or, with the options of `from_pretrained`, on the hub; nothing
    where there is none, or, if `strict`, the hub's error."""
    if not Path(source).is_dir():
        where = {name: options[name] for name in _WHERE if name in options}
        try:
            return PreTrainedConfig.get_config_dict(source, **where)[0]
        except OSError:
            if strict:
                raise
            return {}
    path = Path(source, options.get("subfolder") or "", "config.json")
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it is not JSON: {error}") from None
    if not isinstance(known, dict):
        raise ValueError(f"{path} is no config: it holds a {type(known).__name__}, not an object")
    return known


def read_own(source: str | Path, name: str, **options: Any) -> dict[str, Any]:
    """`read_config`, or an error if this is a model of another library, of whose weights none would
    be found, or a folder without a config, for which transformers would make one up."""
    known = read_config(source, **options)
    kind = known.get("model_type") or "longspan"
    if not kind.startswith("longspan"):
        raise ValueError(
            f"{source} holds a model of type {kind!r}, not {name}; longspan.convert makes one of "
            "longspan's of it"
        )
    adapted = Path(source, "adapter_config.json").exists()  # it names the model it belongs to
    if not known and Path(source).is_dir() and options.get("config") is None and not adapted:
        raise ValueError(f"{source} holds no {name}: there is no config.json")
    return known


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


def refuse_stray(source: str | Path, name: str, unexpected: Iterable[str]) -> None:
    """Raise if any weights are left over of what was saved by this very class. A pooler may be:
    there are models with and without one."""
    over = sorted(key for key in unexpected if "pooler." not in key)
    if over:
        raise ValueError(
            f"{source} calls itself {name}, but holds {len(over)} weights that are none of it, "
            f"among them {over[:4]}"
        )


def tell_new(source: str | Path, name: str, missing: Iterable[str]) -> None:
    """Say which weights begin with random numbers, as transformers would have said."""
    new = sorted(missing)
    if new:
        what = "pooler" if all("pooler." in key for key in new) else "head"
        logger.warning(
            f"{source} has no {what} of a {name}: {len(new)} weights are new and have to be "
            f"trained, {', '.join(new[:4])}{' ...' if len(new) > 4 else ''}"
        )


def shortest(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers, in half precision where that holds all of a tensor exactly, as it does if
    they came from there. Tensors that are one stay one."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    places = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in weights.items()}
    for name, place in places.items():
        if place not in made:
            made[place] = _shortest(weights[name])
    return {name: made[place] for name, place in places.items()}


def _shortest(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float32:
        for half in (torch.float16, torch.bfloat16):
            if torch.equal(tensor.to(half).float(), tensor):
                return tensor.to(half)
    return tensor
