"""`import longspan` is enough for transformers' Auto classes to know our models."""

import subprocess
import sys

import pytest

ASK = (
    "config = AutoConfig.for_model('longspan', num_hidden_layers=1, hidden_size=24, "
    "num_attention_heads=3, intermediate_size=8, vocab_size=9)\n"
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


@pytest.mark.parametrize("order", PROGRAMS)
def test_registered_in_any_order(order):
    program = PROGRAMS[order] + "print(type(AutoModel.from_config(config)).__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "LongspanModel", done.stderr[-1500:]
    assert "Warning" not in done.stderr


def test_importing_twice_leaves_one_finder():
    program = (
        "import sys, importlib, longspan\n"
        "from longspan.registration import register_with_transformers as again\n"
        "again(); again()\n"
        "print(sum(type(f).__name__ == '_AfterRegistry' for f in sys.meta_path), "
        "'transformers' in sys.modules)\n"
        "import transformers; transformers.AutoConfig\n"
        "print(sum(type(f).__name__ == '_AfterRegistry' for f in sys.meta_path))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "False", "0"], done.stderr[-1500:]
