"""The encoder-decoder: generation, caches, losses, saving, compiling, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.small import SEP, VOCAB, short_sizes, spread
from torch.nn.functional import cross_entropy

import longspan
from longspan.models.targets import shift_right


def build(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 64, "attention": {"window": 8}, "decoder_positions": 24}
    config = longspan.LongspanSeq2SeqConfig(**short_sizes(**(settings | changes)))
    return spread(longspan.LongspanForConditionalGeneration(config))


def document(batch: int = 2, tokens: int = 37) -> torch.Tensor:
    return torch.randint(4, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(0))


def target(batch: int = 2, tokens: int = 9) -> torch.Tensor:
    labels = torch.randint(4, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(1))
    labels[:, -1] = SEP
    return labels


@pytest.mark.parametrize("modern", [False, True])
def test_a_cache_changes_nothing(modern):
    """Token by token, and in pieces, as all at once; also behind padding."""
    changes = {"norm_first": True, "first_norm": True, "embedding_scale": True} if modern else {}
    model = build(**changes)
    ids, given = document(), target()
    mask = torch.ones_like(given)
    mask[1, :2] = 0
    for target_mask in (None, mask):
        whole = model(ids, decoder_input_ids=given, decoder_attention_mask=target_mask)
        encoded = model.encoder(ids)
        for steps in ([1] * 9, [4, 5], [3, 1, 5]):
            cache, found, at = None, [], 0
            for step in steps:
                seen = None if target_mask is None else target_mask[:, : at + step]
                made = model(
                    encoder_outputs=encoded,
                    decoder_input_ids=given[:, at : at + step],
                    decoder_attention_mask=seen,
                    past_key_values=cache,
                    use_cache=True,
                )
                cache, at = made.past_key_values, at + step
                found.append(made.logits)
            kept = slice(None) if target_mask is None else target_mask.bool()
            difference = (torch.cat(found, 1) - whole.logits)[kept]
            assert difference.abs().max() <= 2e-5


def test_later_tokens_are_not_seen():
    model, ids, given = build(), document(), target()
    changed = given.clone()
    changed[:, 5:] = 7
    one, other = (model(ids, decoder_input_ids=each).logits for each in (given, changed))
    assert torch.equal(one[:, :5], other[:, :5])
    assert not torch.equal(one[:, 5:], other[:, 5:])


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"num_beams": 4, "length_penalty": 2.0, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 3, "do_sample": True},
    ],
)
def test_generation_needs_no_cache(asked):
    """The tokens are those of a model that computes everything anew at each step."""
    model, ids = build(), document()
    asked = {"max_new_tokens": 12, "no_repeat_ngram_size": 1, **asked}
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        found.append(model.generate(ids, use_cache=use_cache, **asked))
    assert torch.equal(*found)
    assert found[0].shape[0] == 2 * asked.get("num_return_sequences", 1)


def test_generated_tokens_follow_the_document():
    """Each row of a batch with beams reads its own document, and its global tokens."""
    model, ids = build(), document(3)
    asked = {"num_beams": 4, "max_new_tokens": 12, "no_repeat_ngram_size": 1}
    together = model.generate(ids, **asked)
    for row in range(3):
        alone = model.generate(ids[row : row + 1], **asked)
        assert torch.equal(together[row, : alone.shape[1]], alone[0])
    none = model(ids, decoder_input_ids=target(3), global_attention_mask=torch.zeros_like(ids))
    assert not torch.equal(none.logits, model(ids, decoder_input_ids=target(3)).logits)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_changes_no_generated_token(padding):
    """A document among longer ones is written about as it is alone, with beams and without."""
    model, ids = build(), document()
    mask = torch.ones_like(ids)
    real = slice(9, None) if padding == "left" else slice(None, -9)
    mask[1] = 0
    mask[1, real] = 1
    # Learned positions count from the row's beginning, so that left padding shifts them.
    given = {"max_new_tokens": 12, "no_repeat_ngram_size": 1}
    for beams in (1, 3):
        together = model.generate(ids, attention_mask=mask, num_beams=beams, **given)
        changed = ids.masked_fill(mask == 0, 5)
        assert torch.equal(
            model.generate(changed, attention_mask=mask, num_beams=beams, **given), together
        )
        for row in range(2) if padding == "right" else [0]:
            alone = ids[row : row + 1, mask[row].bool()]
            found = model.generate(alone, num_beams=beams, **given)
            assert torch.equal(together[row, : found.shape[1]], found[0])


def test_several_targets_of_a_document_share_its_source():
    model, ids = build(), document()
    targets = torch.cat((target(), target().flip(1)))[[0, 2, 1, 3]]  # two of each document
    wanted = model(ids.repeat_interleave(2, 0), decoder_input_ids=targets).logits
    found = model(encoder_outputs=model.encoder(ids), decoder_input_ids=targets).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match="2 documents, but 3 targets"):
        model(encoder_outputs=model.encoder(ids), decoder_input_ids=targets[:3])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_replayed_step_writes_the_same(beams, padded, monkeypatch):
    """What a captured graph would do, done by a stand-in: no step may need anything but the token
    and what the cache holds."""
    from longspan.models.steps import StepCache

    class Replay:
        def __init__(self, cache, write):
            self.cache, self.write = cache, write

        def replay(self):
            self.cache._scores = self.write(self.cache._token)
            self.cache.self_attention_cache.count -= 1  # which the real one leaves to the caller

    model, ids = build(decoder_positions=64), document()
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    given = {"attention_mask": mask if padded else None, "num_beams": beams}
    given |= {"max_new_tokens": 40, "min_new_tokens": 40, "no_repeat_ngram_size": 2}
    plain = model.generate(ids, **given)
    replays = []

    def capture(cache, write):
        replays.append(Replay(cache, write))
        return replays[-1]

    monkeypatch.setattr(StepCache, "_capture", capture)
    made = StepCache.__init__

    def on_gpu(self, *arguments, **options):
        made(self, *arguments, **options)
        self._captures = options["capture"]

    monkeypatch.setattr(StepCache, "__init__", on_gpu)
    assert torch.equal(model.generate(ids, **given), plain)
    assert len(replays) == 1
    model.capture_steps = False
    assert torch.equal(model.generate(ids, **given), plain)
    model.capture_steps, model.hf_device_map = True, {"encoder": 0, "decoder": 1}
    assert torch.equal(model.generate(ids, **given), plain)
    assert len(replays) == 1


@torch.no_grad()
def test_what_generate_kept_has_an_end():
    """Going on from it is right up to there, and refused beyond."""
    model, ids = build(decoder_positions=64), document()
    given = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    made = model.generate(ids, return_dict_in_generate=True, **given)
    cache = made.past_key_values
    assert not cache.is_croppable
    room = cache.self_attention_cache.positions - cache.get_seq_length()
    assert room > 1
    more = torch.full((2, room), 5)
    source = {"encoder_outputs": model.encoder(ids)}
    found = model(decoder_input_ids=more[:, :1], past_key_values=cache, **source).logits
    whole = torch.cat((made.sequences[:, :-1], more[:, :1]), dim=1)
    wanted = model(decoder_input_ids=whole, **source).logits[:, -1:]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"holds 11 tokens and was made by generate for 16"):
        model(decoder_input_ids=more, past_key_values=cache, **source)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("asked", [{}, {"num_beams": 4}, {"do_sample": True, "top_k": 5}])
def test_steps_captured_on_a_gpu_write_the_same(asked, padded, precision):
    model, ids = build(decoder_positions=64).cuda(), document().cuda()
    if precision == "bfloat16":
        model.to(torch.bfloat16)
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    given = {"attention_mask": mask if padded else None, **asked}
    given |= {"max_new_tokens": 48, "min_new_tokens": 48, "no_repeat_ngram_size": 2}
    found = []
    for capture in (False, True, True):
        model.capture_steps = capture
        torch.manual_seed(0)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            found.append(model.generate(ids, return_dict_in_generate=True, **given))
    plain, *captured = (one.sequences for one in found)
    assert all(one.past_key_values._graph is not None for one in found[1:])
    assert all(torch.equal(one, plain) for one in captured)
    torch.randn(4, device="cuda")  # the generator was left in order


def test_generation_goes_on_from_a_given_beginning():
    model, ids = build(), document()
    start = torch.tensor([[SEP, 5, 6], [SEP, 7, 8]])
    found = [
        model.generate(
            ids, decoder_input_ids=start, num_beams=3, max_new_tokens=8, use_cache=use_cache
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(*found)
    assert torch.equal(found[0][:, :3], start)
    mask = torch.ones_like(start)
    mask[1, 1] = 0
    given = {"decoder_input_ids": start, "decoder_attention_mask": mask, "max_new_tokens": 8}
    one, other = (model.generate(ids, use_cache=use, **given) for use in (True, False))
    assert torch.equal(one, other)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_first_token_is_global_wherever_it_stands(padding):
    model, ids = build(), document()
    mask = torch.ones_like(ids)
    mask[1, slice(None, 9) if padding == "left" else slice(-9, None)] = 0
    chosen = model(ids, mask, decoder_input_ids=target()).global_attention_mask
    assert chosen.nonzero().tolist() == [[0, 0], [1, 9 if padding == "left" else 0]]
    assert "row 1: 1 of 37 tokens are global" in longspan.explain_global(chosen)


def test_the_loss_and_its_smoothing():
    model, ids, labels = build(), document(), target()
    labels[1, 5:] = -100
    output = model(ids, labels=labels)
    before = torch.full_like(labels, SEP)
    before[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == -100, 1)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), before)
    logits = model(ids, decoder_input_ids=before).logits
    asked = labels != -100
    plain = cross_entropy(logits[asked], labels[asked])
    torch.testing.assert_close(output.loss, plain)
    assert output.past_key_values is None
    model.config.label_smoothing = 0.1
    uniform = -logits[asked].log_softmax(-1).mean()
    torch.testing.assert_close(model(ids, labels=labels).loss, 0.9 * plain + 0.1 * uniform)


def test_a_target_may_begin_with_its_own_last_token():
    config = build(wrap_target=True, decoder_start_token_id=None).config
    labels = torch.tensor([[5, 6, 2, 50], [7, 2, 51, -100]])
    assert shift_right(config, labels).tolist() == [[50, 5, 6, 2], [51, 7, 2, 51]]


def test_saved_and_loaded(tmp_path: Path):
    model, ids, labels = build(), document(), target()
    model.final_logits_bias.normal_()
    model.generation_config.num_beams = 3
    model.save_pretrained(tmp_path)
    assert [path.suffix for path in tmp_path.glob("model*")] == [".safetensors"]
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, longspan.LongspanSeq2SeqConfig)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids, labels=labels).logits, model(ids, labels=labels).logits)
    assert again.generation_config.num_beams == 3
    words = again.get_input_embeddings().weight
    assert again.lm_head.weight is words
    assert again.decoder.embeddings.words.weight is words


def test_a_checkpoint_without_its_decoder_is_refused(tmp_path: Path):
    build(decoder_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks .* of its weights.*decoder\.layers\.1"):
        longspan.LongspanForConditionalGeneration.from_pretrained(
            tmp_path, config=build(decoder_layers=2).config
        )


def test_words_are_added():
    model, ids = build(), document()
    model.final_logits_bias.normal_()
    before = model(ids, decoder_input_ids=target()).logits
    model.resize_token_embeddings(VOCAB + 5)
    after = model(ids, decoder_input_ids=target()).logits
    assert after.shape[2] == VOCAB + 5
    torch.testing.assert_close(after[..., :VOCAB], before)
    assert model.lm_head.weight is model.decoder.embeddings.words.weight


def test_positions_are_extended():
    model = build()
    model.extend_positions(100)
    assert model(document(1, 100), labels=target(1)).logits.isfinite().all()


def test_recomputing_gives_the_same_gradients():
    found = []
    for recompute in (False, True):
        model = build()
        model.train()
        if recompute:
            model.gradient_checkpointing_enable()
            assert model.decoder.gradient_checkpointing
        model(document(), labels=target(), use_cache=recompute).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("how", ["layers", "model"])
def test_it_compiles(how):
    model, ids, labels = build(), document(), target()
    wanted = model(ids, labels=labels)
    wanted.loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = [model] if how == "model" else [*model.encoder.layers, *model.decoder.layers]
    for part in parts:
        part.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    found = model(ids, labels=labels)
    found.loss.backward()
    torch.testing.assert_close(found.logits, wanted.logits)
    torch.testing.assert_close([p.grad for p in model.parameters()], grads)


def test_exports_with_any_length():
    model = build()
    length = torch.export.Dim("length", min=8, max=64)
    words = torch.export.Dim("words", min=3, max=24)
    given = {"input_ids": document(), "attention_mask": torch.ones(2, 37), "labels": target()}
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "labels": {1: words}}
    exported = torch.export.export(model, (), kwargs=given, dynamic_shapes=shapes).module()
    for tokens, own in ((51, 4), (64, 24)):
        mask = torch.ones(2, tokens)
        mask[1, 20:] = 0
        other = {
            "input_ids": document(2, tokens),
            "attention_mask": mask,
            "labels": target(2, own),
        }
        for name in ("loss", "logits"):
            torch.testing.assert_close(exported(**other)[name], model(**other)[name])


def test_half_precision_and_a_document_of_padding_alone_stay_finite(monkeypatch):
    """On a GPU masks are not looked at; there, nothing may become NaN."""
    monkeypatch.setattr("longspan.models.inputs.readable", lambda tensor: False)
    model = build().to(torch.bfloat16)
    mask = torch.ones(2, 37, dtype=torch.long)
    mask[1] = 0
    output = model(document(), mask, labels=target())
    assert output.logits.isfinite().all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give labels, or decoder_input_ids"),
        ({"labels": torch.empty(2, 0, dtype=torch.long)}, "targets are empty"),
        ({"labels": torch.tensor([[5, 2], [-100, -100]])}, r"rows \[1\] are empty"),
        ({"labels": torch.full((2, 3), VOCAB)}, f"labels from {VOCAB}"),
        ({"labels": torch.rand(2, 3)}, "labels must be integers"),
        ({"labels": target(2, 25)}, "a target of 25 tokens, but the decoder has positions for 24"),
        ({"labels": target(3)}, "2 documents, but 3 targets"),
        ({"labels": target(), "decoder_input_ids": target(2, 4)}, "labels .* are not those of"),
        (
            {"labels": target(), "attention_mask": torch.zeros(2, 37)},
            r"rows \[0, 1\] are padding alone",
        ),
        ({"labels": target(), "decoder_attention_mask": torch.ones(2, 3)}, "must be .batch, tok"),
    ],
)
def test_bad_input_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        build()(document(), **given)


def test_bad_input_of_generation_is_named():
    model, ids = build(), document()
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ValueError, match=r"rows \[1\] are padding alone"):
        model.generate(ids, attention_mask=mask, num_beams=4)
    with pytest.raises(ValueError, match=r"rows \[1\] are padding alone"):
        # The encoder looks at no mask on a GPU, generation looks at every one.
        model.generate(encoder_outputs=model.encoder(ids), attention_mask=mask, num_beams=4)
    with pytest.raises(ValueError, match=r"a document of 65 tokens.*positions for 64"):
        model.generate(document(1, 65), num_beams=4)
    with pytest.raises(ValueError, match=r"a target of 25 tokens.*max_new_tokens"):
        model.generate(ids, max_new_tokens=25)
    assert model.generate(ids, max_new_tokens=24, min_new_tokens=24).shape[1] == 25
    with pytest.raises(ValueError, match=r"guidance_scale=1\.5: .* leave it out"):
        model.generate(ids, guidance_scale=1.5, max_new_tokens=5)
    with pytest.raises(TypeError, match="an EncoderDecoderCache that grows"):
        model.generate(ids, cache_implementation="static", max_new_tokens=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "rotary"}, "position='rotary'"),
        ({"position_offset": 2}, "position_offset=2"),
        ({"decoder_attention_heads": 5}, "not divisible by decoder_attention_heads=5"),
        ({"decoder_positions": 0}, "decoder_positions=0 must be at least 1"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)
