"""The head that pays for labelled positions only: the same loss and gradients as the plain path,
and no logits kept.
"""

from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from every_family import N_WORDS
from farthing.model.activation_checkpointing import saved_bytes
from farthing.model.attention import can_go_packed, go_packed
from farthing.model.documents import packed_batch
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.model.head import (
    HeadSettings,
    default_tile_tokens,
    find_head,
)
from farthing.model.loss import Labelled, find_labelled
from farthing.model.positions import first_position
from farthing.models.families import CAUSAL_FAMILIES, SEQ2SEQ_FAMILIES
from heads import (
    CLOSE,
    CLOSE_BF16,
    assert_same,
    gradients_of,
    head_loss,
    in_tiles_of,
    language_model_loss,
    log_probs_of,
    make_batch,
    make_model,
    objective_of,
    summed_loss,
)
from thinned import thinned

# ---- the function ----


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labelled: Labelled, **how) -> Tensor:
    """The same by whole logits."""
    logits = nn.functional.linear(hidden, weight, bias).reshape(-1, len(weight))
    if cap := how.get("soft_cap"):
        logits = torch.tanh(logits / cap) * cap
    return nn.functional.cross_entropy(
        logits[labelled.positions].float(),
        labelled.targets,
        reduction="sum",
        label_smoothing=how.get("label_smoothing", 0.0),
    )


def parts(n: int = 23) -> tuple[Tensor, Tensor, Tensor, Labelled]:
    """States of 50 positions, a matrix and a bias that are trained, and `n` labels."""
    torch.manual_seed(1)
    hidden, weight, bias = (
        torch.randn(*size, requires_grad=True) for size in ((2, 25, 8), (N_WORDS, 8), (N_WORDS,))
    )
    places, targets = torch.randperm(50)[:n].sort()[0], torch.randint(0, N_WORDS, (n,))
    return hidden, weight, bias, Labelled(places, targets)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("n", [0, 1, 23, 50])
@pytest.mark.parametrize("tile", [1, 7, 23, 1000])
def test_loss_and_gradients_are_those_of_whole_logits(n, tile, soft_cap, smoothing):
    results = []
    how = HeadSettings(soft_cap, smoothing)
    for is_own in (False, True):
        hidden, weight, bias, labelled = parts(n=n)
        if is_own:
            with in_tiles_of(tile):
                loss = head_loss(hidden, weight, bias, labelled, how)
        else:
            loss = plain(
                hidden, weight, bias, labelled, soft_cap=soft_cap, label_smoothing=smoothing
            )
        (loss / 7).backward()
        results.append((float(loss.detach()), {"x": hidden.grad, "W": weight.grad, "b": bias.grad}))
    (theirs, their_gradients), (ours, our_gradients) = results
    assert ours == pytest.approx(theirs, rel=CLOSE)
    if n == 0:
        assert ours == 0
        assert all(not gradient.any() for gradient in our_gradients.values())
    assert_same(our_gradients, their_gradients)


def test_what_needs_no_gradient_gets_none_and_costs_none():
    class Products(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += "mm" in str(func) or "linear" in str(func)
            return func(*args, **(kwargs or {}))

    for needs, n_products in (
        ((True, True), 3),
        ((True, False), 2),
        ((False, True), 2),
        ((False, False), 1),
    ):
        hidden, weight, _, labelled = parts()
        hidden.requires_grad_(needs[0])
        weight.requires_grad_(needs[1])
        with Products() as products:
            loss = head_loss(hidden, weight, None, labelled)
        assert products.n == n_products
        assert loss.requires_grad == any(needs)
        if any(needs):
            loss.backward()
        assert [one.grad is not None for one in (hidden, weight)] == list(needs)


def test_a_second_backward_pass_is_refused():
    hidden, weight, bias, labelled = parts()
    loss = head_loss(hidden, weight, bias, labelled)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out"):
        loss.backward()


def test_a_foreseen_scale_keeps_fp16_gradients_from_vanishing():
    labelled = Labelled(torch.arange(6), torch.full((6,), 1))
    rows = torch.full((6, 4), 0.5)
    words = torch.zeros(61, 4)
    words[0] = -9.0  # a word of probability 2.5e-10: unscaled, fp16 has nothing between 0 and 6e-8

    def gradient(dtype, foreseen, actual):
        weight = words.to(dtype, copy=True).requires_grad_()
        (
            head_loss(rows.to(dtype), weight, None, labelled, HeadSettings(gradient_scale=foreseen))
            * actual
        ).backward()
        return weight.grad.double() / actual

    exact = gradient(torch.float64, 1.0, 1.0)
    assert 0 < exact[0, 0] < 1e-8
    assert not gradient(torch.float16, 1.0, 2.0**14)[0].any(), (
        "too late: it was lost before it was scaled"
    )
    for foreseen in (2.0**14, 2.0**13, torch.tensor(2.0**14)):
        assert_close(gradient(torch.float16, foreseen, 2.0**14), exact, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("vocab", "device", "more", "n"),
    [
        (152_000, "cuda", (), 2048),
        (100, "cpu", (), 1024),
        (50_000, "cpu", (), 320),
        (152_000, "cpu", (), 256),
        (152_000, "cpu", (896,), 896),
    ],
)
def test_a_tile_is_long_enough_to_be_quick_and_no_longer(vocab, device, more, n):
    assert default_tile_tokens(vocab, device, *more) == n


# ---- whole models ----

SETTINGS = [
    *((family, {}) for family in sorted(CAUSAL_FAMILIES | SEQ2SEQ_FAMILIES)),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma3_text", {"final_logit_softcapping": 4.0}),
    ("gemma2", {"final_logit_softcapping": 2.0, "tie_word_embeddings": False}),
    ("t5", {"tie_word_embeddings": False}),
    ("cohere", {"logit_scale": 0.3}),
    ("cohere2", {"logit_scale": 0.3, "tie_word_embeddings": False}),
    ("granite", {"logits_scaling": 6.0}),
]


@pytest.mark.parametrize(("family", "settings"), thinned(SETTINGS, 2))
def test_each_family_has_the_loss_and_gradients_of_the_plain_path(family, settings):
    model, batch, task = make_model(family, **settings), make_batch(), objective_of(family)
    assert not find_head(model, task).why_whole
    for smoothing in (0.0, 0.1):
        theirs = summed_loss(model, batch, task, smoothing)[0]
        their_gradients = gradients_of(model, theirs / 5)
        with in_tiles_of(4):
            ours = language_model_loss(model, batch, task, smoothing)
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=CLOSE)
        assert_same(gradients_of(model, ours / 5), their_gradients)


@pytest.mark.parametrize("family", ["gemma2", "t5"])
def test_under_autocast_it_is_as_close_as_bf16_allows(family):
    model, batch, task = make_model(family), make_batch(), objective_of(family)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = summed_loss(model, batch, task)[0]
        their_gradients = gradients_of(model, theirs / 5)
    with torch.autocast("cpu", dtype=torch.bfloat16), in_tiles_of(4):
        ours = language_model_loss(model, batch, task)
    assert ours.dtype == torch.float32
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=2e-3)
    our_gradients = gradients_of(model, ours / 5)
    assert all(gradient.dtype == torch.float32 for gradient in our_gradients.values())
    assert_same(our_gradients, their_gradients, CLOSE_BF16)


def test_under_autocast_the_logits_are_those_of_a_bf16_product():
    hidden, weight, _, labelled = parts()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = (function(hidden, weight, None, labelled) for function in (plain, head_loss))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


def with_lora(model, **settings):
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            **{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **settings}
        ),
    )


def test_of_the_head_only_gradients_of_labelled_states_are_kept():
    model, batch = make_model("llama"), make_batch()
    head = find_head(model, "causal-lm")
    without = saved_bytes(model, lambda: head.hidden_states(batch))
    n = len(find_labelled(batch["labels"], predicts_next=True).positions)
    kept = saved_bytes(model, lambda: language_model_loss(model, batch, "causal-lm")) - without
    assert kept <= n * (4 * 32 + 8)


def test_what_is_not_known_takes_the_plain_path_and_says_why():
    saved = with_lora(make_model("llama"), modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    other = make_model("llama")
    other.config.model_type = "bamba"
    for model, word in ((saved, "ModulesToSaveWrapper"), (other, "bamba")):
        assert word in find_head(model, "causal-lm").why_whole
        batch = make_batch()
        theirs = summed_loss(model, batch, "causal-lm")[0]
        their_gradients = gradients_of(model, theirs)
        ours = language_model_loss(model, batch, "causal-lm")
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
        assert_same(gradients_of(model, ours), their_gradients)
        of_rows = log_probs_of(model, batch, "causal-lm")
        expected = by_whole_logits(model, batch, "causal-lm")
        assert_close(of_rows, expected, rtol=1e-5, atol=1e-5)
        wanted = gradients_of(model, expected[1])
        assert_same(gradients_of(model, of_rows[1]), wanted)
    assert "classification" in find_head(make_model("llama"), "classification").why_whole
    hooked = make_model("llama")
    hooked.lm_head.register_forward_hook(lambda *args: None)
    assert "listens" in find_head(hooked, "causal-lm").why_whole


# ---- documents ----


def by_whole_logits(model, batch: dict[str, Tensor], task: str) -> Tensor:
    """The log-probability of each row's targets [B], from the logits of everything."""
    logits = summed_loss(model, batch, task)[1].float().log_softmax(-1)
    labels = batch["labels"]
    if task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    found = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(labels == -100, 0.0).sum(1)


def packed(model, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The rows of a padded batch end to end, for a model that is set to take them so."""
    lengths = batch["attention_mask"].sum(1).tolist()
    keep = batch["attention_mask"].bool()
    first = first_position(model.config)
    labels = batch["labels"].clone()
    labels[:, 0] = -100
    flat = {
        "input_ids": batch["input_ids"][keep].numpy()[None],
        "position_ids": np.concatenate([np.arange(n) + first for n in lengths])[None],
        "labels": labels[keep].numpy()[None],
        "lengths": np.array(lengths),
    }
    return packed_batch(flat)


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize(("family", "settings"), thinned(SETTINGS, 4))
def test_log_probabilities_of_documents_are_those_of_whole_logits(family, settings, is_adapted):
    model, batch, task = make_model(family, **settings), make_batch(n_rows=4), objective_of(family)
    if family not in ("mbart", "plbart"):  # whose decoder begins with the end of its target
        batch["labels"][2] = -100  # a document without a target
    if is_adapted:
        kind = "SEQ_2_SEQ_LM" if task == "seq2seq" else "CAUSAL_LM"
        output = next(
            name for name, each in model.named_modules() if each is model.get_output_embeddings()
        )
        model = with_lora(model, target_modules=[output, "o", "v_proj"], task_type=kind)
    weights = torch.tensor([1.0, -0.5, 2.0, 0.25])  # a gradient of each document of its own
    theirs = by_whole_logits(model, batch, task)
    their_gradients = gradients_of(model, (theirs * weights).sum())
    layouts = [batch]
    if (
        task == "causal-lm" and can_go_packed(model, task) is None
    ):  # tests/test_pairs.py has the others
        go_packed(model)
        layouts.append(packed(model.get_base_model() if is_adapted else model, batch))
    for one in layouts:
        with in_tiles_of(3):
            ours = log_probs_of(model, one, task)
        assert ours.shape == (4,)
        assert ours[2] == 0 or family in ("mbart", "plbart")
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert_same(gradients_of(model, (ours * weights).sum()), their_gradients, 1e-5)
        with torch.no_grad(), in_tiles_of(3):
            values = log_probs_of(model, one, task)
        assert_close(values, theirs, rtol=1e-5, atol=1e-5)


def test_log_probabilities_keep_no_logits_beyond_a_tile_for_the_backward_pass():
    model = with_lora(make_model("llama"), target_modules=["lm_head"], task_type="CAUSAL_LM")
    batch, head = make_batch(n_rows=4, n_tokens=64, share=1.0), find_head(model, "causal-lm")
    without = saved_bytes(model, lambda: head.hidden_states(batch))
    n = len(find_labelled(batch["labels"], predicts_next=True).positions)
    with in_tiles_of(8):
        kept = saved_bytes(model, lambda: log_probs_of(model, batch, "causal-lm"))
    kept -= without
    assert kept < n * N_WORDS * 4 / 2
    assert kept <= n * (4 * 32 + 64), "the labelled states, and a few numbers for each"


def test_whole_logits_of_a_head_that_is_not_known_are_counted():
    model = make_model("llama")
    model.config.model_type = "bamba"
    forward = Forward(model, "causal-lm", 0, Numerics(torch.device("cpu"), None))
    assert forward.head_bytes(100, 0.5) == 4 * N_WORDS * 150, (
        "logits, and a copy of those that are scored"
    )
