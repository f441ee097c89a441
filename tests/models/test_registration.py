"""`import longspan` is enough for transformers' Auto classes to know our models."""

import json
import subprocess
import sys

import pytest

ASK = (
    "config = AutoConfig.for_model('longspan', num_hidden_layers=1, hidden_size=24, "
    "num_attention_heads=3, intermediate_size=8, vocab_size=9)\n"
    "print(type(AutoModel.from_config(config)).__name__)"
)
PROGRAMS = {
    "ours first": "import longspan\nfrom transformers import AutoConfig, AutoModel\n" + ASK,
    "theirs first": "from transformers import AutoConfig, AutoModel\nimport longspan\n" + ASK,
    "models first": "import longspan.models\nfrom transformers import AutoConfig, AutoModel\n"
    + ASK,
    "a model of theirs first": "import longspan\nfrom transformers import RobertaModel\n"
    "from transformers import AutoConfig, AutoModel\n" + ASK,
    "a Longformer first": "import torch, longspan\n"
    "from transformers import LongformerConfig, LongformerModel, AutoConfig, AutoModel\n" + ASK,
    "in the midst of theirs": "import transformers, longspan\ntransformers.RobertaModel\n"
    "from transformers import AutoConfig, AutoModel\n" + ASK,
    "a name first": "import longspan\nlongspan.LongspanModel\n"
    "from transformers import AutoConfig, AutoModel\n" + ASK,
}
TWICE = """
import sys, longspan
from longspan.registration import register_with_transformers as again
again(); again()
def finders(): return sum(type(finder).__name__ == '_AfterRegistry' for finder in sys.meta_path)
print(finders(), 'transformers' in sys.modules)
import transformers; transformers.AutoConfig
print(finders())
"""
# Each in a process that has neither library yet, but what both take longest to import.
FRESH = """
import json, os, sys, tempfile, traceback
import accelerate, huggingface_hub, sklearn.metrics, tokenizers
import torch.distributed.checkpoint, torch._dynamo
assert not {"transformers", "longspan"} & sys.modules.keys()
found = {}
for name, program in json.loads(sys.argv[1]).items():
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            try:
                exec(program, {})
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(0)
        os.waitpid(child, 0)
        out.seek(0), err.seek(0)
        found[name] = out.read(), err.read()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[str, str]]:
    """What each program wrote, and its errors."""
    programs = json.dumps(PROGRAMS | {"twice": TWICE})
    command = [sys.executable, "-c", FRESH, programs]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize("order", PROGRAMS)
def test_registered_in_any_order(order, said):
    out, err = said[order]
    assert out.strip() == "LongspanModel", err[-1500:]
    assert "Warning" not in err


def test_importing_twice_leaves_one_finder(said):
    out, err = said["twice"]
    assert out.split() == ["1", "False", "0"], err[-1500:]
