"""What training starts from, and what cannot be that."""

import pytest

from longspan.models import LongspanForMaskedLM
from longspan.tasks.start import has_head, load_tokenizer


def test_what_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for look in (load_tokenizer, lambda source: has_head(source, LongspanForMaskedLM)):
        with pytest.raises(ValueError, match="holds no model: there is no config"):
            look(tmp_path)
        with pytest.raises(ValueError, match=r"notes\.txt is a file; give the folder"):
            look(tmp_path / "notes.txt")
        with pytest.raises(ValueError, match=r"nowhere does not exist, and is no name on the hub"):
            look(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=r"\./nowhere does not exist"):
            look("./nowhere")


def test_the_hub_is_asked_once(monkeypatch):
    asked = []

    def absent(source, **options):
        asked.append(source)
        raise OSError("no connection")

    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", absent)
    with pytest.raises(ValueError, match=r"runs/x is neither a folder here nor .*no connection"):
        load_tokenizer("runs/x")
    assert asked == ["runs/x"]
