"""The plain state of one attempt at a job.

Everything that has to be saved to resume exactly is in `state`: the parts of a checkpoint. What is
not there follows from (seed, step), as data order, random generators and learning rate do, or is
about this attempt alone. Time and money are in the ledger, which outlives lost work.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farthing.config.job import Job
from farthing.data.batches import Batches
from farthing.dist.ranks import Ranks
from farthing.events import Emit, Warned
from farthing.local.measurements import Record
from farthing.model.activation_checkpointing import MemoryNeed
from farthing.model.adapters import put_back, trained_tensors
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.planner.estimate import Estimate
from farthing.run.checkpoint import Checkpoints, Part, State
from farthing.run.ledger import Ledger, Meter
from farthing.run.mirror import Mirror
from farthing.run.signals import Notice
from farthing.settings import Settings
from farthing.storage.files import Json
from farthing.storage.logs import SummedLines
from farthing.train.optim import load_state, state_tensors
from farthing.train.resolve import Examples, RunSpec
from farthing.train.room import Steps
from farthing.train.schedule import Schedule
from farthing.train.step_result import StepResult
from farthing.train.throughput import Pace
from farthing.train.watchdog import Watchdog


@dataclass
class Context:
    """What an attempt runs in: where it writes, who pays, who may ask it to leave, and who
    is told.
    """

    job: Job
    folder: Path
    run_id: str
    """Which run the folder's checkpoints belong to."""
    meter: Meter
    ledger: Ledger
    notice: Notice
    emit: Emit
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that share the run."""
    replica: Mirror | None = None
    """The copy of this run in a store, where the job names one."""
    watchdog: Watchdog | None = None
    """What ends the attempt where it hangs past a limit."""

    @property
    def left_s(self) -> float:
        """Seconds until the first limit; infinite without any."""
        return math.inf if self.watchdog is None else self.watchdog.left_s

    def is_asked_to_leave(self) -> bool:
        """Whether this rank or another was asked to leave."""
        return bool(self.notice) or self.ranks.others_ask_to_leave

    def warn(self, text: str) -> None:
        """Say what the person should know; the run continues."""
        self.emit(Warned(text))


@dataclass
class Kernels:
    """What replaces parts of the model's own code; None where nothing does."""

    lora: Any
    liger: str | None
    compiled: int | str
    """Layers that are compiled, or why none are."""


@dataclass
class Saving:
    """What is known of saves: the interval between them, and the last one."""

    every_s: float
    at_s: float
    """When the last one was, by the meter."""
    mark: tuple[Any, ...] = ()
    """Which state the last one holds."""
    is_due_now: bool = False
    """Whatever the interval says: the best so far was found, or the machine may go."""
    took_s: float = 0.0
    """Seconds in which training stood still for the last one."""
    wrote_model_early: bool = False
    """The model was exported while the limits still paid for a start."""
    exported_step: int | None = None
    """Whose weights this attempt has exported."""
    write_s: float = 0.0
    """Seconds until the last checkpoint was on the disk."""
    export_s: float = 0.0
    """Seconds of the last export."""
    digest_bytes: int = 0
    """Of the log, up to where its digest holds."""
    trained_bytes: int = 0
    """Of the trained weights, on all ranks together: to walk through a model's modules takes
    milliseconds.
    """


@dataclass
class Clocks:
    """Seconds that this attempt has measured."""

    start_s: float = 0.0
    evaluation_s: float = 0.0
    """Of the last evaluation."""
    settled_s: float = 0.0
    """When figures of a step were last read, by the meter."""
    compute_s: float = 0.0
    """The meter's `compute` then."""
    n_graphs: int = 0
    """What torch had compiled then."""


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


@dataclass(kw_only=True)
class Attempt(Context):
    """One attempt at a job, from its restored step to wherever it ends."""

    spec: RunSpec
    train_examples: Examples
    eval_examples: Examples | None
    estimate: Estimate | None
    """What the plan said of this run before it began; None where it could say nothing."""

    model: Any
    forward: Forward
    batches: Batches
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    schedule: Schedule
    steps: Steps = field(init=False)
    kernels: Kernels
    parameters: dict[str, int]
    memory: MemoryNeed
    expected_bytes: int

    progress: Progress
    state: dict[str, Part]
    """Everything resumable."""
    checkpoints: Checkpoints
    log: SummedLines
    pace: Pace
    record: Record
    saving: Saving
    clocks: Clocks = field(default_factory=Clocks)
    in_flight: deque[StepResult] = field(default_factory=deque)
    """Steps whose figures may still be on their way from the device."""
    n_evaluated_tokens: int = 0
    """Of the last evaluation, as computed."""

    @property
    def numerics(self) -> Numerics:
        """What it computes in."""
        return self.spec.numerics

    @property
    def n_steps(self) -> int:
        """Steps of the whole run."""
        return self.schedule.n_steps

    @property
    def settings(self) -> Settings:
        """How the run is computed, now."""
        return self.steps.settings

    @property
    def metric(self) -> str:
        """The metric that says which step is best."""
        return (self.job.train.metric_for_best_model or "loss").removeprefix(
            "eval_"
        )  # known: the job was checked

    def examples_sha256(self) -> str:
        """Identity of what the run reads: the tokens and targets of its examples, and which of them
        are held out.
        """
        digest = hashlib.sha256()
        for examples in (self.train_examples, self.eval_examples):
            if examples is not None:
                digest.update(examples.tokens.content_sha256.encode())
                digest.update(np.ascontiguousarray(examples.indices, dtype=np.int64).tobytes())
        return digest.hexdigest()
