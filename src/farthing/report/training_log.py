"""What the receipt says of `log.jsonl`: sums, the newest step, evaluations and a loss curve.

A run of a month has a million lines. One is in memory at a time; of a step's the list of examples,
which ends it, is left aside. A digest beside the log keeps what was read, and up
to which place, so that a reader continues there.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from farthing.storage.files import Json, parse_json, write_text
from farthing.storage.logs import checked, line_of

DIGEST = "log.digest.json"  # beside the log
_OF_STEP = {"step", "loss", "grad_norm", "lr", "n_targets", "n_tokens"}
_VERSION, _END_BYTES = 3, 512
_WORTH_BYTES = 1 << 20  # so much added to the log makes a new digest


@dataclass
class Curve:
    """Values by step, in at most `MOST` stretches of 2^k; depends on the values alone."""

    size: int = 1  # values of a stretch; the last one may have fewer
    stretches: list[list[float]] = field(default_factory=list)
    """[last step, values, their sum, the lowest, the highest]"""
    first: list[float] | None = None  # [step, value] of the very first, and of the newest
    last: list[float] | None = None

    MOST = 1024

    def add(self, step: int, value: float) -> None:
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
    figures: dict[str, Curve] = field(default_factory=dict)  # by name, of the objective
    evaluations: list[Json] = field(default_factory=list)
    n_damaged: int = 0  # left out; a torn last line is not counted

    def add_step(self, step: int, loss: float | None, n_targets: int, n_tokens: int) -> None:
        self.step, self.loss = step, loss
        self.n_targets += n_targets
        self.n_tokens += n_tokens
        if loss is not None:
            self.losses.add(step, loss)

    def add_line(self, whole: bytes) -> None:
        line = checked(whole)
        if line is None:
            self.n_damaged += bool(whole.strip()) and whole.endswith(b"\n")
            return
        head, is_of_step, _ = line.partition(b', "examples": [')
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            row = parse_json(head + b"}" if is_of_step else line)
            if is_of_step and row["step"] <= self.step:  # a line that stands there twice
                self.n_damaged += 1
            elif is_of_step:
                self.add_step(row["step"], row["loss"], row["n_targets"], row["n_tokens"])
                for name in row.keys() - _OF_STEP:
                    self.figures.setdefault(name, Curve()).add(row["step"], float(row[name]))
            self.n_skipped += "skipped" in row
            if isinstance(row.get("metrics"), dict) and isinstance(row.get("step"), int):
                self.evaluations.append(row)


def read_log(path: Path, *, whole: bool = False) -> TrainingLog:
    """The log at `path`, empty without a file. `whole`: lines that a digest knows too."""
    log, begin = TrainingLog(), 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        if not whole:
            log, begin = _from_digest(path, file) or (log, 0)
        file.seek(begin)
        for line in file:
            log.add_line(line)
    return log


def keep_digest(path: Path, kept_bytes: int = 0, *, worth_bytes: int = _WORTH_BYTES) -> int:
    """Write down what the log says up to its last whole line, where so much was added to it since
    `kept_bytes`.

    Returns up to which byte it is kept now. Raises `OSError`.
    """
    if not path.exists() or 0 <= path.stat().st_size - kept_bytes < worth_bytes:
        return kept_bytes
    with open(path, "rb") as file:
        log, end = _from_digest(path, file) or (TrainingLog(), 0)
        file.seek(end)
        for line in file:
            if not line.endswith(b"\n"):
                break
            log.add_line(line)
            end += len(line)
        facts = {"version": _VERSION, "end": end, "ends": _ends(file, end), "log": asdict(log)}
    write_text(path.with_name(DIGEST), line_of(facts))
    return end


def _from_digest(path: Path, file: BinaryIO) -> tuple[TrainingLog, int] | None:
    """(the log so far, where to continue), where the digest is whole and of this very file."""
    try:
        text = checked(path.with_name(DIGEST).read_bytes())
        facts = parse_json(text.decode()) if text is not None else {}
        if facts["version"] != _VERSION or facts["ends"] != _ends(file, facts["end"]):
            return None
        log, figures = facts["log"], facts["log"]["figures"]
        curves = {name: Curve(**curve) for name, curve in figures.items()}
        losses = Curve(**log["losses"])
        return TrainingLog(**{**log, "losses": losses, "figures": curves}), facts["end"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _ends(file: BinaryIO, end: int) -> list[int]:
    """Checksums of the first and last bytes of the log up to `end`, and that length."""
    found = []
    for begin in (0, max(0, end - _END_BYTES)):
        file.seek(begin)
        found.append(zlib.crc32(file.read(min(_END_BYTES, end))))
    return [*found, end if file.seek(0, 2) >= end else -1]
