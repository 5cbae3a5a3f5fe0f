"""What a run says while it goes: one frozen value for each kind of event, with its units.

`train` and `probe` call `emit(event)`; the terminal, trackers and the training log take what
concerns them. An event that belongs in `log.jsonl` has `log_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, dataclass_transform

from farthing.settings import Settings

if TYPE_CHECKING:
    from farthing.metrics import Metrics


@dataclass_transform(frozen_default=True)
class Event:
    """Something that a run says. Everything a listener needs is in its fields: each kind is a
    frozen dataclass.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """An `Emit` for callers who don't listen."""


class Note(Event):
    """Something worth knowing."""

    text: str


class Warned(Event):
    """Something to look at; the run continues."""

    text: str


class Working(Event):
    """What the run is doing before it can tell how far it has got, such as `loading the model`."""

    on: str


class ReadingData(Event):
    """How far a file has been read."""

    what: str
    done_bytes: int
    total_bytes: int | None


class Tokenizing(Event):
    """How far a set of examples has been tokenized. `share`: of the bytes of its files, from 0 to
    1.
    """

    role: str
    """train or eval"""
    n_rows: int
    n_tokens: int
    share: float


class DataRead(Event):
    """What the rows of a set became."""

    role: str
    """train or eval"""
    names: tuple[str, ...]
    """Of its files."""
    formats: tuple[str, ...]
    n_rows: int
    n_examples: int
    n_distinct_inputs: int
    n_tokens: int
    n_targets: int
    n_too_long: int
    n_skipped_long: int
    """Too long, and left out instead of truncated."""
    n_without_target: int
    n_bad: int
    bad_rows: tuple[tuple[str, str], ...]
    """(file:line, reason) of the first ones."""
    notes: tuple[str, ...]
    """Columns that are not used, and the like."""


class Decided(Event):
    """What the run uses where the job left it open, before its first step; texts unless a unit says
    otherwise.
    """

    model: str
    n_parameters: int
    n_trainable: int
    n_examples: int
    n_eval_examples: int
    max_length: int
    """Tokens of an example."""
    n_steps: int
    batch: str
    fitted: str
    """How `n_steps` was fitted to the limits; empty where it was not."""
    learning_rate: str
    device: str
    precision: str
    computed: str
    """What of a batch is computed."""
    memory: str
    checkpointing: str
    checkpoints: str
    price: str
    estimate: str


class Probed(Event):
    """Settings were tried."""

    settings: Settings
    tokens_per_s: float
    """Without padding."""


class Restored(Event):
    """A checkpoint was verified and read; the run continues behind `step`."""

    step: int
    n_steps: int
    attempt: int


class StepTaken(Event):
    """An optimizer step was taken, whose update may have been skipped."""

    step: int
    """From 1."""
    loss: float | None
    """Mean over the targets of the step; None where it is not a finite number."""
    grad_norm: float | None
    lr: float
    n_targets: int
    n_tokens: int
    """Of this step, without padding."""
    examples: tuple[int, ...]
    """Indices into the token set."""
    n_steps: int
    epoch: float
    tokens_per_s: float | None
    """Without padding; None before there is a figure."""
    padded_tokens_per_s: float | None
    mfu: float | None
    utilisation_percent: float | None
    peak_bytes: int
    run_tokens: int
    """Of the whole run so far."""
    run_padded_tokens: int
    usd: float
    """So far, over all attempts."""
    usd_to_go: float | None
    s_to_go: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the step of what the objective finds besides its loss."""

    def log_row(self) -> dict[str, object]:
        """Its line in the log; `report.training_log` reads it up to its examples."""
        row: dict[str, object] = {
            name: getattr(self, name)
            for name in ("step", "loss", "grad_norm", "lr", "n_targets", "n_tokens")
        }
        return {**row, **self.metrics, "examples": list(self.examples)}


class StepSkipped(Event):
    """The update of a step was left out. `skipped` says why; `samples` are the places (file:line)
    it may come from.
    """

    step: int
    skipped: str
    samples: tuple[str, ...] = ()

    def log_row(self) -> dict[str, object]:
        """Its line in the log."""
        samples = {"samples": list(self.samples)} if self.samples else {}
        return {"step": self.step, "skipped": self.skipped, **samples}


class Evaluating(Event):
    """How far an evaluation has got, in examples."""

    n_done: int
    n_examples: int


class Evaluated(Event):
    """An evaluation is done. `metrics`: name -> value, with counts and the table of classes where
    there is one.
    """

    step: int
    metrics: Metrics
    is_best: bool
    each: tuple[list[float], list[float]] | None = None
    """(what each example adds to the run's metric, its weight in the mean), where that is known."""

    def log_row(self) -> dict[str, object]:
        """Its line in the log."""
        return {"step": self.step, "metrics": self.metrics, "is_best": self.is_best}


class Saved(Event):
    """A checkpoint is whole on the disk."""

    step: int
    n_bytes: int


class Exported(Event):
    """The model of `step` was written."""

    folder: str
    step: int


class Figures(NamedTuple):
    of: str
    """train or eval"""
    step: int
    numbers: dict[str, float]


def figures_of(event: StepTaken | Evaluated) -> Figures:
    is_step = isinstance(event, StepTaken)
    found = {name: value for name, value in vars(event).items() if is_step and "step" not in name}
    found |= event.metrics
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return Figures("train" if is_step else "eval", event.step, numbers)
