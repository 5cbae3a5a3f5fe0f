"""An example counts as if it were computed alone by plain transformers, whatever it shares a
micro-batch with.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from families import CODES, PAD, by_itself, example_of, examples_of, small, speaking, summed
from farthing.data.encode import Encoder
from farthing.data.formats import Example
from farthing.errors import ModelError
from farthing.model.attention import packed_logits
from farthing.model.batching import longrope_limit
from farthing.model.causality import refuse_looking_ahead
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.model.load import set_languages, speak
from farthing.model.loss import decoder_inputs, logits_of, reads_token_types
from token_sets import encoded_examples

CPU = Numerics(torch.device("cpu"), None)


PADDED = ("distilbert", "deberta-v2", "bloom", "bart", "mt5")


@pytest.mark.parametrize("kind", [*PADDED, "funnel", "nystromformer", "convbert"])
def test_classes_are_those_of_single_examples(kind):
    """A model that reads padding gets inputs of one length."""
    tokens = examples_of([5, 17, 9, 17, 12, 5, 6, 30, 9], n_labels=3)
    model = small(kind, AutoModelForSequenceClassification, num_labels=3)
    forward = Forward(model, "classification", PAD, CPU)
    pieces = forward.split(tokens, np.arange(9), 200)
    together, alone = torch.zeros(2, 9, 3)
    compute = packed_logits if forward.is_packed else logits_of
    with torch.no_grad():
        for piece in pieces:
            batch = forward.to_device(forward.collate(tokens, piece))
            together[torch.from_numpy(piece)] = compute(model, batch)
        for index in range(9):
            ids, types = example_of(tokens, index)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            batch |= {"token_type_ids": types} if reads_token_types(model) else {}
            alone[index] = model(**batch).logits[0]
    assert (together - alone).abs().max() < 1e-4 * alone.abs().max()
    assert alone.std(0).max() > 1e-3, "else nothing is shown"
    if kind in PADDED:
        assert forward.batching_rule is None
        assert len(pieces) < 6
    else:
        assert "of one length at a time" in forward.batching_rule.why
        assert len(pieces) == 6


# ---- seq2seq ----

OF_ONE_LENGTH = ("prophetnet", "switch_transformers")


@pytest.mark.parametrize(
    "kind", ["bart", "led", "m2m_100", "marian", "mbart", "pegasus", "plbart", "t5", *OF_ONE_LENGTH]
)
def test_the_decoder_begins_as_the_model_itself_would_have_it(kind):
    """The loss is that of transformers for the same labels, one example at a time, padded or not."""  # noqa: E501
    model = small(kind, AutoModelForSeq2SeqLM)
    tokens = examples_of([9, 30, 17, 12, 9])
    forward = Forward(model, "seq2seq", model.config.pad_token_id, CPU)
    with torch.no_grad():
        pieces = forward.split(tokens, np.arange(5), 400)
        together = sum(float(summed(forward, tokens, piece)) for piece in pieces)
        alone = sum(float(by_itself(model, tokens, index)) for index in range(5))
    assert together == pytest.approx(alone, rel=1e-4)
    assert (forward.batching_rule is None) == (kind not in OF_ONE_LENGTH)


@pytest.mark.parametrize("is_training", [True, False])
def test_experts_with_a_capacity_answer_each_example_as_if_it_were_alone(is_training):
    sizes = {"num_experts": 2, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    sizes |= {"dropout_rate": 0.0, "router_jitter_noise": 0.0}
    model = small("switch_transformers", AutoModelForSeq2SeqLM, expert_capacity=3, **sizes)
    tokens = examples_of([9, 30, 17, 12, 9])
    forward = Forward(model, "seq2seq", model.config.pad_token_id, CPU)

    def loss_of(indices):
        with torch.no_grad():
            return float(summed(forward, tokens, indices))

    model.eval()
    loss_of([1])  # an evaluation in between changes nothing
    model.train(is_training)
    alone = [loss_of([index]) for index in range(5)]
    assert loss_of([0, 1, 2, 3, 4]) == pytest.approx(sum(alone), rel=1e-5)
    assert loss_of([4, 1]) + loss_of([0, 3, 2]) == pytest.approx(sum(alone), rel=1e-5)
    assert model.config.expert_capacity == 3  # what is exported stays as it was


def test_batch_norms_are_refused():
    model = small("distilbert", AutoModelForSequenceClassification, num_labels=2)
    model.pre_classifier = torch.nn.Sequential(model.pre_classifier, torch.nn.BatchNorm1d(32))
    with pytest.raises(ModelError, match="a distilbert has batch norms"):
        Forward(model, "classification", PAD, CPU)


def test_mbart_begins_with_the_language_at_the_end_of_its_target():
    model = small("mbart", AutoModelForSeq2SeqLM)
    labels = torch.tensor([[5, 6, 2, 90], [7, 2, 91, -100]])
    assert decoder_inputs(model, labels).tolist() == [[90, 5, 6, 2], [91, 7, 2, 91]]
    assert labels.tolist() == [[5, 6, 2, 90], [7, 2, 91, -100]]


def test_a_model_without_a_start_is_refused_in_words():
    model = small("m2m_100", AutoModelForSeq2SeqLM)
    model.config.decoder_start_token_id = None
    with pytest.raises(ModelError, match="a m2m_100 for seq2seq can't be trained"):
        decoder_inputs(model, torch.tensor([[5, 6, 2]]))


# ---- rotary factors that follow from the longest ----


def longrope(**others):
    """A Phi-3 whose long factors begin above 16 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0 + n for n in range(4)]}
    return small(
        "phi3",
        AutoModelForCausalLM,
        rope_parameters=rope,
        original_max_position_embeddings=16,
        **others,
    )


@pytest.mark.parametrize("how", ["flat", "padded", "sharing"])
def test_short_documents_keep_their_factors_beside_long_ones(how):
    model = longrope()
    assert longrope_limit(model.config) == 16
    tokens = examples_of([5, 40, 16, 17, 9, 33, 12])
    forward = Forward(model, "causal-lm", PAD, CPU, may_go_packed=how != "padded")
    assert forward.is_packed == (how != "padded")
    forward.shares = how == "sharing"
    pieces = forward.split(tokens, np.arange(7), 400)
    assert sorted(sorted(piece.tolist()) for piece in pieces)[0] == [0, 2, 4, 6]
    model.zero_grad()
    together = sum(_backward(summed(forward, tokens, piece)) for piece in pieces)
    ours = model.model.layers[0].self_attn.qkv_proj.weight.grad.clone()
    model.zero_grad()
    alone = 0.0
    for index in range(7):
        ids, is_target = example_of(tokens, index)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[
            0, :-1
        ]
        wanted = is_target[0, 1:] == 1
        alone += _backward(F.cross_entropy(logits[wanted], ids[0, 1:][wanted], reduction="sum"))
    plain = model.model.layers[0].self_attn.qkv_proj.weight.grad
    assert together == pytest.approx(alone, rel=1e-5)
    assert (ours - plain).abs().max() < 1e-4 * plain.abs().max()
    assert forward.mixes(tokens, np.arange(7))
    assert not forward.mixes(tokens, np.array([0, 2, 4, 6]))


def _backward(loss: torch.Tensor) -> float:
    loss.backward()
    return float(loss.detach())


# ---- languages ----


@pytest.mark.parametrize("family", CODES)
def test_inputs_and_targets_carry_their_own_languages(family):
    source, target = CODES[family]
    tokenizer = speaking(family)
    assert set_languages(tokenizer, "seq2seq", source, target) == (source, target)
    text = Example((("the bread", False), ("das Brot", True)))
    before = tokenizer.backend_tokenizer.to_str()
    ((ids, is_target),) = encoded_examples(Encoder(tokenizer, "seq2seq", 20, 20)([text]))
    assert tokenizer.backend_tokenizer.to_str() == before
    expected = tokenizer("the bread", text_target="das Brot")
    assert ids[is_target == 0].tolist() == expected["input_ids"]
    assert ids[is_target == 1].tolist() == expected["labels"]
    codes = tokenizer.convert_tokens_to_ids([source, target])
    assert codes[1] in ids[is_target == 1]
    assert codes[0] not in ids[is_target == 1]


def test_languages_that_are_not_said_or_not_known_are_refused(tokenizers):
    family, (source, target) = "nllb", CODES["nllb"]
    with pytest.raises(ModelError, match=r"data.target_lang is not set"):
        set_languages(speaking(family), "seq2seq", source, None)
    with pytest.raises(ModelError, match=f"'{target}x' is not a language of its tokenizer"):
        set_languages(speaking(family), "seq2seq", source, f"{target}x")
    # a tokenizer without languages takes none
    assert set_languages(tokenizers["t5"], "seq2seq", None, None) == ("", "")
    with pytest.raises(ModelError, match="does not write a language into texts"):
        set_languages(tokenizers["t5"], "seq2seq", "en", "de")


@pytest.mark.parametrize("family", ["mbart", "nllb"])
def test_a_model_that_was_told_the_language_generates_in_it(family):
    source, target = CODES[family]
    tokenizer = speaking(family)
    set_languages(tokenizer, "seq2seq", source, target)
    code = tokenizer.convert_tokens_to_ids(target)
    model = small(
        {"mbart": "mbart", "nllb": "m2m_100"}[family],
        AutoModelForSeq2SeqLM,
        vocab_size=len(tokenizer),
    )
    speak(model, tokenizer, target)
    written = model.generate(input_ids=torch.tensor([[5, 6, 2]]), max_new_tokens=3)[0].tolist()
    labels = torch.tensor([tokenizer(text_target="das Brot")["input_ids"]])
    expected = decoder_inputs(model, labels)[0, :2].tolist()
    assert written[: 2 if family == "nllb" else 1] == expected[: 2 if family == "nllb" else 1]
    assert code in written[:2]


# ---- a language model looks back only ----


@pytest.mark.parametrize("kind", ["bert", "roformer", "xlm"])
def test_an_encoder_that_looks_ahead_is_no_language_model(kind):
    with pytest.raises(ModelError, match="looks ahead"):
        refuse_looking_ahead(small(kind, AutoModelForCausalLM), kind)
    if kind != "xlm":
        refuse_looking_ahead(small(kind, AutoModelForCausalLM, is_decoder=True), kind)
