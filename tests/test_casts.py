"""Weights cast once a step and gradients added up together: the numbers of autocast and autograd,
on a CPU.
"""

import contextlib
import copy
import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from farthing.model import casts, cpu
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.casts import Casts, add_up, leaf_of
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from packed_models import documents, model_of, with_adapter
from workshop import are_same

in_bf16 = partial(torch.autocast, "cpu", torch.bfloat16)
NUMERICS = Numerics(torch.device("cpu"), torch.bfloat16)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Layers are not those of a CPU, which has no casts."""
    monkeypatch.setattr(cpu, "use", lambda _: None)


def gradients(
    model, task: str, *, with_casts: bool, at_once: bool = False
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(losses, gradients by name) of two micro-batches."""
    forward, tokens, losses = Forward(model, task, 1, NUMERICS), documents(), []

    def go_through():
        for examples in (np.arange(4), np.arange(4, 6)):
            torch.manual_seed(len(examples))
            loss, _ = forward.loss(forward.to_device(forward.collate(tokens, examples)))
            losses.append(loss.detach())
            loss.backward()
            add_up()

    if with_casts:
        with Casts(model, torch.bfloat16).kept(several=True, at_once=at_once):
            go_through()
    else:
        go_through()
    return losses, {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize(
    ("family", "task", "adapter"),
    [
        ("llama", "causal-lm", None),
        ("llama", "causal-lm", {"dropout": 1e-9}),
        ("bert", "classification", None),
        ("bert", "classification", {}),
        ("mixtral", "causal-lm", None),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_same_gradients(family, task, adapter, at_once):
    plain = model_of(family, task)
    if adapter is not None:
        plain = with_adapter(plain, task, **adapter)
    other = copy.deepcopy(plain)
    losses, expected = gradients(plain, task, with_casts=False)
    again, found = gradients(other, task, with_casts=True, at_once=at_once)
    assert [float(each) for each in again] == [float(each) for each in losses]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if name.endswith(
            "key.bias"
        ):  # nothing but rounding: softmax takes away what all keys have in common
            continue
        assert found[name].dtype == gradient.dtype
        # gradients of an input that several layers read are added in bf16, 8 bits, and in fp32
        # without
        torch.testing.assert_close(
            found[name], gradient, rtol=0.03, atol=0.02 * float(gradient.abs().max()), msg=name
        )


def test_the_same_gradients_where_layers_are_computed_again():
    plain = model_of("llama")
    other = copy.deepcopy(plain)
    checkpoint_layers(other, 1)
    _, expected = gradients(plain, "causal-lm", with_casts=True)
    _, found = gradients(other, "causal-lm", with_casts=True)
    assert are_same(found, expected)


def two_layers(*, are_tied: bool = False) -> tuple[torch.nn.Module, Casts]:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)])
    if are_tied:
        model[1].weight = model[0].weight
    return model, Casts(model, torch.bfloat16)


def test_copies_are_gone_behind_their_step_without_a_collection_of_garbage():
    model, kept = two_layers()
    gc.disable()
    try:
        with (
            contextlib.suppress(KeyError),
            kept.kept(several=True, at_once=True),
            in_bf16(),
        ):
            copies = [weakref.ref(leaf_of(layer.weight)) for layer in model]
            model[0](torch.ones(1, 8)).sum().backward()
            raise KeyError
        assert [copy() for copy in copies] == [None, None]
    finally:
        gc.enable()


def test_a_copy_made_without_gradients_is_not_taken_where_they_are_wanted():
    model, kept = two_layers()
    x = torch.randn(3, 8, requires_grad=True)
    with kept.kept(several=True), in_bf16():
        with torch.no_grad():
            model[1](x)
        model[0](x).sum().backward()
    assert x.grad.any()


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("small", [0, 1 << 18])
def test_a_weight_that_several_layers_share(monkeypatch, small, several):
    monkeypatch.setattr(casts, "SMALL", small)
    model, kept = two_layers(are_tied=True)
    assert len(kept.weights) == 2
    x = torch.ones(1, 8)
    for _ in range(2):
        with kept.kept(several=several), in_bf16():
            (model[0](x).sum() + model[1](x).sum()).backward()
            add_up()
    assert torch.equal(model[0].weight.grad, torch.full((8, 8), 4.0))
    assert torch.equal(model[0].bias.grad, torch.full((8,), 2.0))


def test_hooks_hear_of_gradients_that_are_added_at_once():
    model, kept = two_layers()
    weight, heard = model[0].weight, []
    with kept.kept(several=True, at_once=True), in_bf16():
        leaf_of(weight).register_post_accumulate_grad_hook(lambda _: heard.append(weight.grad))
        model[0](torch.ones(1, 8)).sum().backward()
    assert len(heard) == 1
    assert torch.equal(heard[0], torch.ones(8, 8))


def test_a_shared_weight_whose_layer_is_computed_again_after_its_copy_is_gone():
    """As Zamba's: the backward pass of the last use gives the copy up, and the first use is
    computed again after that.
    """
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    shared, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    plain = copy.deepcopy(shared)

    def twice(layer, given):
        with in_bf16():
            for _ in range(2):
                given = checkpoint(
                    lambda each: torch.tanh(layer(each)), given, use_reentrant=False
                ).float()
            return given.sum()

    with Casts(shared, torch.bfloat16).kept(several=False):
        twice(shared, x.clone().requires_grad_()).backward()
        add_up()
    twice(plain, x.clone().requires_grad_()).backward()
    torch.testing.assert_close(shared.weight.grad, plain.weight.grad, rtol=0.02, atol=0.02)
