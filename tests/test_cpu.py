"""What is only for CPUs gives what transformers and torch give: attention of packed documents and
norms, in fp32 and in bf16.
"""

import copy
import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from farthing.model import cpu
from farthing.model.attention_kernels import AttentionSettings
from farthing.model.documents import Documents
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.model.norms import KINDS, use_one_gelu
from farthing.model.products import few_sizes
from interrupted import LeavesAt
from packed_models import (
    assert_close_with_gradients,
    by_formula,
    documents,
    model_of,
    with_adapter,
)
from workshop import losses_of, make_job, train

HEADS, WIDTH = 4, 16
CLOSE = 1e-2  # of the whole: bf16 has eight bits
LENGTHS, SEEN = (5, 1, 9, 3), (4, 7, 1, 6)


@pytest.fixture(autouse=True)
def on_a_cpu():
    """Packed documents are computed by what is here, as behind the first model on a CPU."""
    cpu.use(nn.Module())


# ---- bf16 ----


def halves(n: int, n_heads: int = HEADS) -> Tensor:
    """Random [n, heads, width] in bf16."""
    return torch.randn(n, n_heads, WIDTH).bfloat16().requires_grad_()


@pytest.mark.parametrize(
    ("lengths", "key_lengths", "n_shared"),
    [
        ((1, 143, 20, 300, 64, 65), None, 1),
        ((2, 130, 1), (70, 141, 300), 2),
        ((700,), None, 4),
        ((3, 2), None, 1),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_answers_and_gradients_are_those_of_the_formula(lengths, key_lengths, n_shared, causal):
    torch.manual_seed(0)
    documents = Documents.of(lengths, "cpu", key_lengths)
    n_keys = sum(documents.key_lengths)
    given = [
        halves(sum(lengths)),
        halves(n_keys, HEADS // n_shared),
        halves(n_keys, HEADS // n_shared),
    ]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    passed = torch.randn(sum(lengths), HEADS, WIDTH).bfloat16()
    how = AttentionSettings(causal, 0.3)
    out = cpu.attend(*given, documents, how)  # type: ignore[call-arg]
    right = by_formula(*exact, documents, how)  # type: ignore[call-arg]
    found = [out, *torch.autograd.grad(out, given, passed)]
    wanted = [right, *torch.autograd.grad(right, exact, passed.double())]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert one.isfinite().all()
        assert float((one.detach() - other.detach()).norm() / other.detach().norm()) < CLOSE


class Sizes(TorchDispatchMode):
    """Sizes of the matrices in bf16 that are multiplied."""

    def __init__(self):
        super().__init__()
        self.seen = set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            for each in args:
                self.seen |= set(each.shape) if each.dtype == torch.bfloat16 else set()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("adapter", [None, {}, {"dropout": 0.2}])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_products_in_bf16_have_few_shapes(family, adapter):
    model, tokens = model_of(family), documents()
    if adapter is not None:
        model = with_adapter(model, **adapter)
    forward = Forward(model, "causal-lm", 1, Numerics(torch.device("cpu"), torch.bfloat16))
    with Sizes() as sizes:
        for n in range(1, 5):
            batch = forward.to_device(forward.collate(tokens, np.arange(n)))
            forward.loss(batch)[0].backward()
    of_weights = {size for weight in model.parameters() for size in weight.shape}
    assert sizes.seen - of_weights <= {16, 32, 48}


def test_layers_take_inputs_of_any_form():
    layer = nn.Linear(12, 3).bfloat16()
    inputs = [torch.randn(size).bfloat16() for size in ((12,), (0, 12), (2, 3, 12))]
    plain = [layer(x) for x in inputs]
    cpu.use(nn.Sequential(layer))
    for x, expected in zip(inputs, plain, strict=True):
        assert_close(layer(x), expected)


def test_sizes_are_few_and_hardly_larger():
    for n in range(1, 5000):
        size = few_sizes(n)
        assert n <= size < n + max(16, n / 8)
        assert few_sizes(size) == size
    assert len({few_sizes(n) for n in range(1, 2049)}) == 40


@pytest.mark.parametrize("odd", ["window", "softcap"])
def test_blocks_leave_windows_and_capped_scores_to_others(odd):
    query = torch.zeros(4, 1, 1, dtype=torch.bfloat16)
    how = AttentionSettings(causal=True, scale=1.0, **{odd: 2})
    assert not cpu.takes(query, Documents.of((4,)), how)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_run_in_bf16_that_was_stopped_has_the_losses_of_one_that_was_not(family, tmp_path):
    keys = {"max_steps": 3, "save_steps": 1, "bf16": True}
    stopped, whole = (make_job(tmp_path / name, family, **keys) for name in ("stopped", "whole"))
    assert train(stopped, LeavesAt(step=1)).state == "interrupted"
    assert {train(job).state for job in (stopped, whole)} == {"finished"}
    assert losses_of(stopped) == losses_of(whole)


# ---- fp32 ----


def tokens(n: int) -> Tensor:
    """[n, 2 heads, 4] of random numbers that are trained."""
    return torch.randn(n, 2, 4, requires_grad=True)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("seen", [None, SEEN])
def test_short_documents_are_attended_to_as_by_the_formula(has_bias, seen):
    documents = Documents.of(LENGTHS, "cpu", seen)
    inputs = [tokens(sum(LENGTHS)), *(tokens(sum(seen or LENGTHS)) for _ in range(2))]
    bias = torch.randn(1, 2, 9, 9, requires_grad=True)
    how = AttentionSettings(False, 0.7, bias=bias if has_bias else None)
    assert cpu.takes(inputs[0], documents, how)
    ours, theirs = (
        attended(*inputs, documents, how)  # type: ignore[call-arg]
        for attended in (cpu.attend, by_formula)
    )
    assert_close_with_gradients(ours, theirs, [*inputs, *([bias] if has_bias else [])])


def test_what_is_dropped_of_weights_is_dropped_of_their_gradients():
    documents = Documents.of(LENGTHS)
    query, key, value = (tokens(sum(LENGTHS)).detach().double().requires_grad_() for _ in range(3))

    def drawn(*inputs):
        torch.manual_seed(3)
        return cpu.attend(*inputs, documents, AttentionSettings(False, 0.5, dropout=0.4))

    # in double precision the softmax's backward pass is asked for fp32, so differences are taken of
    # the values alone
    direction = torch.randn_like(value)
    step = 1e-4
    numeric = (
        drawn(query, key, value + step * direction) - drawn(query, key, value - step * direction)
    ) / (2 * step)
    given = torch.randn_like(numeric)
    (of_value,) = torch.autograd.grad(drawn(query, key, value), value, given)
    assert_close((of_value * direction).sum(), (given * numeric).sum())
    assert not torch.equal(
        drawn(query, key, value),
        cpu.attend(query, key, value, documents, AttentionSettings(False, 0.5)),
    )


def kinds() -> list[Any]:
    """The classes that `KINDS` names, where this version of transformers has them."""
    families = (
        *("exaone4", "granite", "llama", "ministral", "mistral", "mixtral", "mt5", "olmo2"),
        *("olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "t5", "umt5"),
    )
    found = {}
    for family in families:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        found |= {name: value for name, value in vars(module).items() if name in KINDS}
    return list(found.values())


def test_norms_are_those_of_transformers():
    classes = kinds()
    assert {each.__name__ for each in classes} == KINDS
    for kind in classes:
        plain = nn.Sequential(kind(24))
        with torch.no_grad():
            plain[0].weight.copy_(torch.randn(24))
        own = copy.deepcopy(plain)
        cpu.use(own)
        assert "forward" in vars(own[0]), kind
        hidden = torch.randn(3, 7, 24) * 5 + 2
        results = []
        for model in (plain, own):
            given = hidden.clone().requires_grad_()
            out = model(given)
            out.sin().sum().backward()
            results.append((out.detach(), given.grad, model[0].weight.grad))
        for left, right in zip(*results, strict=True):
            assert_close(left, right, rtol=2e-5, atol=2e-6)
        assert torch.equal(own(hidden.bfloat16()), plain(hidden.bfloat16()))  # left to transformers


def test_a_gelu_with_a_tanh_is_that_of_transformers():
    from transformers.activations import ACT2FN

    activation, numbers = ACT2FN["gelu_new"], torch.linspace(-9, 9, 2001)
    expected = activation(numbers)
    use_one_gelu(nn.Sequential(activation))
    assert_close(activation(numbers), expected, rtol=1e-5, atol=1e-6)
    assert activation(numbers.requires_grad_()).grad_fn.name() == "GeluBackward0"
