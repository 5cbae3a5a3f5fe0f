"""The update of weights and state, which can't be taken again: memory that is not there is missed
before it, and what is not finite leaves everything as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farthing.errors import OutOfMemoryError
from farthing.train.bf16_adamw import BUCKET, BYTES_PER_WEIGHT, StochasticAdamW
from farthing.train.optim import is_adafactor

SMALL_BYTES = 1 << 20
"""Tensors up to this come from blocks of their own in torch's allocator for CUDA."""


class WeightUpdate:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        trained: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self._optimizer, self._scaler, self._is_cuda = optimizer, scaler, device.type == "cuda"
        self.is_guarded_on_device = all(
            weight.device.type == device.type for weight in trained
        ) and all(group.get("fused") for group in optimizer.param_groups)
        # kernels of bitsandbytes write by address, and no counter of torch's hears of it
        self._is_counted = not hasattr(optimizer, "init_state")
        self._versions: list[int] | None = None

    @property
    def n_ahead(self) -> int:
        """Steps that may be under way on the device while the host begins the next: none where the
        host has to know that gradients are finite before the update.
        """
        return int(self._is_cuda and (self.is_guarded_on_device or self._scaler.is_enabled()))

    def begin(self) -> None:
        """A step begins."""
        self._versions = None

    def enter(self) -> None:
        """The update begins."""
        self._versions = self._now()

    def apply(self, figures: Tensor) -> None:
        """Update the weights by their gradients, unless one of `figures` is not finite, and drop
        the gradients.
        """
        self.enter()
        if self._scaler.is_enabled():
            self._scaler.step(self._optimizer)
            self._scaler.update()
        elif self.is_guarded_on_device:
            # the way GradScaler tells a fused kernel to leave everything as it is
            self._optimizer.grad_scale = None
            self._optimizer.found_inf = (~figures.isfinite()).any().float()
            self._optimizer.step()
        elif bool(figures.isfinite().all()):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def undo(self) -> None:
        """Forget the gradients of a step that has failed before its update."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._scaler.is_enabled():
            # it remembers that gradients were unscaled, which are gone; `update` would change the
            # scale
            self._scaler._per_optimizer_states.clear()

    def refuse_half_an_update(self, step: int, error: BaseException) -> None:
        """Raise `OutOfMemoryError` where the update of `step` (from 0) can't be taken again, by the
        version counters that torch keeps for every tensor.
        """
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
        """Versions of all weights and all state."""
        states = [value for of in self._optimizer.state.values() for value in of.values()]
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        return [each._version for each in (*weights, *states) if isinstance(each, Tensor)]


# ---- its memory ----


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
