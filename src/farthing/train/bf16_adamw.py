"""AdamW over weights in bf16 without copies in fp32: 8 bytes for each weight with its gradient and
state, where fp32 masters take 16.

An update of 1e-5 of a weight is far below the last of bf16's 8 bits, and rounding to nearest would
lose nearly all of them. So weights and second moments are rounded up or down by chance, with the
probability that leaves their mean unchanged: Gupta et al. 2015 (arXiv 1502.02551); for AdamW over
language models of up to 6.7B Ozkara et al. 2025 (arXiv 2502.20566), torchao's
`bf16_stochastic_round`. Arithmetic is torch's fused AdamW in fp32, a bucket at a time.

Bits come from torch's default generator: who wants the same update again, or on another rank, seeds
it before a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BUCKET = 1 << 24  # weights that are updated at once
BYTES_PER_WEIGHT = 20  # of a bucket: weight, gradient and moments in fp32, and random bits


def adamw_state(weight: Tensor, counts_on: torch.device) -> dict[str, Tensor]:
    """What `torch.optim.AdamW` keeps of a weight, before the first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=counts_on),
        "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
    }


class StochasticAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) whose weights, gradients and moments are
    bf16. `found_inf` leaves everything as it was, as in torch's fused optimizers.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, fused=True, **settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every weight that has a gradient."""
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] = adamw_state(weight, weight.device)
            counters = [self.state[weight]["step"] for weight in weights]
            torch._foreach_add_(counters, 1 if found_inf is None else 1 - found_inf)
            room = weights[0].new_empty(
                (4, min(BUCKET, sum(weight.numel() for weight in weights))), dtype=torch.float32
            )
            noise = torch.empty_like(room[0], dtype=torch.int32)
            for bucket in _buckets(weights):
                self._update(bucket, group, room, noise, found_inf)

    def _update(
        self,
        bucket: list[tuple[Tensor, int, int]],
        group: dict[str, Any],
        room: Tensor,
        noise: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        sizes = [end - start for _, start, end in bucket]
        kept = [
            [tensor_of(weight).detach().reshape(-1)[start:end] for weight, start, end in bucket]
            for tensor_of in (
                lambda weight: weight,
                lambda weight: weight.grad,
                lambda weight: self.state[weight]["exp_avg"],
                lambda weight: self.state[weight]["exp_avg_sq"],
            )
        ]
        rows = [row[: sum(sizes)] for row in room]
        wide = [list(row.split(sizes)) for row in rows]
        for targets, sources in zip(wide, kept, strict=True):
            torch._foreach_copy_(targets, sources)
        torch._fused_adamw_(
            *wide,
            [],
            [self.state[weight]["step"] for weight, _, _ in bucket],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )
        for row in (rows[0], rows[3]):
            round_by_chance(row, noise[: len(row)])
        for place in (0, 2, 3):
            torch._foreach_copy_(kept[place], wide[place])


def round_by_chance(numbers: Tensor, noise: Tensor) -> None:
    """Round fp32 numbers [n] in place to such that bf16 has; `noise` [n] int32 is written over.

    What is added is below the last bit that stays, and carries into it as often as the rest is
    large. A number that bf16 has stays as it is.
    """
    bits = numbers.view(torch.int32)
    bits.add_(noise.random_(0, 1 << 16)).bitwise_and_(-(1 << 16))


def _buckets(weights: list[Tensor]) -> Iterator[list[tuple[Tensor, int, int]]]:
    """Pieces (weight, first, end) of at most `BUCKET` numbers together."""
    bucket: list[tuple[Tensor, int, int]] = []
    n = 0
    for weight in weights:
        start = 0
        while start < weight.numel():
            end = min(weight.numel(), start + BUCKET - n)
            bucket.append((weight, start, end))
            n, start = n + end - start, end
            if n == BUCKET:
                yield bucket
                bucket, n = [], 0
    if bucket:
        yield bucket
