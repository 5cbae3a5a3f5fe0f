"""Peak memory of a training step, from the real modelling code run on tensors without data.

`traced_peak` follows every storage from its birth to its end, so real shapes of any size can be
traced on a laptop.
"""

import weakref
from contextlib import nullcontext
from typing import Any

import peft
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from farthing.model import cpu
from farthing.model.activation_checkpointing import checkpoint_layers
from farthing.model.adapter_start import take_start_away
from farthing.model.attention import Documents, go_packed, packed_logits
from farthing.model.casts import Casts, add_up
from farthing.model.lora_kernels import use_low_rank
from farthing.model.loss import inner_of
from farthing.model.norms import use_one_gelu
from heads import language_model_loss

CLASSES = {
    "causal-lm": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Alive(TorchDispatchMode):
    """Bytes of the storages that are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._known = {}

    def add(self, tensor):
        """Follow the storage of a tensor."""
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known[storage._cdata] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int):
        self._now -= self._known.pop(key)

    def now(self) -> int:
        """Bytes alive."""
        return self._now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self.add(tensor)
        self.peak = max(self.peak, self.now())
        return result


def own_loss(
    model, ids: Tensor, task: str, n_targets: int, documents: tuple[int, ...] = ()
) -> Tensor:
    """What the trainer does: `Forward.loss` of documents end to end, or of a padded batch,
    `n_targets` labelled.
    """
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if documents:
        of = Documents.of(documents)
        ids = torch.zeros(1, sum(documents), dtype=torch.long)
        batch = {
            "input_ids": ids,
            "position_ids": torch.zeros_like(ids),
            "attention_mask": of.no_mask,
            "documents": of,
        }
    if task == "classification":
        labels = torch.zeros(len(documents) or len(ids), dtype=torch.long)
        scores = packed_logits(model, batch) if documents else model(**batch).logits
        return torch.nn.functional.cross_entropy(scores.float(), labels, reduction="sum")
    n_scored = len(ids) * n_targets
    batch |= {"labels": ids, "labelled_positions": torch.zeros(n_scored, dtype=torch.long)}
    batch["labelled_targets"] = torch.zeros_like(batch["labelled_positions"])
    return language_model_loss(model, batch, task)


def fake_model(
    config,
    task: str,
    *,
    method: str,
    weights: str,
    checkpoint_every: int,
    lora: dict[str, Any] | None = None,
    keeps_start: bool = False,
    is_packed: bool = False,
):
    """A model of tensors without data, in training mode, set up as the trainer does; within
    FakeTensorMode.
    """
    config.use_cache = False
    with torch.device("meta"):
        model = CLASSES[task].from_config(config, dtype=DTYPES[weights])
        if method != "full":
            kind = {"causal-lm": "CAUSAL_LM", "classification": "SEQ_CLS"}[task]
            chosen = peft.LoraConfig(task_type=kind, **(lora or {}))
            model = peft.get_peft_model(model, chosen)
            if keeps_start:
                take_start_away(model)
    made = {}
    for module in model.modules():
        of_module = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, weight in list(of_module):
            if id(weight) not in made:
                empty = torch.empty(weight.shape, dtype=weight.dtype)
                made[id(weight)] = (
                    torch.nn.Parameter(empty, requires_grad=weight.requires_grad),
                    weight,
                )
            setattr(module, name, made[id(weight)][0])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    if method == "qlora":
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.Linear):
                module.base_layer = InFourBits(module.base_layer)
    model.train()
    checkpoint_layers(model, checkpoint_every)
    use_low_rank(model)
    use_one_gelu(inner_of(model))
    if is_packed:
        go_packed(model)
        cpu.use(inner_of(model))
    return model


class InFourBits(torch.nn.Module):
    """A frozen linear layer as bitsandbytes keeps it: half a byte a weight, made whole for each
    product.
    """

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        n_bytes = int(linear.weight.numel() * 0.515869140625)
        self.weight = torch.nn.Parameter(
            torch.empty(n_bytes, dtype=torch.uint8), requires_grad=False
        )
        self.shape, self.dtype = linear.weight.shape, linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [..., i] -> [..., o]."""
        return _FourBitProduct.apply(x.to(self.dtype), self.weight, self.shape, self.dtype)


class _FourBitProduct(torch.autograd.Function):
    """Keeps the weight as it is, not the input: `MatMul4Bit` of bitsandbytes."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, shape, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.how = shape, dtype
        return x @ weight.new_empty(shape, dtype=dtype).t()

    @staticmethod
    def backward(ctx, grad: Tensor):
        (weight,) = ctx.saved_tensors
        shape, dtype = ctx.how
        return grad @ weight.new_empty(shape, dtype=dtype), None, None, None


def traced_peak(
    config,
    task: str,
    *,
    autocast: bool,
    n_rows: int = 0,
    n_tokens: int = 0,
    n_targets: int = 0,
    documents: tuple[int, ...] = (),
    accumulates: bool = False,
    casts_once: bool = False,
    **of_model,
) -> int:
    """Peak bytes of a step with fused AdamW, whose state is there already.

    A padded batch of `n_rows`, or `documents` of so many tokens laid end to end; `n_targets`
    labelled of a row, or of all documents. `of_model` is for `fake_model`.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config, task, is_packed=bool(documents), **of_model)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        for weight in trained:  # its state is there from the second step on
            weight.grad = torch.empty_like(weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ids = torch.zeros(n_rows, n_tokens, dtype=torch.long)
        alive = Alive()
        for tensor in tree_leaves(
            [list(model.parameters()), [list(of.values()) for of in optimizer.state.values()]]
        ):
            alive.add(tensor)
        casts = Casts(model, torch.bfloat16) if casts_once else None
        with alive, casts.kept(several=accumulates) if casts else nullcontext():
            for _ in range(2 if accumulates else 1):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = own_loss(model, ids, task, n_targets, documents)
                loss.backward()
                add_up()
                del loss
        with alive:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return alive.peak
