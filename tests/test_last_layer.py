"""The last layer computed for labelled positions alone: the same losses and gradients, fewer
products, all counted.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import workshop
from farthing.data.token_set import TokenSet
from farthing.model.activation_checkpointing import (
    Linear,
    Sample,
    checkpoint_layers,
    saved_linear,
    saved_of_a_layer,
)
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.attention import go_packed, packed_logits
from farthing.model.flops import flops_per_token
from farthing.model.forward import READ, Forward
from farthing.model.hardware import Numerics
from farthing.model.last_layer import labelled_alone, last_layer
from farthing.model.loss import inner_of
from farthing.models.families import DECODERS
from farthing.models.shapes import read_shape
from farthing.planner.recipe import FARTHING
from farthing.run.folder import SETTINGS, kept
from farthing.settings import Settings
from farthing.tasks.task import IGNORED
from test_attention import CLOSE, assert_same, documents_of, flat, gradients, model_of
from test_shared import token_set
from thinned import thinned

CPU = torch.device("cpu")
LENGTHS, N_INPUTS = (
    [24, 9, 17, 1, 9, 9],
    [16, 4, 17, 1, 8, 6],
)  # the third and fourth have no target
BEFORE = ["llama", "gpt2", "gemma3_text", "gpt_neox", "mixtral", "opt", "phi"]


def examples(seed: int = 0) -> TokenSet:
    """Texts of several lengths, mostly inputs, the first with a target in its middle."""
    tokens = token_set([ids.tolist() for ids in documents_of(LENGTHS, seed)], N_INPUTS)
    tokens.targets[3:5] = 1
    return tokens


def forward_of(model: Any, **how: Any) -> Forward:
    return Forward(model.train(), "causal-lm", 1, Numerics(CPU, None), **how)


def alone(model: Any, tokens: TokenSet) -> Tensor:
    """Sum of the losses, one example at a time, as transformers computes it."""
    found = []
    for index in range(len(tokens)):
        ids, is_target = (
            torch.from_numpy(np.array(each)).long() for each in tokens.example(index)[:2]
        )
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        labels = torch.where(is_target > 0, ids, IGNORED)[1:]
        found.append(
            F.cross_entropy(logits[:-1].float(), labels, reduction="sum", ignore_index=IGNORED)
        )
    return torch.stack(found).sum()


def batch_of(forward: Forward, tokens: TokenSet) -> Any:
    return forward.to_device(forward.collate(tokens, np.arange(len(tokens))))


def widths_of(layer: Any) -> list[int]:
    """Of how many tokens its last norm or projection is computed, from now on."""
    seen: list[int] = []
    module = [
        each
        for each in layer.modules()
        if isinstance(each, torch.nn.Linear) or "Conv1D" in type(each).__name__
    ][-1]
    module.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[-2]))
    return seen


@pytest.mark.parametrize("family", [*BEFORE, *thinned(sorted(DECODERS - set(BEFORE)), 5)])
def test_losses_and_gradients_are_those_of_plain_transformers(family: str) -> None:
    model, tokens = model_of(family), examples()
    expected = alone(model, tokens)
    theirs = gradients(model, expected)
    forward = forward_of(model)
    batch = batch_of(forward, tokens)
    n_read = len(batch[READ].positions)
    assert n_read < 30, "of 69"
    seen = widths_of(last_layer(model)) if family == "llama" else []
    loss = forward.loss(batch)
    assert seen == [n_read] * len(seen)
    torch.testing.assert_close(loss, expected, rtol=CLOSE, atol=CLOSE)
    assert_same(gradients(model, loss), theirs, 3 * CLOSE)
    with torch.no_grad():
        summed, of_each = forward.loss_and_log_probs(batch)
    torch.testing.assert_close(summed, expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(-of_each.sum(), expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("family", ["olmo", "olmoe"])
def test_projections_that_are_clipped_in_place(family: str) -> None:
    model, tokens = model_of(family, clip_qkv=0.05), examples()
    expected = alone(model, tokens)
    theirs = gradients(model, expected)
    forward = forward_of(model)
    loss = forward.loss(batch_of(forward, tokens))
    torch.testing.assert_close(loss, expected, rtol=CLOSE, atol=CLOSE)
    assert_same(gradients(model, loss), theirs, 3 * CLOSE)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_with_an_adapter_checkpointing_and_a_shared_beginning(family: str, every: int) -> None:
    beginning = documents_of([40], 9)[0].tolist()
    texts = [beginning + ids.tolist() for ids in documents_of([6, 8, 6, 2, 5], 3)]
    tokens = token_set(texts, [44, 45, 43, 41, 44])
    model = add_adapter(
        model_of(family, max_position_embeddings=64),
        Adapter(r=2, target_modules=("all-linear",)),
        "causal-lm",
        0,
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    expected = alone(model, tokens)
    theirs = gradients(model, expected)
    forward = forward_of(model)
    forward.shares = True
    checkpoint_layers(model, every)
    batch = batch_of(forward, tokens)
    assert batch["documents"].key_rows is not None
    assert len(batch[READ].positions) < batch["input_ids"].numel() / 2
    loss = forward.loss(batch)
    torch.testing.assert_close(loss, expected, rtol=CLOSE, atol=CLOSE)
    assert_same(gradients(model, loss), theirs, 3 * CLOSE)


def test_nothing_is_kept_once_the_backward_pass_is_over() -> None:
    model, tokens, kept = model_of("llama"), examples(), []
    forward = forward_of(model)
    for module in list(last_layer(model).modules())[1:]:
        module.register_forward_hook(
            lambda _, __, out: kept.append(weakref.ref(out[0] if type(out) is tuple else out))
        )
    gc.collect()
    gc.disable()  # as while a run trains
    try:
        forward.loss(batch_of(forward, tokens)).backward()
        assert kept
        assert not [each for each in kept if each() is not None]
    finally:
        gc.enable()


def read_of(lengths: list[int], wanted: list[int]) -> Any:
    arrays = {"lengths": np.array(lengths), "input_ids": np.zeros((1, sum(lengths)), np.int64)}
    return labelled_alone(arrays, np.array(wanted, np.int64), CPU)


def test_neighbours_are_read_together_and_small_gaps_too() -> None:
    read = read_of([64, 100], [20, 21, 23, 40, 63, 150, 151])
    assert read.positions.tolist() == [20, 21, 22, 23, 40, 63, 150, 151], (
        "a gap of one costs less than 22 keys copied"
    )
    assert read.documents.lengths == (4, 1, 1, 2)
    assert read.documents.key_lengths == (24, 41, 64, 88)
    rows = [*range(24), *range(41), *range(64), *range(64, 152)]
    assert read.documents.key_rows.tolist() == rows


def test_where_most_is_read_or_nothing_the_layer_is_whole() -> None:
    assert read_of([10, 10], []) is None
    assert read_of([10, 10], [*range(2, 9), *range(12, 19)]) is None
    assert read_of([10, 10], [7, 8, 17, 18]) is not None
    # a label now and then: their keys would be copied again and again
    assert read_of([4096], list(range(100, 4000, 100))) is None


@pytest.mark.parametrize("why", ["listened to", "compiled", "said so"])
def test_a_layer_that_must_not_be_cut_is_whole(why: str) -> None:
    model, tokens = model_of("llama"), examples()
    forward = forward_of(model, settled=Settings(reads_labelled=why != "said so"))
    last: Any = model.model.layers[-1]
    seen = widths_of(last)
    if why == "listened to":
        last.register_forward_hook(lambda *_: None)
    elif why == "compiled":
        last._compiled_call_impl = last._call_impl
    forward.loss(batch_of(forward, tokens))
    assert seen == [sum(LENGTHS)]
    assert forward.last_layer_read(tokens, np.arange(len(tokens))) == (None, 1.0)


def test_bytes_are_counted_of_a_whole_last_layer() -> None:
    model, tokens = model_of("llama"), examples()
    forward = forward_of(model)
    seen = widths_of(last_layer(model))
    forward.before_head(batch_of(forward, tokens))
    assert seen == [sum(LENGTHS)], "another micro-batch may have labels everywhere"


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_plan_and_receipt_count_the_last_layer_for_labelled_positions(
    family: str, method: str
) -> None:
    whole = model_of(family, tie_word_embeddings=False)
    shape = read_shape(whole.config.to_dict(), "causal-lm")
    model = (
        add_adapter(whole, Adapter(r=2, target_modules=("all-linear",)), "causal-lm", 0)
        if method == "lora"
        else whole
    )
    tokens = token_set([ids.tolist() for ids in documents_of([30] * 4)], [24] * 4)
    forward, products = forward_of(model), []
    for is_read in (True, False):
        batch = batch_of(forward, tokens)
        if not is_read:
            del batch[READ]
        with FlopCounterMode(display=False) as counter:
            forward.loss(batch).backward()
        counted = {str(kind): n for kind, n in counter.get_flop_counts()["Global"].items()}
        products.append(sum(n for name, n in counted.items() if "mm" in name) / 4)
    adapters = shape.with_lora(2, ("all-linear",)) if method == "lora" else None
    planned = [shape.training_flops(30, 0, 6, adapters, n_read=n_read) for n_read in (6.0, None)]
    less = [each.body + each.adapters for each in planned]
    assert less[1] - less[0] == pytest.approx(products[1] - products[0], rel=0.03)
    last, share = forward.last_layer_read(tokens, np.arange(4))
    assert (last, share) == (last_layer(inner_of(model)), 0.2)
    saved = (flops_per_token(model) - flops_per_token(model, last, share)) * 30
    assert saved == pytest.approx(less[1] - less[0], rel=0.1 if method == "lora" else 0.01)


def test_a_plan_counts_few_labels_and_no_compiled_layers() -> None:
    stack = replace(FARTHING, reads_labelled=True)
    assert stack.n_read(100, 0.25) == 25
    assert stack.n_read(100, 0.9) is None
    assert replace(stack, is_compiled=True).n_read(100, 0.25) is None
    assert FARTHING.n_read(100, 0.25) is None


def test_a_run_of_before_goes_on_with_a_whole_last_layer_and_the_head_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = workshop.make_job(tmp_path, max_steps=2, save_steps=1, probe=False)
    run = workshop.begun_by_an_earlier_version(
        job, monkeypatch, reads_labelled=True, lean_head=True
    )
    assert workshop.train(job).state == "finished"
    after = kept(run / SETTINGS) or {}
    assert (after["reads_labelled"], after["lean_head"], after["own_kernels"]) == (
        False,
        False,
        True,
    )
    assert not forward_of(model_of("llama"), settled=Settings.from_json(after)).head.is_lean


def test_a_checkpointed_layer_is_measured_that_is_computed_for_all_tokens() -> None:
    model = model_of("bert", "classification", num_hidden_layers=3)
    go_packed(model)

    def sample(n: int) -> Sample:
        batch = flat(model, documents_of([n]))
        return Sample(n, lambda: packed_logits(model, batch, "classification").sum())

    samples = sample(8), sample(32)
    found = []
    for every in (0, 1):
        checkpoint_layers(model, every)
        found.append(saved_of_a_layer(model, samples, saved_linear(model, samples)))
    whole = found[0].bytes_per_token  # of a mean of three, one of which is of one token
    assert found[1].bytes_per_token > 0.8 * whole > 0
    assert isinstance(found[1], Linear)
