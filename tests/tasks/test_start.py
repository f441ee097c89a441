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
        with pytest.raises(ValueError, match=r"nowhere is neither a folder here nor a model"):
            look(tmp_path / "nowhere")
