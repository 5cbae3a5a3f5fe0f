"""AdamW whose state is kept by the host: the device has weights and gradients only, 8 bytes less
for each trained weight.

A step brings the gradients to the host bucket by bucket, updates copies of the weights there with
torch's fused AdamW for CPUs, and sends them back. On CUDA the three overlap: gradients still come
and weights already leave, on a stream for each direction, while the host computes. What it computes
is `adamw_torch_fused` of a CPU, bit for bit; a GPU's own kernel rounds otherwise in the last digit.

The host needs 16 bytes for each trained weight (weight, gradient, two moments), of which 8 are
pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from farthing.device_memory import out_of_memory_said
from farthing.errors import ModelError
from farthing.train.bf16_adamw import adamw_state
from farthing.units import say_bytes

BUCKET_BYTES = 64 << 20  # of gradients whose arrival is waited for together: a few ms of the bus
ALIGNED_BYTES = 512
PINNED_TO_DO = (
    "use adamw_8bit or method: lora, or more main memory (`ulimit -l` and a container may limit it)"
)


@dataclass
class _Copy:
    """A weight and its gradient on the host, and which version of the device's weight it is a copy
    of.
    """

    weight: Tensor
    gradient: Tensor
    version: int = -1


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over fp32 weights on any device, state
    and arithmetic on the host.

    State is what `torch.optim.AdamW` has: step, exp_avg, exp_avg_sq, here on the CPU. A weight that
    someone else has written since the last step (a restored checkpoint) is read again. Raises
    `ModelError` for weights of another dtype.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        weights = [weight for group in self.param_groups for weight in group["params"]]
        odd = {str(weight.dtype).removeprefix("torch.") for weight in weights} - {"float32"}
        if odd:
            raise ModelError(
                "an off-loaded optimizer trains fp32 weights, and some are"
                f" {', '.join(sorted(odd))}",
                where="train.optim",
                to_do="use adamw_torch_fused",
            )
        device = weights[0].device
        self._copies: dict[Tensor, _Copy] = {}
        self._down, self._up = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )

    def allocate(self) -> None:
        """Make copies and state of every weight now, the state all zeros: on the host, whatever the
        weights' device.
        """
        weights = [weight for group in self.param_groups for weight in group["params"]]
        new = [weight for weight in weights if weight not in self._copies]
        room = iter(_host_tensors([weight for weight in new for _ in range(2)]))
        self._copies |= {weight: _Copy(next(room), next(room)) for weight in new}
        for weight, copy in self._copies.items():
            if not self.state[weight]:
                self.state[weight] = adamw_state(copy.weight, copy.weight.device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every weight that has a gradient. The device continues only when its weights are
        there.
        """
        self.allocate()
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
        buckets = list(self._buckets())
        arrivals = [self._fetch(weights) for _, weights in buckets]
        for (group, weights), arrival in zip(buckets, arrivals, strict=True):
            if arrival is not None:
                arrival.synchronize()
            self._update(group, weights)
            self._send(weights)
        if self._up is not None:
            torch.cuda.current_stream(self._up.device).wait_stream(self._up)

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """(param group, weights that have a gradient), cut where a bucket is full."""
        for group in self.param_groups:
            bucket: list[Tensor] = []
            n_bytes = 0
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                bucket.append(weight)
                n_bytes += weight.grad.nbytes
                if n_bytes >= BUCKET_BYTES:
                    yield group, bucket
                    bucket, n_bytes = [], 0
            if bucket:
                yield group, bucket

    def _fetch(self, weights: list[Tensor]) -> torch.cuda.Event | None:
        """Begin to copy their gradients to the host; the event is when that is done."""
        with torch.cuda.stream(self._down):
            for weight in weights:
                assert weight.grad is not None
                self._copy_of(weight).gradient.copy_(
                    weight.grad, non_blocking=self._down is not None
                )
            return None if self._down is None else self._down.record_event()

    def _copy_of(self, weight: Tensor) -> _Copy:
        """Its copy on the host, read again if someone else has written the weight."""
        copy = self._copies[weight]
        if copy.version != weight._version:
            copy.weight.copy_(weight)
        return copy

    def _update(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        copies = [self._copies[weight] for weight in weights]
        step, exp_avg, exp_avg_sq = (
            [self.state[weight][key] for weight in weights]
            for key in ("step", "exp_avg", "exp_avg_sq")
        )
        adamw(
            [copy.weight for copy in copies],
            [copy.gradient for copy in copies],
            exp_avg,
            exp_avg_sq,
            [],
            step,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _send(self, weights: list[Tensor]) -> None:
        with torch.cuda.stream(self._up):
            for weight in weights:
                copy = self._copies[weight]
                weight.copy_(copy.weight, non_blocking=self._up is not None)
                copy.version = weight._version


# ---- memory of the host ----


def _host_tensors(weights: list[Tensor]) -> list[Tensor]:
    """A tensor like each weight on the host; pinned, in common blocks, where the weights are on a
    GPU.
    """
    if not weights or weights[0].device.type != "cuda":
        return [torch.empty_like(weight, device="cpu") for weight in weights]
    places, sizes = pack([weight.nbytes for weight in weights])
    what = f"{say_bytes(sum(sizes))} of main memory can't be pinned for the off-loaded optimizer"
    with out_of_memory_said("train.optim", PINNED_TO_DO, what):
        blocks = [torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True) for n_bytes in sizes]
    return [
        blocks[place.block][place.start : place.start + weight.nbytes]
        .view(weight.dtype)
        .view(weight.shape)
        for weight, place in zip(weights, places, strict=True)
    ]


class BlockPlace(NamedTuple):
    """Where a tensor lies: its block, and the first byte there."""

    block: int
    start: int


def pack(sizes: list[int]) -> tuple[list[BlockPlace], list[int]]:
    """(place of each of the tensors of so many bytes, bytes of each block): all of them in few
    blocks.

    torch rounds a pinned allocation up to a power of two (`CachingHostAllocator`): with one for
    each matrix up to half of the memory is wasted. Here each block is the largest power of two that
    what is left can fill.
    """
    left = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    needs = [-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes]
    places = [BlockPlace(0, 0)] * len(sizes)
    blocks: list[int] = []
    while left:
        largest, total = needs[left[0]], sum(needs[index] for index in left)
        room = max(
            1 << max(0, largest - 1).bit_length(), 1 << total.bit_length() - 1 if total else 1
        )
        used, later = 0, []
        for index in left:
            if used + needs[index] <= room:
                places[index] = BlockPlace(len(blocks), used)
                used += needs[index]
            else:
                later.append(index)
        blocks.append(room)
        left = later
    return places, blocks
