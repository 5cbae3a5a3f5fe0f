"""Peak memory of a training step, from the real modelling code run on tensors without data.

`traced_peak` follows every storage from its birth to its end, so real shapes of any size can be traced on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from farthing.model.memory import checkpoint_layers

CLASSES: dict[str, Any] = {
    "causal-lm": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "classification": AutoModelForSequenceClassification,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Alive(TorchDispatchMode):
    """Bytes of the storages that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: Any) -> None:
        """Follow the storage of a tensor."""
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            known = self._storages.get(storage._cdata)
            if known is None or known[0].expired():
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def now(self) -> int:
        """Bytes alive."""
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}
        return sum(n_bytes for _, n_bytes in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self.add(tensor)
        self.peak = max(self.peak, self.now())
        return result


def labelled_loss(model: Any, ids: Tensor, task: str, n_targets: int) -> Tensor:
    """What `summed_loss` does, with the labelled positions known beforehand: a mask would hide their number."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if task == "classification":
        return torch.nn.functional.cross_entropy(model(**inputs).logits.float(), ids[:, 0], reduction="sum")
    if task == "seq2seq":
        targets = ids[:, :n_targets]
        logits = model(**inputs, decoder_input_ids=targets, use_cache=False).logits
    else:
        logits, targets = model(**inputs, use_cache=False).logits[:, :-1], ids[:, 1 : n_targets + 1]
    columns = torch.arange(targets.shape[1], device=ids.device).repeat(len(ids))
    rows = torch.zeros_like(columns)
    return torch.nn.functional.cross_entropy(logits[rows, columns].float(), targets[rows, columns], reduction="sum")


def library_loss(model: Any, ids: Tensor, task: str, n_targets: int) -> Any:
    """The loss of transformers, whose result holds on to the logits."""
    return model(input_ids=ids, labels=ids)


def traced_peak(
    config: Any,
    task: str,
    *,
    method: str,
    weights: str,
    autocast: bool,
    every_n_layers: int,
    n_rows: int,
    n_tokens: int,
    n_targets: int,
    lora: dict[str, Any] | None = None,
    adapters_fp32: bool = True,
    accumulates: bool = False,
    loss: Callable[[Any, Tensor, str, int], Any] = labelled_loss,
) -> int:
    """Peak bytes of the second step with fused AdamW; the first has no optimizer state yet."""
    config.use_cache = False
    with torch.device("meta"):
        model: Any = CLASSES[task].from_config(config, dtype=DTYPES[weights])
        if method == "lora":
            kind = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}[task]
            chosen = peft.LoraConfig(task_type=kind, **(lora or {}))
            model = peft.get_peft_model(model, chosen, autocast_adapter_dtype=adapters_fp32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made: dict[int, tuple[Any, Any]] = {}
        for module in model.modules():
            for name, weight in list(module._parameters.items()):
                if weight is None:
                    continue
                if id(weight) not in made:
                    empty = torch.empty(weight.shape, dtype=weight.dtype)
                    made[id(weight)] = torch.nn.Parameter(empty, requires_grad=weight.requires_grad), weight
                module._parameters[name] = made[id(weight)][0]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        model.train()
        checkpoint_layers(model, every_n_layers)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        ids = torch.zeros(n_rows, n_tokens, dtype=torch.long)
        alive = Alive()
        for weight in model.parameters():
            alive.add(weight)
        with alive:
            for _ in range(2):
                alive.peak = 0
                for _ in range(2 if accumulates else 1):
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                        result = loss(model, ids, task, n_targets)
                    value = result if isinstance(result, Tensor) else result.loss
                    value.backward()
                    del result, value
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return alive.peak
