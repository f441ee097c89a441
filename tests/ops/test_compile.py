"""The kernels compile for real GPUs. Needs no GPU: Triton carries its own assembler.

The interpreter accepts programs that the compiler refuses (a loop variable that changes its type,
say), so without this a machine without a GPU would find out last.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

# In a process apart: here the kernels may be interpreted. One for all programs, as it takes seconds
# to begin; what they print goes to the errors.
COMPILER = """
import json
import os
import sys
import traceback

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    program, *sys.argv[1:] = json.loads(line)
    try:
        exec(program, {})
        answer = "compiled"
    except BaseException:
        answer = traceback.format_exc()
    print(json.dumps(answer), file=answers, flush=True)
"""

PROGRAM = """
import subprocess
import sys
import tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from longspan.ops.rows import kernels as late_kernels
from longspan.ops.window import kernels, row_kernels

INTEGERS = {"START", "STOP", "HOLES", "RANK", "PLACES", "AT"}
FLOATS = {"LSE", "DELTA", "PART", "PART_LSE", "PART_MASS", "WHOLE", "WHOLE_LSE", "WHOLE_MASS",
          "MASS", "DMASS"}

def build(name, capability, kind, options=None, **chosen):
    found = (getattr(module, name, None) for module in (kernels, row_kernels, late_kernels))
    function = next(kernel for kernel in found if kernel is not None).kernel
    flags = {"HEAD_DIM": 24, "D": 32, "BM": 64, "BN": 32, "BG": 16, "MOST": 64, "DILATED": False,
             "BOUNDED": True, "GLOBAL": True, "CAUSAL": False, "ROWS": True, "DROPOUT": False,
             "BULK": False, "HEADS": 4, "PRECISION": "tf32x3",
             "DIM": 184, "WIDE": 128, "NARROW": 64, "BR": 16, "HD": 32, "BK": 64, "BC": 64,
             "INNER": 96, "PARTS": 2, "WEIGHTS": 3, "BIASES": 3,
             "PROJECT": True, "BIASED": True, "SOFTMAX": True} | chosen
    signature, constants, hints = {}, {}, {}
    for place, argument in enumerate(function.arg_names):
        if argument in flags:
            signature[argument] = "constexpr"
            constants[(place,)] = flags[argument]
        elif argument.endswith("_TILES") and flags["BULK"]:
            rows = flags["BM"] if argument in ("Q_TILES", "GRAD_TILES") else flags["BN"]
            signature[argument] = f"tensordesc<{kind}[1,{rows},{flags['D']}]>"
        elif argument.isupper():
            pointer = "i32" if argument in INTEGERS else "fp32" if argument in FLOATS else kind
            signature[argument] = "*i64" if argument == "SEED" else "*" + pointer
            hints[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument in ("scale", "factor", "boost") else "i32"
            if argument.endswith(("_batch", "_token", "_head")) or argument == "lse_row":
                hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

name, capability, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
# With all there is; on one of the targets with nothing of it, too.
for rich in (False, True) if (capability, kind) == (90, "bf16") else (True,):
    compiled = build(name, capability, kind, DILATED=rich, DROPOUT=rich, CAUSAL=rich)
    assert compiled.asm["cubin"]
if capability >= 90 and kind == "bf16" and name in ("pool", "pool_backward"):
    # The usual size must fit: in shared memory, and in registers without a stack to spill to.
    chosen = {"DIM": 768, "WIDE": 512, "NARROW": 256, "BN": 64 if name == "pool" else 32}
    compiled = build(name, capability, kind, {"num_warps": 8, "num_stages": 3}, **chosen)
    assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in used, used
elif capability >= 90 and kind == "bf16":  # the GPU's copy engine
    assert build(name, capability, kind, HEAD_DIM=64, D=64, BULK=True, ROWS=False).asm["cubin"]
"""

HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon import language as gl
from longspan.ops.window import hopper

INTEGERS = {"START", "STOP", "HOLES", "RANK", "PLACES"}
for head_dim in (32, 64, 128):
    for rich in (False, True):
        flags = {"D": head_dim, "BM": 64, "BN": 64, "BG": 16, "BOUNDED": rich, "GLOBAL": rich,
                 "ROWS": not rich, "CAUSAL": rich, "num_warps": 4}
        signature, constants = {}, {}
        for place, argument in enumerate(hopper.forward.kernel.arg_names):
            if argument in flags:
                signature[argument] = "constexpr"
                constants[(place,)] = flags[argument]
            elif argument.endswith("_TILES"):
                block = [1, 64, head_dim]
                layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
                signature[argument] = f"tensordesc<bf16{block},{layout!r}>"
            elif argument.isupper():
                pointer = "i32" if argument in INTEGERS else "fp32" if argument == "LSE" else "bf16"
                signature[argument] = "*" + pointer
            else:
                signature[argument] = "fp32" if argument == "scale" else "i32"
        source = GluonASTSource(hopper.forward.kernel, signature, constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""

FAMILY = """
import sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INTEGERS = {"CLUSTERS": "i32", "BY_TOKEN": "i32", "MARKS": "i32", "START": "i32", "PLACES": "i32",
            "ORDER": "i64", "SLOTS": "i64", "SEED": "i64", "FOUND": "i64", "LISTED": "i64",
            "FIRST": "i64", "LAST": "i64", "EXTENT": "i32", "VALID": "u8", "COUNTED": "i32",
            "COUNTS": "i32", "SUMMED": "i32"}
FLOATS = {"LSE", "PART_LSE", "SUMS", "SCORES", "SPANS", "DSPANS", "DELTA", "K_SUMS", "V_SUMS",
          "TOTALS", "WIDE", "LOGS", "TRACE", "OFFSETS", "TOPS", "SHIFT", "EXTRA", "EXTRAS",
          "STARTED", "STARTED_EXTRA", "SUM"}
# What has another type elsewhere.
OWN_FLOATS = {"listed_kernels": {"DK", "DV"}, "relative_kernels": {"DK", "DV"},
              "features.causal_kernels": {"START"}}
NUMBERS = {"scale", "factor", "boost", "half", "least", "back", "lower", "lift", "down"}
FLAGS = {"HEAD_DIM": 24, "D": 32, "BM": 64, "BN": 32, "BK": 32, "BF": 64, "BD": 16, "BLOCK": 512,
         "ROUNDS": 3, "CAUSAL": False, "ROUTED": False, "SELF_LAST": True, "MEAN": True,
         "OPPOSITES": True, "RUNS": False, "BETWEEN": True, "MASKED": True, "FADING": True,
         "DROPOUT": False, "KEYS": True, "WHOLE": True, "TOKENS": True, "STEPS": 6,
         "PADDED": True, "CHUNK": 64, "KEEP": True, "REVERSE": False, "PRECISION": "tf32x3"}
# Where a kernel is, and how it is compiled: the first way for all targets, the others for one.
PARTS = {
    "clustered.kernels": {
        **dict.fromkeys(("settle", "spread", "merge", "gather"), [{}]),
        **dict.fromkeys(("forward", "backward_query", "backward_key"), [
            {}, {"ROUTED": True, "ROUNDS": 1, "DROPOUT": True}, {"CAUSAL": True, "SELF_LAST": False}
        ]),
    },
    "centroid_kernels": dict.fromkeys(("nearest", "select"), [{}]),
    "listed_kernels": {
        "extent": [{}, {"CAUSAL": True, "FADING": False}],
        **dict.fromkeys(("forward", "backward_query", "backward_key"), [
            {}, {"RUNS": True, "BETWEEN": False, "FADING": False, "DROPOUT": True, "KEYS": False},
            {"CAUSAL": True, "FADING": False}, {"CAUSAL": True, "FADING": False, "RUNS": True},
        ]),
    },
    "relative_kernels": dict.fromkeys(
        ("forward", "backward_query", "backward_key"), [{}, {"DROPOUT": True}]
    ),
    "span_kernels": dict.fromkeys(
        ("means", "means_backward"), [{}, {"MASKED": False, "TOKENS": False}]
    ),
    "features.kernels": dict.fromkeys(
        ("sum_keys", "join_keys", "read", "backward_query", "sum_queries", "join_queries",
         "backward_key"), [{}],
    ),
    "features.causal_kernels": {
        **dict.fromkeys(("peaks", "read", "backward_query", "backward_key"), [{}]),
        "walk": [{}, {"KEEP": False}, {"REVERSE": True}, {"KEEP": False, "REVERSE": True}],
        "join": [{}, {"REVERSE": True}],
    },
}

part, capability, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
module = import_module(f"longspan.ops.{part}")
for name, variants in PARTS[part].items():
    function = getattr(module, name).kernel
    for variant in variants if (capability, kind) == (90, "bf16") else variants[:1]:
        flags = FLAGS | variant
        floats = FLOATS | OWN_FLOATS.get(part, set())
        signature, constants, hints = {}, {}, {}
        for place, argument in enumerate(function.arg_names):
            if argument in flags and function.params[place].is_constexpr:
                signature[argument] = "constexpr"
                constants[(place,)] = flags[argument]
            elif argument.isupper():
                pointer = "fp32" if argument in floats else INTEGERS.get(argument, kind)
                signature[argument] = "*" + pointer
                hints[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[argument] = "fp32" if argument in NUMBERS else "i32"
        source = ASTSource(function, signature, constants, hints)
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
"""
PARTS = (
    "clustered.kernels",
    "centroid_kernels",
    "listed_kernels",
    "relative_kernels",
    "span_kernels",
    "features.kernels",
    "features.causal_kernels",
)

KERNELS = (
    "forward",
    "backward_query",
    "backward_key",
    "put_rows",
    "global_forward",
    "global_forward_merge",
    "global_backward",
    "global_backward_merge",
    "fold",
    "pool",
    "merge",
    "project",
    "spread",
    "pool_backward",
    "weight_grads",
    "return_rows",
)
TARGETS = [(80, "fp16"), (90, "bf16"), (90, "fp32")]


pytestmark = pytest.mark.skipif(
    torch.version.hip is not None, reason="an NVIDIA toolchain is needed"
)


class Compiler:
    """Runs programs one after the other; begun anew should one of them end it."""

    process: subprocess.Popen | None = None

    def run(self, program: str, *arguments: str) -> None:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMPILER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TRITON_INTERPRET": "0"},
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([program, *arguments]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            pytest.fail(f"the compiler ended with status {self.process.wait()}")
        assert json.loads(answer) == "compiled"

    def end(self) -> None:
        if self.process is not None:
            self.process.communicate()


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.end()


@pytest.mark.parametrize(("kernel", "target"), list(itertools.product(KERNELS, TARGETS)), ids=str)
def test_compiles_for_a_real_gpu(kernel, target, compiler):
    capability, kind = target
    compiler.run(PROGRAM, kernel, str(capability), kind)


def test_the_kernel_for_hopper_compiles(compiler):
    compiler.run(HOPPER)


@pytest.mark.parametrize(("part", "target"), list(itertools.product(PARTS, TARGETS)), ids=str)
def test_the_kernels_of_the_family_compile(part, target, compiler):
    capability, kind = target
    compiler.run(FAMILY, part, str(capability), kind)
