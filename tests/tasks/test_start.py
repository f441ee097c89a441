"""What training starts from, and what cannot be that."""

import pytest
import torch
from tasks.finetuned import QUIET, recipe

from longspan.models import LongspanForMaskedLM
from longspan.tasks.finetune import finetune, load_model, make_task
from longspan.tasks.predict import find_run
from longspan.tasks.start import has_head, load_tokenizer
from longspan.train.recipe import change


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


@pytest.mark.parametrize("name", ["classify", "spans", "choice", "multihop", "coref"])
def test_a_head_is_kept_on_demand(name, tmp_path):
    made = recipe(name, tmp_path, epochs=0.5, too_long="head")
    finetune(make_task(made), tmp_path / "run", console=QUIET)
    trained = load_model(*find_run(tmp_path / "run", "best")).state_dict()
    heads = [one for one in trained if not one.startswith("encoder.")]
    assert heads
    for head in ("new", "kept"):
        again = {"model.source": str(tmp_path / "run"), "model.head": head}
        weights = make_task(change(made, again)).build().state_dict()
        same = [torch.equal(weights[one], trained[one]) for one in trained]
        assert all(same) == (head == "kept")


def test_a_head_that_cannot_be_kept_is_named(tmp_path):
    made = recipe("classify", tmp_path, epochs=0.5, model__head="kept")
    with pytest.raises(ValueError, match=r"model\.head=kept: .* has no head for this task"):
        make_task(made).build()
    finetune(make_task(change(made, {"model.head": "new"})), tmp_path / "run", console=QUIET)
    data = tmp_path / "animals.csv"
    data.write_text(data.read_text().replace(",dog", ",cow"))
    with pytest.raises(ValueError, match=r"id2label=.*dog.*, these examples id2label=.*cow"):
        make_task(change(made, {"model.source": str(tmp_path / "run")})).build()
