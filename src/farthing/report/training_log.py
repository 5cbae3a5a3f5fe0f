"""What the receipt says of `log.jsonl`: sums, the newest step, evaluations and a loss curve, a line
in memory at a time.

A run of a month has a million lines: those that the loop writes for a step are taken apart without
reading their list of examples, all others as JSON.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from farthing.storage.files import Json, parse_json
from farthing.storage.logs import checked

_STEP = re.compile(
    rb'\{"step": (\d+), "loss": ([^,]+), "grad_norm": [^,]+, "lr": [^,]+,'
    rb' "n_targets": (\d+), "n_tokens": (\d+), "examples": \['
)
_OF_STEP = {"step", "loss", "grad_norm", "lr", "n_targets", "n_tokens", "examples", "crc32"}


@dataclass
class Curve:
    """Values by step, as at most `MOST` stretches of 2^k values; what it holds depends on the
    values alone.
    """

    size: int = 1
    """Values of a stretch; the last one may have fewer."""
    stretches: list[list[float]] = field(default_factory=list)
    """[last step, values, their sum, the lowest, the highest]"""
    first: list[float] | None = None
    """[step, value] of the very first, and of the newest."""
    last: list[float] | None = None

    MOST = 1024

    def add(self, step: int, value: float) -> None:
        """The next value."""
        self.last = [step, value]
        last = self.stretches[-1] if self.stretches else None
        if last is None or last[1] >= self.size:
            self.first = self.first or [step, value]
            if len(self.stretches) == self.MOST:
                self._halve()
            self.stretches.append([step, 1, value, value, value])
            return
        last[0] = step
        last[1] += 1
        last[2] += value
        last[3] = min(last[3], value)
        last[4] = max(last[4], value)

    def _halve(self) -> None:
        self.size *= 2
        self.stretches = [
            _joined(self.stretches[i : i + 2]) for i in range(0, len(self.stretches), 2)
        ]

    def means(self, most: int) -> list[list[float]]:
        """At most so many points [last step, mean of a stretch]."""
        return [[step, total / n] for step, n, total, *_ in self.bands(most)]

    def bands(self, most: int) -> list[list[float]]:
        """At most so many stretches, as `stretches` has them."""
        n = -(-len(self.stretches) // most) or 1
        return [_joined(self.stretches[i : i + n]) for i in range(0, len(self.stretches), n)]


def _joined(stretches: list[list[float]]) -> list[float]:
    steps, counts, sums, lows, highs = zip(*stretches, strict=True)
    return [steps[-1], sum(counts), sum(sums), min(lows), max(highs)]


@dataclass
class TrainingLog:
    """A log in sum. `losses`: of the steps that had a loss."""

    step: int = 0
    loss: float | None = None
    n_tokens: int = 0
    n_targets: int = 0
    n_skipped: int = 0
    losses: Curve = field(default_factory=Curve)
    figures: dict[str, Curve] = field(default_factory=dict)
    """What the objective finds besides its loss, by name."""
    evaluations: list[Json] = field(default_factory=list)
    n_damaged: int = 0
    """Lines that are left out. One that a kill has torn at the end is not counted."""

    def add_step(self, step: int, loss: float | None, n_targets: int, n_tokens: int) -> None:
        """A step was taken."""
        self.step, self.loss = step, loss
        self.n_targets += n_targets
        self.n_tokens += n_tokens
        if loss is not None:
            self.losses.add(step, loss)

    def add_line(self, whole: bytes) -> None:
        """A line as it stands in the file."""
        line = checked(whole)
        if line is None:
            self.n_damaged += bool(whole.strip()) and whole.endswith(b"\n")
            return
        match = _STEP.match(line)
        if match is not None and line.endswith(b"]}"):
            step, loss, n_targets, n_tokens = match.groups()
            with contextlib.suppress(ValueError):
                self.add_step(
                    int(step),
                    None if loss == b"null" else float(loss),
                    int(n_targets),
                    int(n_tokens),
                )
                return
        self._add_other(line)

    def _add_other(self, line: bytes) -> None:
        """A line that is not of a step, or not as the loop writes it."""
        try:
            row = parse_json(line.decode("utf-8", errors="replace"))
            if not isinstance(row, dict):
                return
            if "examples" in row:
                self.add_step(row["step"], row["loss"], row["n_targets"], row["n_tokens"])
                for name in row.keys() - _OF_STEP:
                    if isinstance(row[name], float):
                        self.figures.setdefault(name, Curve()).add(row["step"], row[name])
            self.n_skipped += "skipped" in row
            if isinstance(row.get("metrics"), dict) and isinstance(row.get("step"), int):
                self.evaluations.append(row)
        except (ValueError, KeyError, TypeError):
            return


def read_log(path: Path) -> TrainingLog:
    """The log at `path`; an empty one where there is none."""
    log = TrainingLog()
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            log.add_line(line)
    return log
