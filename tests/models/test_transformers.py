"""Our models in transformers' own tools: two steps of Trainer, and the pipelines."""

import math
from typing import Any

import pytest
import torch
import transformers
from models.small import HEADS, MODERN, batch, build, labels

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "the", "cat", "sat", "on", "a", "mat"]


def words() -> Any:
    """A tokenizer of eleven words, in RoBERTa's order."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        cls_token="<s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=64,
    )


@pytest.mark.parametrize("changes", [{}, MODERN], ids=["bert", "modern"])
@pytest.mark.parametrize("head", HEADS[1:])
def test_two_steps_of_training_and_an_evaluation(head, changes, tmp_path):
    model, given = build(head, **changes), batch(head)
    given.pop("global_attention_mask")
    given |= labels(head, given)
    rows = [{name: tensor[i] for name, tensor in given.items()} for i in range(2)] * 2
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            gradient_checkpointing=True,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        eval_dataset=rows,  # pyright: ignore[reportArgumentType]
    )
    done = trainer.train()
    assert done.global_step == 2
    assert math.isfinite(done.training_loss)
    changed = [name for name, p in model.named_parameters() if not torch.equal(before[name], p)]
    assert "encoder.layers.0.up.weight" in changed
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def pipe(task, head, **changes) -> Any:
    model = build(head, vocab_size=len(WORDS), **changes)
    return transformers.pipeline(task, model=model, tokenizer=words(), device="cpu")


@pytest.mark.parametrize("changes", [{}, MODERN], ids=["bert", "modern"])
def test_pipelines(changes):
    filled = pipe("fill-mask", "ForMaskedLM", **changes)("the cat <mask> on a mat")
    assert len(filled) == 5
    assert filled[0]["sequence"].startswith("the cat")

    text = ["the cat sat", "a mat"]
    scored = pipe("text-classification", "ForSequenceClassification", **changes)(text, batch_size=2)
    assert [one["label"].startswith("LABEL_") for one in scored] == [True, True]

    tagged = pipe("token-classification", "ForTokenClassification", **changes)(text[0])
    assert [one["word"] for one in tagged] == ["the", "cat", "sat"]
    assert [(one["start"], one["end"]) for one in tagged] == [(0, 3), (4, 7), (8, 11)]

    states = pipe("feature-extraction", "Model", **changes)(text[0])
    assert torch.tensor(states).shape == (1, 5, 24)


def test_zero_shot():
    """The pipeline pairs text and label, and wants to know which score means yes."""
    sizes = {"num_labels": 2, "label2id": {"contradiction": 0, "entailment": 1}}
    ask = pipe("zero-shot-classification", "ForSequenceClassification", **sizes)
    found = ask("the cat sat on a mat", candidate_labels=["cat", "mat"])
    assert sorted(found["labels"]) == ["cat", "mat"]
    assert sum(found["scores"]) == pytest.approx(1.0, abs=1e-5)
