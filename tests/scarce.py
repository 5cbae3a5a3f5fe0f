"""Steps that run out of memory where they are told to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farthing.config.job import TrainSection
from farthing.model.hardware import Numerics
from farthing.train.optim import make_optimizer


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 3))


def optimizer_of(model: nn.Module, name: str, rate: float = 0.01, **keys) -> torch.optim.Optimizer:
    train = TrainSection(**{"optim": name, "weight_decay": 0.1, "adam_beta2": 0.99, **keys})
    return make_optimizer(model, dict(model.named_parameters()), train, rate)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, scaler=None):
    """A step whose gradients are clipped, at a rate of its own."""
    inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))
    loss = model(inputs).square().mean()
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + seed)
    scaler.step(optimizer) if scaler else optimizer.step()
    optimizer.zero_grad(set_to_none=True)


OPTIMIZERS = [
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_torch_offload",
    "adafactor",
    "sgd",
    "rmsprop",
]


GONE = "CUDA error: out of memory"


class Failing:
    """Fails at its n-th call, once, as a device without memory does; else it does what it stands
    for.
    """

    def __init__(self, honest: Callable[..., Any], at: int, words: str = GONE):
        self.honest, self.at, self.words, self.n = honest, at, words, 0

    def __call__(self, *args, **kwargs):
        self.n += 1
        if self.n == self.at:
            raise torch.AcceleratorError(self.words)
        return self.honest(*args, **kwargs)


def with_scaler(patch: pytest.MonkeyPatch, *, needs_scaler: bool = True):
    """Runs compute in fp32 on the CPU, with the gradient scaler of fp16."""
    numerics = Numerics(torch.device("cpu"), None, needs_scaler=needs_scaler)
    patch.setattr("farthing.train.resolve.choose_numerics", lambda *_: numerics)
