"""Encoder-decoder models over documents laid end to end: the losses and gradients of one example at
a time, and no leak.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from families import by_itself, example_of, examples_of, small, summed
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.models.families import PACKED, PADS_SAFELY
from farthing.run.folder import kept
from farthing.train.evaluate import write_texts
from farthing.train.resolve import Writing
from heads import assert_same, gradients_of
from thinned import thinned
from workshop import make_job, metrics_of, rows_of, train

CPU = Numerics(torch.device("cpu"), None)
LENGTHS = [9, 30, 17, 12, 9, 80, 31, 3, 64, 5]


FAMILIES = {
    **{kind: (kind, {}) for kind in sorted(PACKED["seq2seq"])},
    "flan-t5": (
        "t5",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1},
    ),
    "bart, scaled": (
        "bart",
        {"scale_embedding": True, "decoder_layers": 2, "tie_word_embeddings": False},
    ),
}


def model_of(name: str, **others):
    """A small model in training mode without dropout, its weights drawn so that places and
    distances matter.
    """
    kind, own = FAMILIES[name]
    model = small(kind, AutoModelForSeq2SeqLM, **own, **others)
    with torch.no_grad():
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.train()


@pytest.mark.parametrize("smoothing", thinned([0.0, 0.1], 2))
@pytest.mark.parametrize("name", thinned(FAMILIES, 3))
def test_losses_and_gradients_are_those_of_one_example_at_a_time(name, smoothing):
    model, tokens = model_of(name), examples_of(LENGTHS)
    tokens.ids[tokens.offsets[4] + 2] = (
        model.config.pad_token_id
    )  # in the midst of a source; some count no padding
    alone = torch.stack(
        [by_itself(model, tokens, index, smoothing) for index in range(len(LENGTHS))]
    )
    expected = gradients_of(model, alone.sum() / 100)
    forward = Forward(model, "seq2seq", model.config.pad_token_id, CPU, label_smoothing=smoothing)
    assert forward.is_packed, forward.why_padded
    assert forward.head.why_whole == ""
    arrays = forward.collate(tokens, np.arange(len(LENGTHS)))
    assert forward.n_computed(arrays) == tokens.lengths.sum(), "nothing is padded"
    for every in (0, 1, 2):
        checkpoint_layers(model, every)
        loss, _ = forward.loss(forward.to_device(arrays))
        assert loss.item() == pytest.approx(alone.sum().item(), rel=1e-5)
        assert_same(gradients_of(model, loss / 100), expected, close=5e-5)
    if not smoothing:
        with torch.no_grad():
            of_each = -forward.log_probs(forward.to_device(arrays))
        assert of_each.tolist() == pytest.approx(alone.tolist(), rel=1e-5)


def test_every_family_that_is_packed_is_written_for_in_padded_batches_safely():
    assert PACKED["seq2seq"] <= PADS_SAFELY["seq2seq"]


def test_a_run_is_packed_evaluated_and_has_texts_written(tmp_path):
    rows = rows_of("t5", 6, seed=3)
    keys = {
        "max_steps": 2,
        "probe": False,
        "predict_with_generate": True,
        "data": {"max_target_length": 24},
    }
    job = make_job(tmp_path, family="t5", eval_rows=rows, **keys)
    assert train(job).state == "finished"
    assert kept(Path(job.output_dir) / "settings.json")["packed"] is True
    assert {"loss", "document_loss", "rougeL"} <= set(metrics_of(job)[0])


def test_a_head_with_an_adapter_is_packed_where_labels_are_smoothed_too():
    adapter = Adapter(r=2, target_modules=("q", "lm_head"))
    model = add_adapter(model_of("flan-t5"), adapter, "seq2seq", 0)
    tokens = examples_of(LENGTHS)
    for smoothing in (0.0, 0.1):
        forward = Forward(model, "seq2seq", 1, CPU, label_smoothing=smoothing)
        assert forward.is_packed
        alone = sum(by_itself(model, tokens, index, smoothing).item() for index in range(10))
        assert summed(forward, tokens, list(range(10))).item() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("name", ["bart", "m2m_100", "t5"])
def test_texts_are_those_that_are_written_for_one_example_at_a_time(name):
    model = model_of(name).eval()
    pad_id = model.config.pad_token_id
    tokens = examples_of(LENGTHS)
    forward = Forward(model, "seq2seq", pad_id, CPU)
    tokenizer = Spelling()
    examples = np.arange(len(LENGTHS))
    with torch.no_grad():
        found = write_texts(forward, tokens, examples, Writing(tokenizer, 5))
    for index, text in enumerate(found["predictions"]):
        ids, is_target = example_of(tokens, index)
        source = ids[is_target == 0][None]
        alone = model.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=5,
            do_sample=False,
            num_beams=1,
        )
        assert (
            text.split()
            == tokenizer.batch_decode(alone.numpy(), skip_special_tokens=True)[0].split()
        ), index
    assert len({*(found["predictions"])}) > 1


class Spelling:
    """Writes numbers instead of words, without padding and ends."""

    def batch_decode(self, rows, *, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(str(int(number)) for number in row if number > 2) for row in rows]
