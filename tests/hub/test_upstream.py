"""Transformers' own tests of Longformer and LED pass on patched models as they do on stock ones."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import transformers

import longspan

VARIABLE = "LONGSPAN_TRANSFORMERS_TESTS"
HERE = Path(__file__).parent
MISSING = (
    f"transformers' tests are not in its wheel: git clone --depth 1 --branch "
    f"v{transformers.__version__} https://github.com/huggingface/transformers, pip install "
    f"parameterized sentencepiece, and set {VARIABLE} to the clone"
)


def run(clone: Path, report: Path, **more: str) -> tuple[dict[str, str], int]:
    """Test -> "passed", "failed" or "skipped"; and how many models were patched."""
    ours = Path(longspan.__file__).parents[1]
    paths = [str(HERE), str(ours), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "upstream_plugin"),
            f"--junitxml={report}",
            *(f"tests/models/{name}/test_modeling_{name}.py" for name in ("longformer", "led")),
        ],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"} | more,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "skipped" if "skipped" in kinds else "passed"
        outcome = "failed" if kinds & {"failure", "error"} else outcome
        name = f"{case.get('classname')}.{case.get('name')}"
        # Subtests are cases of the same name: one that failed decides.
        outcomes[name] = "failed" if outcomes.get(name) == "failed" else outcome
    patched = re.search(r"longspan patched (\d+) models", done.stdout)
    return outcomes, int(patched[1]) if patched else 0


@pytest.mark.slow
@pytest.mark.skipif(VARIABLE not in os.environ, reason=MISSING)
def test_what_passes_unpatched_passes_patched(tmp_path):
    clone = Path(os.environ[VARIABLE])
    source = (clone / "src" / "transformers" / "__init__.py").read_text(encoding="utf8")
    version = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)
    assert version is not None
    assert version[1] == transformers.__version__, f"{clone} is of another version than installed"
    stock, untouched = run(clone, tmp_path / "stock.xml")
    patched, made = run(clone, tmp_path / "patched.xml", LONGSPAN_PATCH="1")
    for name, outcomes in (("stock", stock), ("patched", patched)):
        kinds = ("passed", "failed", "skipped")
        print(name, {kind: list(outcomes.values()).count(kind) for kind in kinds})
    assert untouched == 0
    assert made > 100
    assert list(stock.values()).count("passed") > 100
    worse = sorted(test for test in stock if stock[test] != patched.get(test) != "passed")
    assert not worse
