"""What runs measured, for the next plan on the same hardware: one line of JSON an attempt.

A run teaches the planner through this file and through nothing else. It holds numbers and names of
hardware, of model families and of settings; no path, no name of a model or of data, and no secret.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farthing.storage.files import write_json
from farthing.storage.logs import append_line, newest_lines, read_line

MEASUREMENTS = "measurements.jsonl"  # in the cache
OF_RUN = "measurements.json"  # in a run's folder
VERSION = 3  # 2 did not know of Liger's kernels
STEP_SPANS = ("compute", "optimizer", "data_wait", "host_to_device")
FEWEST_STEPS = 5  # fewer measured steps say nothing
_MOST_BYTES = 8 << 20  # of the newest lines that are read: thousands of runs
_MOST_LINE_BYTES = 64 << 10


@dataclass(frozen=True)
class Measurement:
    """One attempt at a job: what ran, on what, and what it took."""

    when: str  # ISO date and time, UTC
    farthing: str  # versions
    torch: str
    hardware: str  # machine.hardware_key
    device: str  # cuda or cpu
    n_devices: int

    model_type: str
    n_parameters: int  # adapters left out
    n_trainable: int
    hidden: int
    n_layers: int
    vocab: int
    task: str
    method: str
    lora_r: int  # 0 without an adapter
    first_layer: int  # the lowest with anything trained in or below it
    precision: str  # bf16, fp16 or fp32
    optim: str
    micro_batch_tokens: int  # most computed tokens of a micro-batch; a longer example went alone
    is_packed: bool  # documents end to end, without padding
    has_liger: bool  # norms, rotations and feed-forwards by Liger's kernels
    global_batch_size: int
    checkpoint_every: int  # activation checkpointing: 0 none, 1 every layer, 2 every second
    lengths: dict[
        str, float
    ]  # of the examples: n_examples, mean, mean_of_squares, longest, mean_target, longest_target

    # the steps after the first, which warms up
    n_steps: int
    n_micro_batches: int
    n_tokens: int  # without padding; seq2seq: sources and targets
    n_padded_tokens: int  # as computed
    n_target_tokens: int
    compute_s: float
    optimizer_s: float
    data_wait_s: float
    host_to_device_s: float
    first_step_s: float

    # the whole attempt
    spans: dict[str, float]  # seconds by the meter's names; of saves those in which training stood
    n_evaluations: int
    n_eval_examples: int  # of one evaluation
    n_eval_padded_tokens: int
    evaluation_s: float  # of one evaluation
    has_generated: bool  # evaluation wrote texts as well
    n_saves: int
    save_bytes: int  # of the last one

    # memory: what torch took on a GPU, what the whole process took on a CPU
    before_model_bytes: int
    loaded_bytes: int
    first_step_peak_bytes: int
    peak_bytes: int
    peak_bytes_by_step: list[list[int]]  # [step of the attempt, peak so far]: 1, 2, 4, 8 ...
    largest_examples: int  # of the micro-batch with most computed tokens
    largest_tokens: int  # computed ones

    promised: dict[str, Any] = field(
        default_factory=dict
    )  # what a plan had said of this run, as it said it
    version: int = VERSION
    # that each of `n_devices` sent to the others, of all together; 0: one alone, not known
    link_bytes_per_s: float = 0.0
    probed: bool = False  # micro-batches and checkpointing are what a probe found quickest

    @property
    def step_s(self) -> float:
        """Mean seconds of a measured step."""
        return (
            self.compute_s + self.optimizer_s + self.data_wait_s + self.host_to_device_s
        ) / self.n_steps


class Record:
    """What an attempt notes of its steps while it runs. The first step warms up and is left out."""

    def __init__(self, *, loaded_bytes: int, before_model_bytes: int = 0) -> None:
        self.loaded_bytes, self.before_model_bytes = loaded_bytes, before_model_bytes
        self.n_steps = 0  # of the attempt, the first included
        self.first_step_s = 0.0
        self.peak_bytes_by_step: list[list[int]] = []
        self.largest_examples = self.largest_tokens = 0
        self.link_bytes_per_s = 0.0
        self.evaluations_s: list[float] = []
        self.saves_bytes: list[int] = []
        self._counts = [0, 0, 0, 0]
        self._first_spans: dict[str, float] = {}
        self._last_spans: dict[str, float] = {}

    def begin_again(self) -> None:
        """Forget the steps so far: they were warm-up."""
        self.n_steps, self._counts = 0, [0, 0, 0, 0]
        self.peak_bytes_by_step.clear()

    def micro_batch(self, n_examples: int, n_tokens: int) -> None:
        """A micro-batch of so many computed tokens went through."""
        if n_tokens > self.largest_tokens:
            self.largest_examples, self.largest_tokens = n_examples, n_tokens

    def step_done(
        self,
        n_micro_batches: int,
        n_tokens: int,
        n_padded: int,
        n_targets: int,
        seconds: float,
        spans: dict[str, float],
        peak_bytes: int,
    ) -> None:
        """A step is done; `spans` is the meter's so far."""
        self.n_steps += 1
        if self.n_steps == 1:
            self.first_step_s, self._first_spans = seconds, dict(spans)
        else:
            more = n_micro_batches, n_tokens, n_padded, n_targets
            self._counts = [a + b for a, b in zip(self._counts, more, strict=True)]
        self._last_spans = dict(spans)
        if self.n_steps & (self.n_steps - 1) == 0:
            self.peak_bytes_by_step.append([self.n_steps, peak_bytes])

    def measured(self) -> dict[str, Any] | None:
        """The fields of a `Measurement` that come from the steps; None after too few."""
        if self.n_steps - 1 < FEWEST_STEPS:
            return None
        n_micro_batches, n_tokens, n_padded, n_targets = self._counts
        evaluations = self.evaluations_s
        return {
            "n_steps": self.n_steps - 1,
            "n_micro_batches": n_micro_batches,
            "n_tokens": n_tokens,
            "n_padded_tokens": n_padded,
            "n_target_tokens": n_targets,
            **{
                f"{name}_s": self._last_spans.get(name, 0.0) - self._first_spans.get(name, 0.0)
                for name in STEP_SPANS
            },
            "first_step_s": self.first_step_s,
            "n_evaluations": len(evaluations),
            "evaluation_s": sum(evaluations) / max(1, len(evaluations)),
            "n_saves": len(self.saves_bytes),
            "save_bytes": self.saves_bytes[-1] if self.saves_bytes else 0,
            "before_model_bytes": self.before_model_bytes,
            "loaded_bytes": self.loaded_bytes,
            "first_step_peak_bytes": self.peak_bytes_by_step[0][1],
            "peak_bytes_by_step": self.peak_bytes_by_step,
            "largest_examples": self.largest_examples,
            "largest_tokens": self.largest_tokens,
            "link_bytes_per_s": self.link_bytes_per_s,
        }


class Measurements(list[Measurement]):
    """Measurements in the order they were written, and how many lines were none."""

    n_skipped: int = 0


def leave_measurement(measurement: Measurement, cache_dir: Path, folder: Path) -> None:
    """Write it for later plans, and beside the run that it is of, where a list has one for each
    attempt.

    Raises `OSError`.
    """
    copy = folder / OF_RUN
    try:
        earlier = json.loads(copy.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        earlier = []
    write_json(
        copy, [*(earlier if isinstance(earlier, list) else []), dataclasses.asdict(measurement)]
    )
    append_measurement(cache_dir / MEASUREMENTS, measurement)


def append_measurement(path: Path, measurement: Measurement) -> None:
    """Add a line in one write and force it to the disk: runs that end together don't tear each
    other's lines.

    Raises `OSError`.
    """
    append_line(path, dataclasses.asdict(measurement))


def read_measurements(path: Path) -> Measurements:
    """What the file holds, oldest first; lines that are torn, damaged, foreign or of another
    version are skipped and counted.

    A file that is not there, or can't be read, holds nothing.
    """
    found = Measurements()
    for line in newest_lines(path, _MOST_BYTES):
        if line.strip():
            measurement = _parsed(line)
            if measurement is None:
                found.n_skipped += 1
            else:
                found.append(measurement)
    return found


def matching(
    measurements: Iterable[Measurement], *, hardware: str, **wanted: Any
) -> list[Measurement]:
    """Those of this hardware whose fields have the wanted values, newest first: `matching(all,
    hardware=h, method="lora")`.
    """
    wanted["hardware"] = hardware
    found = [
        m for m in measurements if all(getattr(m, name) == value for name, value in wanted.items())
    ]
    return sorted(found, key=lambda m: m.when, reverse=True)


def link_of(measurements: Iterable[Measurement], hardware: str, n_devices: int) -> float:
    """Bytes a second that each of so many of this hardware was last seen to send to the others; 0
    where none was measured.
    """
    found = matching(measurements, hardware=hardware, n_devices=n_devices)
    return next((m.link_bytes_per_s for m in found if m.link_bytes_per_s > 0), 0.0)


_TYPES = {f.name: str(f.type) for f in dataclasses.fields(Measurement)}
_REQUIRED = {
    f.name
    for f in dataclasses.fields(Measurement)
    if f.default is f.default_factory  # neither of the two is there
}


def _parsed(line: bytes) -> Measurement | None:
    """A line's measurement; None for anything else."""
    if len(line) > _MOST_LINE_BYTES:
        return None
    row = read_line(line)
    if row is None or row.get("version") != VERSION:
        return None
    if not set(row) >= _REQUIRED:
        return None
    row = {name: value for name, value in row.items() if name in _TYPES}
    if not all(_is_a(value, _TYPES[name]) for name, value in row.items()):
        return None
    found = Measurement(**row)
    means = [found.lengths.get(name, -1.0) for name in ("mean", "mean_of_squares", "mean_target")]
    has_all = min(means) >= 0 and means[0] * found.n_steps * found.global_batch_size > 0
    return found if has_all else None


def _is_a(value: Any, kind: str) -> bool:
    """Whether a value read from JSON is of the kind that the field says; numbers are finite and not
    below 0.
    """
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "float"):
        is_number = isinstance(value, int | float if kind == "float" else int) and not isinstance(
            value, bool
        )
        return is_number and math.isfinite(value) and value >= 0
    if kind.startswith("list"):
        return isinstance(value, list) and all(
            isinstance(pair, list)
            and len(pair) == 2
            and all(_is_a(number, "int") for number in pair)
            for pair in value
        )
    inner = kind.removeprefix("dict[str, ").removesuffix("]")
    return isinstance(value, dict) and (
        inner == "Any" or all(_is_a(number, inner) for number in value.values())
    )
