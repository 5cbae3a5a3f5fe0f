"""What is saved: the parts of a checkpoint, everything that an exact resume needs.

What is not here follows from (seed, step), as data order, random generators and learning rate do,
or is about one attempt alone. Time and money are in the ledger, which outlives lost work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from farthing.model.adapters import put_back, trained_tensors
from farthing.run.checkpoint import CheckpointPart, State
from farthing.storage.files import Json
from farthing.train.context import Training
from farthing.train.optim import load_state, state_tensors


class _Part(NamedTuple):
    state: Callable[[], State]
    restore: Callable[[dict[str, Tensor], Json], None]


def parts_of(training: Training) -> dict[str, CheckpointPart]:
    """What a checkpoint has, by name: of trained weights all, or this rank's rows."""
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    weights = training.context.ranks.trained_of(model)

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
        "progress": training.progress,
    }
