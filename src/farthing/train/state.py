"""What is saved: the parts of a checkpoint, everything that an exact resume needs.

What is not here follows from (seed, step), as data order, random generators and learning rate do,
or is about one attempt alone. Time and money are in the ledger, which outlives lost work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farthing.model.adapters import put_back, trained_tensors
from farthing.run.checkpoint import CheckpointPart, State
from farthing.storage.files import Json
from farthing.train.optim import load_state, state_tensors


@dataclass
class Progress:
    """Where the run is."""

    step: int = 0
    n_tokens: int = 0
    n_padded_tokens: int = 0
    n_targets: int = 0
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

    @property
    def mark(self) -> tuple[Any, ...]:
        return self.step, self.evaluated_step, self.stopped_early


class _Part(NamedTuple):
    state: Callable[[], State]
    restore: Callable[[dict[str, Tensor], Json], None]


def parts_of(
    model: Any,
    weights: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    progress: Progress,
) -> dict[str, CheckpointPart]:
    """What a checkpoint has, by name. `weights` are the trained ones: whole, or this rank's rows of
    them.
    """

    def trained() -> dict[str, Tensor]:
        return trained_tensors(model, weights)

    def restore_scaler(tensors: dict[str, Tensor], values: Json) -> None:
        if values:  # nothing is saved where it is off
            scaler.load_state_dict(values)

    return {
        "model": _Part(
            lambda: (trained(), {}), lambda tensors, values: put_back(trained(), tensors)
        ),
        "optimizer": _Part(
            lambda: state_tensors(optimizer, weights),
            lambda tensors, values: load_state(optimizer, weights, tensors, values),
        ),
        "scaler": _Part(lambda: ({}, scaler.state_dict()), restore_scaler),
        "progress": progress,
    }
