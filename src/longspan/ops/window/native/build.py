"""Compiles the `native` backend with the system's C++ compiler, next to this file.

The package's build runs this (see `hatch_build.py`), and so can anyone:
`python -m longspan.ops.window.native.build`. Needs nothing but Python's standard library, since
it runs before longspan can be imported. The library has a plain C interface and knows nothing of
torch or Python, so one build serves every version of both.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = Path(os.environ.get("LONGSPAN_NATIVE_LIBRARY") or HERE / "longspan_native.so")
FAILURE = HERE / "build_failure.txt"  # why the last build made no library

# Without OpenMP one thread would have to beat all of `blocked`: then rather no library.
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]
_X86 = {
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16"],
    "avx512": ["-march=x86-64-v4"],
    "avx2": ["-march=x86-64-v3"],
}


class BuildError(RuntimeError):
    """No library could be built; the message says why."""


def source_hash() -> str:
    """Of everything the library is made of, to notice one that was built from something else."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """$CXX, or the first of c++, g++ and clang++ that is there."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BuildError("there is no C++ compiler: install g++ or clang++, or set CXX")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        said = done.stderr.strip()[-2000:] or "it says nothing"
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {said}")


def compile_library(to: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile and link the library `to`, with code for every instruction set in it."""
    if sys.platform == "win32":
        raise BuildError("the native kernels are written for GCC and Clang, not for Windows yet")
    compiler = find_compiler()
    targets = _X86 if platform.machine().lower() in ("x86_64", "amd64") else {}
    with tempfile.TemporaryDirectory() as folder:
        _compile(compiler, targets, Path(folder), extra)
        # Renamed into place, so that nobody ever loads half of it.
        part = to.with_name(f"{to.name}.{os.getpid()}.part")
        shutil.copyfile(Path(folder, "library"), part)
        part.replace(to)


def _compile(
    compiler: list[str], targets: dict[str, list[str]], folder: Path, extra: tuple[str, ...]
) -> None:
    objects = []
    for target, machine in {**targets, "plain": []}.items():
        objects.append(str(folder / f"{target}.o"))
        source = str(HERE / "attention.cpp")
        flags = [*_FLAGS, *machine, *extra, f"-DTARGET={target}"]
        _run([*compiler, *flags, "-c", source, "-o", objects[-1]])
    defined = f'-DSOURCE="{source_hash()}"'
    dispatch = ["-fvisibility=default", defined, str(HERE / "dispatch.cpp")]
    shared = [*_FLAGS, *extra, *dispatch, *objects, "-shared", "-o", str(folder / "library")]
    _run([*compiler, *shared])


def build(extra: tuple[str, ...] = ()) -> str | None:
    """Build in place. None if there is a library now, or the reason, which is also kept."""
    try:
        compile_library(LIBRARY, extra)
    except BuildError as error:
        LIBRARY.unlink(missing_ok=True)
        FAILURE.write_text(f"{error}\n")
        return str(error)
    FAILURE.unlink(missing_ok=True)
    return None


if __name__ == "__main__":
    reason = build(tuple(sys.argv[1:]))  # further flags of the compiler
    if reason is None:
        print(f"built {LIBRARY}")
    sys.exit(reason)
