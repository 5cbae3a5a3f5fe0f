"""What the receipt says of `log.jsonl`: sums, the newest step, evaluations and a loss curve, a line in memory at a time.

A run of a month has a million lines: those that the loop writes for a step are taken apart without reading their list of
examples, all others as JSON. Refuses nothing: a line that is torn by a kill or damaged is passed over.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from farthing.durability.files import Json, parse_json
from farthing.durability.summed_lines import checked

_STEP = re.compile(
    rb'\{"step": (\d+), "loss": ([^,]+), "grad_norm": [^,]+, "lr": [^,]+,'
    rb' "n_targets": (\d+), "n_tokens": (\d+), "examples": \['
)


@dataclass
class TrainingLog:
    """A log in sum. `steps` and `losses`: of the steps that had a loss."""

    step: int = 0
    loss: float | None = None
    n_tokens: int = 0
    n_targets: int = 0
    n_skipped: int = 0
    has_steps: bool = False
    steps: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    evaluations: list[Json] = field(default_factory=list)

    def add_step(self, step: int, loss: float | None, n_targets: int, n_tokens: int) -> None:
        """A step was taken."""
        self.has_steps = True
        self.step, self.loss = step, loss
        self.n_targets += n_targets
        self.n_tokens += n_tokens
        if loss is not None:
            self.steps.append(step)
            self.losses.append(loss)


def read_log(path: Path) -> TrainingLog:
    """The log at `path`; an empty one where there is none."""
    log, has_sums = TrainingLog(), False
    if path.exists():
        with open(path, "rb") as file:
            for whole in file:
                line, has_sum = checked(whole)
                has_sums |= has_sum
                if line is None or (has_sums and not has_sum):
                    continue
                match = _STEP.match(line)
                if match is not None and line.endswith(b"]}"):
                    step, loss, n_targets, n_tokens = match.groups()
                    try:
                        log.add_step(int(step), None if loss == b"null" else float(loss), int(n_targets), int(n_tokens))
                        continue
                    except ValueError:
                        pass
                _add_other(log, line)
    return log


def _add_other(log: TrainingLog, line: bytes) -> None:
    """A line that is not of a step, or not as the loop writes it."""
    try:
        row = parse_json(line.decode("utf-8", errors="replace"))
        if not isinstance(row, dict):
            return
        if "examples" in row:
            log.add_step(row["step"], row["loss"], row["n_targets"], row["n_tokens"])
        log.n_skipped += "skipped" in row
        if isinstance(row.get("metrics"), dict) and isinstance(row.get("step"), int):
            log.evaluations.append(row)
    except (ValueError, KeyError, TypeError):
        return
