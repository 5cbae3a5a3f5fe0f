"""Documents laid end to end against the same documents one by one and padded: losses, gradients,
and what leaks.
"""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    BloomForCausalLM,
)

from farthing.model import attention_kernels
from farthing.model.activation_checkpointing import checkpoint_layers, checkpointed_layers
from farthing.model.attention import (
    Documents,
    attend,
    can_go_packed,
    go_packed,
    packed_logits,
)
from farthing.model.attention_kernels import AttentionSettings
from farthing.model.flops import flops_per_token, recomputed_share
from farthing.model.last_layer import last_layer
from farthing.model.positions import first_position
from farthing.models.families import DECODERS, ENCODERS
from farthing.models.shapes import read_shape
from heads import assert_same, gradients_of
from packed_models import (
    CLOSE,
    WINDOW,
    Layer,
    assert_close,
    assert_close_with_gradients,
    by_formula,
    by_kernel,
    heads,
    model_of,
)
from thinned import thinned


def documents_of(lengths: list[int], seed: int = 0) -> list[Tensor]:
    """Random token ids, one row a document."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 99, (length,), generator=draw) for length in lengths]


def some_lengths(seed: int) -> list[int]:
    """Random lengths with ones, repeats and neighbours of equal length."""
    draw = random.Random(seed)
    lengths = [
        draw.choice([1, 2, WINDOW, draw.randint(1, 12), draw.randint(10, 30)])
        for _ in range(draw.randint(2, 6))
    ]
    return lengths + draw.choices(lengths, k=2) + [lengths[-1]] * draw.randint(0, 2)


def flat(model, documents: list[Tensor]) -> dict[str, Any]:
    """A packed batch of documents, made without farthing's collation."""
    begin = first_position(model.config)
    of = Documents.of([len(ids) for ids in documents])
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(len(ids)) + begin for ids in documents])[None],
        "attention_mask": of.no_mask,
        "documents": of,
    }


def flat_losses(model, documents: list[Tensor]) -> list[Tensor]:
    """Losses of every predicted token, by document."""
    logits = packed_logits(model, flat(model, documents))[0].split([len(ids) for ids in documents])
    return [
        F.cross_entropy(rows[:-1].float(), ids[1:], reduction="none")
        for rows, ids in zip(logits, documents, strict=True)
    ]


def padded_losses(model, documents: list[Tensor]) -> list[Tensor]:
    """The same through one padded batch and transformers' attention."""
    rows = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=1)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(ids) for ids in documents], batch_first=True
    )
    logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
    return [
        F.cross_entropy(row[: len(ids) - 1].float(), ids[1:], reduction="none")
        for row, ids in zip(logits, documents, strict=True)
    ]


def single_losses(model, documents: list[Tensor]) -> list[Tensor]:
    """The same, one document at a time."""
    return [padded_losses(model, [ids])[0] for ids in documents]


def together(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).sum()


# ---- equality ----


@pytest.mark.parametrize(
    ("seed", "family"), thinned(zip(itertools.cycle(range(3)), sorted(DECODERS)), 2)
)
def test_flat_losses_and_gradients_are_those_of_documents_alone_and_padded(seed, family):
    model, documents = model_of(family, seed=seed), documents_of(some_lengths(seed), seed)
    assert can_go_packed(model, "causal-lm") is None
    alone, padded = single_losses(model, documents), padded_losses(model, documents)
    theirs = gradients_of(model, together(alone))
    go_packed(model)
    ours = flat_losses(model, documents)
    for one, other, third in zip(ours, alone, padded, strict=True):
        assert_close(one, other)
        assert_close(one, third)
    assert_same(gradients_of(model, together(ours)), theirs, 3 * CLOSE)


@pytest.mark.parametrize(
    ("seed", "family"), enumerate([*sorted(ENCODERS), "llama", "gpt2", "gemma2"])
)
def test_classification_reads_each_document_where_its_head_does(seed, family):
    model, lengths = model_of(family, "classification", seed), [*some_lengths(seed), 40, 40]
    documents = documents_of(lengths, seed)  # longer together than the model has positions
    labels = torch.arange(len(documents)) % 3
    assert can_go_packed(model, "classification") is None
    alone = torch.cat([model(input_ids=ids[None]).logits for ids in documents])
    theirs = gradients_of(model, F.cross_entropy(alone, labels, reduction="sum"))
    go_packed(model)
    ours = packed_logits(model, flat(model, documents))
    assert_close(ours, alone)
    assert_same(gradients_of(model, F.cross_entropy(ours, labels, reduction="sum")), theirs)


@pytest.mark.parametrize("family", sorted(ENCODERS))
def test_the_last_layer_of_an_encoder_is_computed_for_the_tokens_that_are_read(family):
    model, documents = model_of(family, "classification"), documents_of([7, 1, 12, 12])
    go_packed(model)
    body = getattr(model, model.base_model_prefix)
    seen = []
    body.encoder.layer[-1].intermediate.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    found = []
    for is_heard in (False, True):
        if is_heard:
            body.encoder.layer[-1].register_forward_hook(lambda *_: None)
        scores = packed_logits(model, flat(model, documents))
        found.append((scores, gradients_of(model, scores.sum())))
    assert seen == [4, 32], "who listens to the layer hears of every token"
    assert_close(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
    assert len(body.encoder.layer) == model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_plan_and_receipt_count_the_last_layer_of_an_encoder_for_the_tokens_that_are_read(family):
    model, lengths = model_of(family, "classification"), [12] * 4
    go_packed(model)
    batch = flat(model, documents_of(lengths))
    with FlopCounterMode(display=False) as counter:
        packed_logits(model, batch).sum().backward()
    counted = {str(kind): n for kind, n in counter.get_flop_counts()["Global"].items()}
    products = sum(counted.get(f"aten.{name}", 0) for name in ("mm", "addmm")) / len(lengths)
    shape = read_shape(model.config.to_dict(), "classification", model.config.num_labels)
    planned, whole = (shape.training_flops(12, n_read=n_read) for n_read in (1.0, None))
    assert planned.body + planned.head == pytest.approx(products, rel=0.02)
    assert whole.body - planned.body > 0.6 * whole.body / shape.n_layers
    assert planned.attention == pytest.approx(whole.attention * (1 - (1 - 1 / 12) / shape.n_layers))
    assert (
        flops_per_token(model, last_layer(model), 1 / 12)
        < flops_per_token(model)
        == pytest.approx(6 * (shape.n_matmul + shape.n_head_matmul))
    )
    saved = (flops_per_token(model) - flops_per_token(model, last_layer(model), 1 / 12)) * 12
    assert saved == pytest.approx(whole.body - planned.body)
    layers = checkpointed_layers(model)
    again = sum(
        weight.numel() for each in layers for weight in each.parameters() if weight.ndim > 1
    )
    share = again / (flops_per_token(model) + again)  # forward, twice a weight, of every other one
    shares = [recomputed_share(model, layers, every) for every in (0, 2)]
    assert shares == [0, pytest.approx(share)]


# ---- with what else a run switches on ----


@pytest.mark.parametrize(("family", "every"), [("llama", 1), ("gemma2", 2)])
def test_recomputed_layers_see_the_documents_of_their_own_batch(family, every):
    model = model_of(family)
    first, second = documents_of([7, 1, 12, 12]), documents_of([3, 20, 9], seed=1)
    theirs = gradients_of(model, together(single_losses(model, [*first, *second])))
    go_packed(model)
    checkpoint_layers(model, every)
    loss = together(flat_losses(model, first)) + together(
        flat_losses(model, second)
    )  # both forward, then both backward
    assert_same(gradients_of(model, loss), theirs)


# ---- windows, caps and dropout, against the formula ----


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["cpu", "padded"])
def test_no_kernel_drops_a_bias(kernel, causal, monkeypatch):
    by_kernel(kernel, monkeypatch)
    hides = torch.full((9, 9), -torch.inf).triu(1) if causal else torch.zeros(9, 9)
    how = AttentionSettings(causal, 0.25, bias=torch.randn(1, 4, 9, 9) + hides)
    documents, inputs = Documents.of([1, 4, 4, 2, 9]), heads(20)
    asked = {"is_causal": causal, "position_bias": how.bias, "scaling": how.scale}
    ours, _ = attend(Layer(), *inputs, None, documents=documents, **asked)
    by_rows = [each[0].transpose(0, 1) for each in inputs]
    assert_close_with_gradients(ours[0], by_formula(*by_rows, documents, how), inputs)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_dropped_weights_are_the_same_in_expectation(cap):
    q, k, v = (tensor.detach() for tensor in heads(7))
    documents = Documents.of([4, 3])
    exact = attend(Layer(), q, k, v, None, softcap=cap, documents=documents)[0]
    torch.manual_seed(0)
    draws = [
        attend(Layer(), q, k, v, None, dropout=0.5, softcap=cap, documents=documents)[0]
        for _ in range(1000)
    ]
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(torch.stack(draws).mean(0), exact, rtol=0, atol=0.25)


@pytest.mark.parametrize(("family", "task"), [("gpt2", "causal-lm"), ("bert", "classification")])
def test_a_model_that_drops_is_repeatable_in_training_and_exact_in_evaluation(family, task):
    drops = {"attn_pdrop": 0.2, "attention_probs_dropout_prob": 0.2}
    model, documents = model_of(family, task, **drops), documents_of([7, 1, 12, 12])
    model.eval()
    alone = [model(input_ids=ids[None]).logits.flatten(0, -2) for ids in documents]
    go_packed(model)
    batch = flat(model, documents)
    ours = packed_logits(model, batch).flatten(0, -2)
    assert_close(ours, torch.cat(alone))
    model.train()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(packed_logits(model, batch))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# ---- kernels this machine lacks ----


@pytest.mark.parametrize(
    ("window", "causal", "sees"),
    [(None, True, (True, -1, 0)), (None, False, (False, -1, -1)), (3, True, (False, 2, 0))],
)
def test_flash_is_told_of_documents_windows_and_dropout(window, causal, sees, monkeypatch):
    """The second document goes on from the first, the third from both. tests/test_gpu.py holds what
    it answers.
    """
    said = []

    def flash(q, k, v, bounds, key_bounds, *others, scale, window_size_left, window_size_right):
        said.extend([bounds.tolist(), key_bounds.tolist(), len(k), *others, scale])
        said.extend([window_size_left, window_size_right])
        return (q,)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *args: "flash")
    how = {"sliding_window": window, "is_causal": causal}
    rows = np.array([*range(4), *range(5), *range(7)])
    how["documents"] = Documents.of([4, 1, 2], "cpu", [4, 5, 7], rows)
    attend(Layer(), *heads(7), None, 0.1, scaling=0.3, **how)
    is_causal, left, right = sees
    bounds = [[0, 4, 5, 7], [0, 4, 9, 16], 16, 4, 7]
    assert said == [*bounds, 0.1, is_causal, False, 0.3, left, right]


def test_the_flash_attention_of_this_torch_takes_what_it_is_given():
    known = [
        each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments
    ]
    first = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    assert known[:10] == first.split()
    assert {"scale", "window_size_left", "window_size_right"} <= set(known)


# ---- batches without documents, and models that stay padded ----


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2"])
def test_padded_batches_and_generation_stay_what_they_were(family):
    model, documents = model_of(family).eval(), documents_of([7, 2, 12])
    prompt = documents[2][None]

    def written():
        mask = torch.ones_like(prompt)
        return model.generate(
            prompt, attention_mask=mask, max_new_tokens=8, do_sample=False
        ).tolist()[0]  # type: ignore[no-any-return]

    before, text = torch.cat(padded_losses(model, documents)), written()
    go_packed(model)
    assert_close(torch.cat(padded_losses(model, documents)), before)
    assert written() == text


def test_models_that_must_stay_padded_say_why():
    bloom = BloomForCausalLM(
        AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=20)
    )
    scored = model_of("llama", "classification")
    del scored.score
    linear = model_of("llama")
    linear.config.layer_types = ["full_attention", "linear_attention"]
    for model, task, words in (
        (bloom, "causal-lm", "ALiBi"),
        (scored, "classification", "head is not known"),
        (linear, "causal-lm", "linear_attention"),
        (model_of("mixtral", output_router_logits=True), "causal-lm", "routers"),
        (model_of("gemma3_text", use_bidirectional_attention=True), "causal-lm", "both directions"),
        (model_of("bert", "classification", is_decoder=True), "classification", "as a decoder"),
        (model_of("llama"), "seq2seq", "not among the families"),
        (model_of("bert", "classification"), "causal-lm", "not among the families"),
    ):
        assert words in str(can_go_packed(model, task))


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_documents_have_tokens(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        Documents.of(lengths)


def test_attention_with_what_is_not_known_is_refused():
    documents = Documents.of([4])
    with pytest.raises(ValueError, match="s_aux"):
        attend(Layer(), *heads(4), None, s_aux=torch.zeros(4), documents=documents)
    with pytest.raises(ValueError, match="looks ahead"):
        attend(Layer(), *heads(4), None, sliding_window=2, is_causal=False, documents=documents)
