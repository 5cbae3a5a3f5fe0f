"""A run as `build` has made it: what the loop drives. Each part takes what it needs by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farthing.local.measurements import Record
from farthing.model.activation_checkpointing import MemoryNeed
from farthing.model.forward import Forward
from farthing.planner.estimate import Estimate
from farthing.run.checkpoint import Part
from farthing.storage.files import Json
from farthing.train.context import Context
from farthing.train.evaluate import Evaluator
from farthing.train.forecast import Forecast
from farthing.train.resolve import Examples, RunSpec
from farthing.train.room import Steps
from farthing.train.saver import Saver
from farthing.train.schedule import Schedule
from farthing.train.state import Progress
from farthing.train.step_log import StepLog
from farthing.train.throughput import Pace


@dataclass
class Kernels:
    """What replaces parts of the model's own code; None where nothing does."""

    lora: Any
    liger: str | None
    compiled: int | str
    """Layers that are compiled, or why none are."""


@dataclass(kw_only=True)
class Run:
    """A run from its first step, or the one that an earlier attempt has saved, to wherever it
    ends.
    """

    spec: RunSpec
    context: Context
    train_examples: Examples
    eval_examples: Examples | None
    estimate: Estimate | None
    """What the plan said of this run before it began; None where it could say nothing."""
    model: Any
    forward: Forward
    kernels: Kernels
    memory: MemoryNeed
    progress: Progress
    state: dict[str, Part]
    """Everything resumable."""
    schedule: Schedule
    steps: Steps
    pace: Pace
    record: Record
    begin_as_ancestor: Callable[[], Json | None]
    """Takes the weights of the run that this one begins from; what the receipt says of it."""
    saver: Saver
    evaluator: Evaluator | None
    forecast: Forecast
    log: StepLog
