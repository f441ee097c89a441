"""Peak memory of one pass on the CPU, measured in a process of its own.

torch counts no peak for CPU tensors, so the operating system has to: the process's largest
resident set during the pass, less what was resident just before it.
"""

import importlib.util
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from longspan import machine
from longspan.bench.benchmark import Build, Case, Pass

_MIB = 1024 * 1024


def peak_growth(build: Build, case: Case, kind: Pass, threads: int) -> float:
    """MiB by which one pass of what `build` makes lets a fresh process grow."""
    methods = multiprocessing.get_all_start_methods()
    # Forked from a server that has only imported things, a child is fresh and starts at once.
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if context.get_start_method() == "forkserver":
        preload = [__name__]
        if importlib.util.find_spec("transformers"):
            # Ours first: what registers them would meet transformers half imported.
            preload += ["longspan.models", "transformers.models.longformer.modeling_longformer"]
        context.set_forkserver_preload(preload)
    # Ctrl-C reaches the child, too: it ends there without a word, and is reported here.
    quiet = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    with ProcessPoolExecutor(max_workers=1, mp_context=context, **quiet) as pool:
        return pool.submit(_measure, build, case, kind, threads).result()


def _measure(build: Build, case: Case, kind: Pass, threads: int) -> float:
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    # A small pass first: code paged in and thread pools started are no part of the growth.
    build(case.small(), device).ready(kind)()
    workload = build(case, device)
    return growth(workload.ready(kind)) + workload.resident / _MIB


def growth(run: Callable[[], object]) -> float:
    """MiB by which `run()` makes this process grow at its peak."""
    # Without this, the peak so far, such as that of building a model, would hide what stays below.
    machine.reset_peak(torch.device("cpu"))
    before = machine.resident_mib()
    run()
    return max(0.0, machine.resident_mib(peak=True) - before)
