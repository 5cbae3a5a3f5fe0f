"""Everything that has to be saved to go on exactly: the parts of a checkpoint.

What is not here follows from (seed, step): the data order, every random generator and the learning
rate are functions of the step. Time and money are in the ledger, which outlives lost work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from farthing.model.adapters import put_back, trained_tensors
from farthing.run.checkpoint import Part, State
from farthing.storage.files import Json
from farthing.train.optim import load_state, state_tensors


@dataclass
class Progress:
    """Where the run is: a part of every checkpoint."""

    step: int = 0
    n_tokens: int = 0
    n_padded_tokens: int = 0
    n_targets: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    evaluated_step: int = 0
    best_step: int | None = None
    best_metric: float | None = None
    n_evaluations_without_gain: int = 0
    stopped_early: bool = False

    def state(self) -> State:
        """No tensors, every field."""
        return {}, asdict(self)

    def restore(self, tensors: dict[str, Tensor], values: Json) -> None:
        """Every field. Raises `KeyError`, `TypeError`."""
        for item in fields(self):
            if not isinstance(values[item.name], int | float | None):
                raise TypeError(f"{item.name} is no number")
            setattr(self, item.name, values[item.name])


@dataclass
class ModelPart:
    """What training changes in the model."""

    model: Any
    weights: Mapping[str, Tensor]
    """Trained weights by name: whole, or the rows of this rank."""

    def state(self) -> State:
        """Trained tensors by name."""
        return trained_tensors(self.model, self.weights), {}

    def restore(self, tensors: dict[str, Tensor], values: Json) -> None:
        """Copied back in place."""
        put_back(trained_tensors(self.model, self.weights), tensors)


@dataclass
class OptimizerPart:
    """The optimizer's moments, by the names of the weights."""

    weights: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer

    def state(self) -> State:
        """Moments and counters."""
        return state_tensors(
            self.optimizer, {id(weight): name for name, weight in self.weights.items()}
        )

    def restore(self, tensors: dict[str, Tensor], values: Json) -> None:
        """Tensor for tensor."""
        load_state(self.optimizer, self.weights.items(), tensors, values)


@dataclass
class ScalerPart:
    """The gradient scaler of fp16."""

    scaler: torch.amp.GradScaler

    def state(self) -> State:
        """Scale and counters; nothing when it is off."""
        return {}, self.scaler.state_dict()

    def restore(self, tensors: dict[str, Tensor], values: Json) -> None:
        """Scale and counters."""
        if values:
            self.scaler.load_state_dict(values)


def parts_of(
    model: Any,
    weights: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> dict[str, Part]:
    """What a checkpoint has besides the progress, by name."""
    optimized = OptimizerPart(weights, optimizer)
    return {
        "model": ModelPart(model, weights),
        "optimizer": optimized,
        "scaler": ScalerPart(scaler),
    }
