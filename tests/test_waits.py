"""Within a step no operation makes the host wait for the device: every claimed family, over what
the trainer itself calls.

Run on a CPU, with eyes on each operation: values that come back, and shapes that follow from
values, are what a GPU would be waited for. docs/explanation/gpu.md lists what is left, and why.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farthing.model import attention_kernels
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.documents import Documents, owners_of, sent
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.model.head import find_head, word_losses
from farthing.model.lora_kernels import use_low_rank
from farthing.model.loss import Labelled
from farthing.models.families import DECODERS, ENCODERS
from farthing.train.optim import waiting_once
from heads import labelled, make_batch, make_model, summed_loss
from packed_models import documents, model_of

WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "unique",
    "bincount",
    "grouped_mm_fallback",
)


class NoWaits(TorchDispatchMode):
    """Raises where a processor would wait for its GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run it, unless it waits."""
        name, kwargs = str(func), kwargs or {}
        waits = any(word in name for word in WAITING) or name.startswith("aten.equal")
        waits |= (
            name.startswith("aten.repeat_interleave.Tensor") and kwargs.get("output_size") is None
        )
        if name.startswith(
            ("aten.index.", "aten.index_put", "aten._index_put", "aten._unsafe_index")
        ):
            chosen = [one for one in args[1] if one is not None]
            a_number = "put" in name and args[2].numel() == 1  # which torch fills in by the mask
            waits |= any(one.dtype in (torch.bool, torch.uint8) for one in chosen) and not a_number
        assert not waits, f"{name} waits for the device"
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Within the block whatever waits raises, methods that are no operations among them."""

    def refused(name):
        def refuse(*_, **__):
            raise AssertionError(f"{name} waits for the device")

        return refuse

    with contextlib.ExitStack() as stack:
        for name in ("tolist", "numpy", "cpu"):
            stack.enter_context(mock.patch.object(Tensor, name, refused(name)))
        stack.enter_context(NoWaits())
        yield


def step(model, task: str, dtype: torch.dtype | None = None, **how) -> Tensor:
    """Loss and gradients of a micro-batch as the trainer computes them, the device never waited
    for.
    """
    forward = Forward(model, task, 1, Numerics(torch.device("cpu"), dtype), **how)
    tokens = documents()
    arrays = forward.collate(tokens, np.arange(len(tokens)))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    with no_waits():
        loss, _ = forward.loss(forward.to_device(arrays))
        found = torch.autograd.grad(loss, trained, allow_unused=True)
    assert any(gradient is not None and bool(gradient.any()) for gradient in found)
    assert forward.why_padded is None
    return loss


def test_the_eyes_see():
    for waits in (
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: torch.equal(x, x),
        lambda x: torch.arange(3).repeat_interleave(x.long()),
        lambda x: x.unique(),
    ):
        with pytest.raises(AssertionError, match="waits for the device"), no_waits():
            waits(torch.ones(3))
    with no_waits():
        x = torch.ones(3)
        x[x > 0] = 2.0
        x[torch.tensor([0, 2])].sum()
        torch.arange(3).repeat_interleave(x.long(), output_size=6)


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_a_packed_step_of_a_decoder(family):
    step(model_of(family), "causal-lm")


@pytest.mark.parametrize("family", [*sorted(ENCODERS), "llama", "gemma3_text", "gpt2", "mixtral"])
def test_a_packed_step_of_a_classifier(family):
    step(model_of(family, "classification"), "classification")


@pytest.mark.parametrize(
    ("family", "task"),
    [("llama", "causal-lm"), ("gemma2", "causal-lm"), ("bert", "classification")],
)
def test_a_packed_step_in_half_precision_with_dropout_adapters_and_recomputing(
    family, task, monkeypatch
):
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_: "padded")
    rates = {
        "attention_dropout": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
    }
    model = add_adapter(model_of(family, task, **rates), Adapter(r=4, dropout=0.1), task, seed=0)
    use_low_rank(model)
    checkpoint_layers(model, 2)
    step(model, task, torch.bfloat16, label_smoothing=0.1)


def test_rotations_for_long_texts():
    size = model_of("phi3").config
    n = size.hidden_size // size.num_attention_heads // 2
    long = {
        "rope_type": "longrope",
        "short_factor": [1.0] * n,
        "long_factor": [2.0] * n,
        "rope_theta": 1e4,
    }
    long["original_max_position_embeddings"] = 8
    step(model_of("phi3", rope_parameters=long, original_max_position_embeddings=8), "causal-lm")


def test_scores_of_an_unknown_head_are_taken_at_positions_known_beforehand():
    model, batch = make_model("llama"), labelled(make_batch(), "causal-lm")
    model.config.model_type = "bamba"
    head = find_head(model, "causal-lm")
    logits = head.hidden_states(batch).detach().requires_grad_()
    with no_waits():
        loss = word_losses(logits, head, Labelled.of(batch)).sum()
        loss.backward()
    expected = summed_loss(model, batch, "causal-lm")[0]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_what_is_sent_to_a_gpu_is_pinned_first(monkeypatch):
    """From pageable memory a copy of 64 KB or more waits for all that the stream has to do before."""  # noqa: E501
    said = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: said.append("pinned") or self)
    monkeypatch.setattr(
        Tensor,
        "to",
        lambda self, device, non_blocking: said.append((str(device), non_blocking)) or self,
    )
    sent(np.arange(3), "cuda")
    assert said == ["pinned", ("cuda", True)]
    said.clear()
    sent(np.arange(3), "cpu")
    assert said == [("cpu", True)]


def test_owners_of_keys_are_counted_on_the_device():
    """Not sent: there are as many as tokens."""
    made = Documents.of([2, 1, 3], "cpu", [2, 3, 4], np.array([0, 1, 0, 1, 2, 0, 3, 4, 5]))
    with mock.patch("torch.from_numpy", side_effect=AssertionError), no_waits():
        owners = owners_of(made)
    assert owners.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("is_paged", [False, True])
def test_optimizers_of_bitsandbytes_wait_once_at_most(is_paged):
    """By themselves they wait after each weight; the host may read what is paged."""
    waited = []
    module = SimpleNamespace(sync_gpu=waited.append)

    class Blockwise(torch.optim.SGD):
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                module.sync_gpu(weight)
            return super().step(closure)

    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer = Blockwise(weights, lr=1.0)
    optimizer.is_paged = is_paged
    waiting_once(optimizer, module).step()
    assert len(waited) == is_paged
    assert not any(weight.any() for weight in weights)
    module.sync_gpu(weights[0])
    assert len(waited) == is_paged + 1
