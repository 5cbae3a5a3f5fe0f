"""What a step leaves: its micro-batches with their losses, and figures that may still be on their
way from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farthing.arrays import Ints
from farthing.data.loader import MicroBatch


@dataclass
class Sums:
    """The micro-batches of a step, whose gradients were added up."""

    examples: Ints
    n_targets: int  # of all ranks: what the summed loss is divided by
    counts: bool = True  # else its gradients are zeros: a rehearsal, or another rank's turn
    done: list[MicroBatch] = field(default_factory=list)
    """Of this rank; their arrays may still be on their way to the device."""
    losses: list[Tensor] = field(default_factory=list)  # of each: a sum, on the device
    figures: list[Tensor] = field(default_factory=list)
    """[2, F] of each: see `Forward.loss`."""
    computed: list[int] = field(default_factory=list)  # computed tokens of each
    n_computed: int = 0  # computed tokens of all ranks
    micro_batches: list[Ints] = field(default_factory=list)
    """The examples as they were cut into micro-batches, of all ranks."""

    def add(self, micro_batch: MicroBatch, loss: Tensor, figures: Tensor, n_computed: int) -> None:
        """A micro-batch whose backward pass is done."""
        self.done.append(micro_batch)
        self.losses.append(loss.detach())
        self.figures.append(figures)
        self.computed.append(n_computed)
        self.n_computed += n_computed

    @property
    def largest(self) -> tuple[int, int]:
        """(examples, computed tokens) of this rank's largest micro-batch."""
        sizes = zip((len(each.examples) for each in self.done), self.computed, strict=True)
        return max(sizes, key=lambda size: size[1], default=(0, 0))


@dataclass
class StepResult:
    """A step that was taken; its figures may still be on their way from the device."""

    step: int  # from 0
    learning_rate: float
    started_s: float
    sums: Sums
    figures: Tensor
    """float64 [micro-batches + 1 + 2F]: what each adds to the mean loss of the step's targets; the
    gradient norm; sums of the objective's figures, and of how many.
    """
    names: tuple[str, ...]  # of the objective's figures
    began: Any
    """A GPU's event before clipping and the update, one after them, and one when the figures are
    there; None on a CPU.
    """
    updated: Any
    arrived: Any
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the objective's figures, once `read`."""

    def read(self) -> tuple[list[float], float]:
        """(what each micro-batch adds to the mean loss, gradient norm before clipping);
        waited for.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        losses, norm, found = self.figures.split(
            [len(self.sums.micro_batches), 1, 2 * len(self.names)]
        )
        for name, total, count in zip(self.names, *found.reshape(2, -1).tolist(), strict=True):
            if count:
                self.metrics[name] = total / count
        self.sums.done.clear()
        return losses.tolist(), float(norm)

    def update_s(self) -> float:
        """Seconds of a GPU for clipping and the update, once `read`; 0 where the host has done it
        in its own time.
        """
        return 0.0 if self.began is None else self.began.elapsed_time(self.updated) / 1000


def now_on(device: torch.device) -> Any:
    """A moment of a GPU's own time; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
