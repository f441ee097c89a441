"""What is installed, which devices there are, and which backends can run on each."""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan import machine
from longspan.ops.backends import Backend, choose
from longspan.ops.window import BACKENDS, native

# What a first model would use: the dtype most common on the device, the usual head size.
_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
_HEAD_DIM = 64


def examine() -> dict[str, Any]:
    """Everything `longspan doctor` prints, as plain data."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {"versions": machine.versions(), "devices": [_examine_device(d) for d in devices]}


def _examine_device(device: torch.device) -> dict[str, Any]:
    dtype = _DTYPE[device.type]
    try:
        auto = choose("auto", BACKENDS, device, dtype, _HEAD_DIM).name
    except ValueError:
        auto = None
    return {
        "device": str(device),
        **_hardware(device),
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": _HEAD_DIM,
        "auto": auto,
        "backends": [_examine_backend(backend, device, dtype) for backend in BACKENDS],
    }


def _examine_backend(backend: Backend, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    found = {"name": backend.name, "summary": backend.summary}
    refusal = backend.refusal(device, dtype, _HEAD_DIM)
    if backend.name == "native" and refusal is None:
        try:
            found["instruction_set"] = native.target()
        except ValueError as error:  # one was asked for that this CPU has not
            refusal = str(error)
    return {**found, "refusal": refusal}


def _hardware(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {
            "name": machine.cpu_name(),
            "cores": machine.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def show(findings: dict[str, Any], console: Console) -> None:
    """Print what `examine` found."""
    table = Table(title="Versions", title_justify="left", title_style="bold", show_header=False)
    for name, version in findings["versions"].items():
        table.add_row(name, version or Text("not there", "dim"))
    console.print(table)
    for device in findings["devices"]:
        _show_device(device, console)


def _show_device(device: dict[str, Any], console: Console) -> None:
    facts = [device["name"]]
    if "memory_gib" in device:
        facts += [f"{device['memory_gib']} GiB", f"compute capability {device['capability']}"]
        facts += [f"{device['multiprocessors']} multiprocessors"]
    else:
        facts += [_counted(device["cores"], "core"), _counted(device["threads"], "thread")]
        facts += [device["capability"]]
    table = Table(
        title=f"{device['device']}: {', '.join(facts)}",
        title_justify="left",
        title_style="bold",
        caption=f"asked for {device['dtype']}, head size {device['head_dim']}",
        caption_justify="left",
    )
    table.add_column("backend")
    table.add_column("what it is")
    table.add_column("here", overflow="fold")  # commands to copy stand there
    for backend in device["backends"]:
        here = Text(backend["refusal"] or "can run", "" if backend["refusal"] else "green")
        if backend["name"] == device["auto"]:
            here.append(" (auto picks it)", "bold")
        used = f": {backend['instruction_set']}" if "instruction_set" in backend else ""
        table.add_row(backend["name"], backend["summary"] + used, here)
    console.print(table)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
