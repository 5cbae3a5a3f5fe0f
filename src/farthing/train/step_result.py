"""What a step leaves: its micro-batches with their losses, and figures that may still be on their
way from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from farthing.data.loader import MicroBatch
from farthing.model.forward import Host


@dataclass
class Sums:
    """The micro-batches of a step, whose gradients were added up."""

    examples: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    n_targets: int = 0
    n_computed: int = 0
    """Computed tokens."""
    largest: tuple[int, int] = (0, 0)
    """(examples, computed tokens) of the largest micro-batch."""
    micro_batches: list[NDArray[np.int64]] = field(default_factory=list)
    """The same examples as they were cut into micro-batches."""
    numbers: list[int] = field(default_factory=list)
    """Of the micro-batches of this process, in the step's table."""
    computed: list[int] = field(default_factory=list)
    """Computed tokens of each."""
    forward_s: float = 0.0
    compute_s: float = 0.0
    """Of the forward passes, and of those and the backward passes, where the host waits for the
    device.
    """
    losses: list[Tensor] = field(default_factory=list)
    """Of each micro-batch: a sum, on the device."""
    figures: list[Tensor] = field(default_factory=list)
    """[2, F] of each, of an objective of units: see `Forward.unit_loss`."""
    hosts: list[Host] = field(default_factory=list)
    """Arrays that may still be on their way to the device."""

    def add(
        self, micro_batch: MicroBatch, loss: Tensor, n_computed: int, figures: Tensor | None
    ) -> None:
        if figures is not None:
            self.figures.append(figures)
        self.micro_batches.append(micro_batch.examples)
        self.numbers.append(micro_batch.number)
        self.losses.append(loss)
        self.hosts.append(micro_batch.arrays)
        self.computed.append(n_computed)
        self.n_computed += n_computed
        if n_computed > self.largest[1]:
            self.largest = len(micro_batch.examples), n_computed


@dataclass
class StepResult:
    """A step that was taken; its figures may still be on their way from the device."""

    step: int
    """From 0."""
    learning_rate: float
    started_s: float
    sums: Sums
    figures: Tensor
    """float64 [micro-batches + 1 + 2F]: what each adds to the mean loss of the step's targets; the
    gradient norm; sums of the objective's figures, and of how many.
    """
    names: tuple[str, ...] = ()
    """Of the objective's figures."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Their means, once `read`."""
    _arrived: Any = None
    _update: Any = None

    def read(self) -> tuple[list[float], float]:
        """(what each micro-batch adds to the mean loss, gradient norm before clipping);
        waited for.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        n = len(self.sums.micro_batches)
        losses, norm, found = self.figures.split([n, 1, 2 * len(self.names)])
        for name, total, count in zip(self.names, *found.reshape(2, -1).tolist(), strict=True):
            if count:
                self.metrics[name] = total / count
        self.sums.hosts.clear()
        return losses.tolist(), float(norm)

    def update_s(self) -> float:
        """Seconds of a GPU for clipping and the update, once `read`; 0 where the host has done it
        in its own time.
        """
        return 0.0 if self._update is None else self._update[0].elapsed_time(self._update[1]) / 1000
