"""An update of the weights happens once, whole, or not at all.

Memory for it is there before it begins: the optimizer's state is made before the first step, and
what a step takes besides is asked for at once, where nothing has changed yet. Should memory run out
all the same, `UpdateGuard` tells whether any weight or state was written.

A half-made update is never saved; the run continues from its last checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from farthing.device_memory import first_line, is_out_of_memory
from farthing.errors import OutOfMemoryError
from farthing.train.bf16_adamw import BUCKET, BYTES_PER_WEIGHT, StochasticAdamW

SMALL_BYTES = (
    1 << 20
)  # tensors up to this come from blocks of their own in torch's allocator for CUDA


PINNED_TO_DO = (
    "use adamw_8bit or method: lora, or more main memory (`ulimit -l` and a container may limit it)"
)
MODEL_TO_DO = "the model's weights do not fit: use method: qlora, a smaller model, or a larger GPU"
OPTIMIZER_TO_DO = (
    "the optimizer's state does not fit beside the weights: use optim: adamw_8bit or"
    " adamw_torch_offload, method: lora or qlora, or a larger GPU"
)


@contextlib.contextmanager
def out_of_memory_said(
    where: str, to_do: str, what: str = "the device has no memory left"
) -> Iterator[None]:
    """Memory that runs out within the block is said with its place in the job and what to do.
    Raises `OutOfMemoryError`.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{what}: {first_line(error)}", where=where, to_do=to_do) from error


class UpdateGuard:
    """Tells whether an update has begun to write, by the version counters that torch keeps for
    every tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # kernels of bitsandbytes write by address, and no counter hears of it
        self._is_counted = not hasattr(optimizer, "init_state")
        self._versions: list[int] | None = None

    def begin(self) -> None:
        self._versions = None

    def enter(self) -> None:
        self._versions = self._now()

    def refuse_half_an_update(self, step: int, error: BaseException) -> None:
        """Raise `OutOfMemoryError` where the update of `step` (from 0) can't be taken again."""
        if self._versions is None or (self._is_counted and self._now() == self._versions):
            return
        raise OutOfMemoryError(
            f"memory ran out in the update of step {step + 1}, after some weights had changed: it"
            " can't be taken again",
            where="train.optim",
            to_do=(
                "run the same command again: it resumes from the last checkpoint; if it happens"
                " again, use optim: adamw_torch_fused, which needs nothing besides its state, or"
                " adamw_torch_offload"
            ),
        ) from error

    def _now(self) -> list[int]:
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        state = [
            value
            for of in self._optimizer.state.values()
            for value in of.values()
            if isinstance(value, Tensor)
        ]
        return [tensor._version for tensor in (*weights, *state)]


def reserve_for_update(optimizer: torch.optim.Optimizer) -> None:
    """Take what the update of torch's unfused optimizers needs besides, and give it back to the
    allocator's cache.

    Memory that is not there is missed here, where no weight has changed, and not in the middle of
    the update. Nothing on a CPU, whose allocator keeps no cache.
    """
    for group in optimizer.param_groups:
        n_bytes = temporary_bytes(optimizer, group)
        device = group["params"][0].device
        if n_bytes and device.type == "cuda":
            torch.empty(n_bytes, dtype=torch.uint8, device=device)


def load_update_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Update a made-up weight in each group's way. CUDA loads a kernel into the GPU's memory when
    it is launched first: where there is no room for that it is missed here, where no weight has
    changed. bitsandbytes would end the process."""
    if not isinstance(optimizer, StochasticAdamW) and not type(optimizer).__module__.startswith(
        "torch.optim"
    ):
        return
    for group in optimizer.param_groups:
        weight = group["params"][0].detach().new_zeros(1).requires_grad_()
        weight.grad = torch.zeros_like(weight)
        type(optimizer)([{**group, "params": [weight]}]).step()


def update_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the update takes on a GPU besides weights, gradients and state, at its worst."""
    return max(temporary_bytes(optimizer, group) for group in optimizer.param_groups)


def temporary_bytes(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """Bytes that the update of a group takes besides weights, gradients and state; 0 where it is
    not known.

    AdamW has the roots of its second moments (`_multi_tensor_adam`: of all weights at once), SGD
    with decay a copy of a gradient at a time (`_single_tensor_sgd`), Adafactor the update and its
    factors, three times a weight; AdamW over bf16 weights a bucket in fp32; fused kernels nothing.
    """
    if is_adafactor(optimizer):
        return 3 * max(weight.nbytes for weight in group["params"])
    if isinstance(optimizer, StochasticAdamW):
        return BYTES_PER_WEIGHT * min(BUCKET, sum(weight.numel() for weight in group["params"]))
    if group.get("fused") or not isinstance(optimizer, torch.optim.AdamW | torch.optim.SGD):
        return 0
    of_each = [weight.nbytes for weight in group["params"] if weight.nbytes > SMALL_BYTES]
    if isinstance(optimizer, torch.optim.SGD) or group.get("foreach") is False:
        return max(of_each, default=0)
    return sum(of_each)


def is_adafactor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is transformers' Adafactor, which is not imported for other optimizers."""
    return type(optimizer).__name__ == "Adafactor"


def forget_unscaling(scaler: torch.amp.GradScaler) -> None:
    """Let a step that failed be taken again: the scaler remembers that its gradients were unscaled,
    and they are gone.

    torch offers no other way that keeps the scale: `update` alone forgets, and it changes the
    scale.
    """
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()
