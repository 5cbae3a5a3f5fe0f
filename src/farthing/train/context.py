"""What the parts of a run share: the attempt that they run in, and what is trained and how far."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farthing.dist.ranks import Ranks
from farthing.events import Emit, Warned
from farthing.local.measurements import Record
from farthing.model.activation_checkpointing import MemoryNeed
from farthing.model.forward import Forward
from farthing.planner.estimate import Estimate
from farthing.run.checkpoint import State
from farthing.run.folder import LOG
from farthing.run.ledger import Ledger, Meter
from farthing.run.mirror import Mirror
from farthing.run.signals import Notice
from farthing.storage.files import Json
from farthing.storage.logs import SummedLines
from farthing.train.budget import RunLimits
from farthing.train.resolve import Examples, RunSpec
from farthing.train.schedule import Schedule
from farthing.train.step_feed import StepFeed
from farthing.train.throughput import Pace
from farthing.train.watchdog import Watchdog


@dataclass
class Context:
    """Where an attempt writes, who pays for it, who may ask it to leave, and who hears of it."""

    folder: Path
    meter: Meter
    ledger: Ledger
    limits: RunLimits
    notice: Notice
    emit: Emit
    run_id: str = ""  # which run the folder's checkpoints belong to
    ranks: Ranks = field(default_factory=Ranks)
    replica: Mirror | None = None  # the copy of this run in a store, where the job names one
    watchdog: Watchdog | None = None  # ends an attempt that hangs past a limit

    @property
    def left_s(self) -> float:
        """Seconds until the watchdog acts; infinite without limits."""
        return math.inf if self.watchdog is None else self.watchdog.left_s

    def is_asked_to_leave(self) -> bool:
        """Whether this rank or another was asked to leave."""
        return bool(self.notice) or self.ranks.others_ask_to_leave

    def warn(self, text: str) -> None:
        self.emit(Warned(text))


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


@dataclass
class ModelKernels:
    """What replaces parts of the model's own code; None where nothing does."""

    lora: Any
    has_liger: bool
    liger: str
    compiled: int | str  # layers that are compiled, or why none are


@dataclass(kw_only=True)
class Training:
    """What is trained, with what, and how far. `built.Run` adds what drives it."""

    spec: RunSpec
    context: Context
    train_examples: Examples
    eval_examples: Examples | None
    estimate: Estimate | None
    """What the plan said of this run before it began; None where it could say nothing."""
    model: Any
    forward: Forward
    kernels: ModelKernels
    optimizer: torch.optim.Optimizer
    memory: MemoryNeed
    schedule: Schedule
    feed: StepFeed
    record: Record

    def __post_init__(self) -> None:
        numerics = self.spec.numerics
        self.scaler = torch.amp.GradScaler(numerics.device.type, enabled=numerics.needs_scaler)
        self.pace = Pace(self.feed, self.train_examples, self.memory)
        self.progress = Progress()
        self.log_file = SummedLines(self.context.folder / LOG)
