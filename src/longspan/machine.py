"""What longspan runs on and with: versions, devices, the source itself. Never a host name."""

import contextlib
import ctypes
import gc
import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import longspan

PACKAGE = Path(__file__).parent


def versions() -> dict[str, str | None]:
    """Version of everything that can change a result; None for what is not installed."""
    found: dict[str, str | None] = {
        "longspan": longspan.__version__,
        "python": platform.python_version(),
    }
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    return found


def source_digest(*parts: str) -> str:
    """A short hash of files and folders of ours, to tell numbers of changed code apart."""
    digest = hashlib.sha256()
    for part in parts:
        root = PACKAGE / part
        ours = (path for path in root.rglob("*") if path.suffix in (".py", ".h", ".cpp"))
        for path in [root] if root.is_file() else sorted(ours):
            digest.update(path.relative_to(PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The commit this package is a checkout of, marked if there are uncommitted changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=10
        ).stdout.strip()

    try:
        # Installed into an environment inside some other repository, that one is not ours.
        if Path(git("rev-parse", "--show-toplevel")) / "src" / "longspan" != PACKAGE.resolve():
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_count() -> int:
    """Cores this process may use, which a container may have made fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(device: torch.device, threads: int) -> str:
    """One line naming the machine a result was measured on, e.g. "1x NVIDIA H200"."""
    if device.type == "cuda":
        return f"1x {torch.cuda.get_device_name(device)}"
    return f"{cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"


def record() -> dict[str, Any]:
    """What a result is kept with: the device that runs take, versions and commit."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "machine": describe(device, torch.get_num_threads()),
        "versions": versions(),
        "commit": commit(),
    }


def reset_peak(device: torch.device) -> None:
    """Give freed memory back and forget the peak so far, where that can be had."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    # What the C library keeps of freed memory would hide growth later on.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib(device: torch.device) -> float:
    """The most memory in use since `reset_peak`: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resident_mib(peak=True)


def resident_mib(*, peak: bool = False) -> float:
    """Of this process: now, or at most so far."""
    field = "VmHWM" if peak else "VmRSS"
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    import resource

    # Only a peak is to be had here: growth then counts from the largest set so far.
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (2**20 if sys.platform == "darwin" else 1024)
