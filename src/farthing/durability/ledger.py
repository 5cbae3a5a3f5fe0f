"""Every second of a run has a name and a price.

A `Meter` is always in exactly one span, so the spans of an attempt add up to its wall time by construction. The
`Ledger` keeps the last word of every attempt on disk, apart from the checkpoints: time that was paid for stays on the
bill even when its work was lost. Refuses to know what is being measured: it gets names and numbers.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from farthing.durability.files import JsonLines

# The spans, in the order of the receipt, and what each is.
SPANS = {
    "start_up": "start-up: process, imports, checks",
    "tokenize": "reading and tokenizing data",
    "load_model": "loading the model",
    "restore": "restoring a checkpoint",
    "prefix": "computing frozen layers once",
    "probe": "probing settings",
    "compile": "compiling layers, and the steps in which that happens",
    "data_wait": "waiting for batches",
    "host_to_device": "copying batches to the device",
    "compute": "forward and backward",
    "optimizer": "clipping and optimizer",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "export": "exporting the model",
    "idle": "everything else",
}
WORK = ("compile", "data_wait", "host_to_device", "compute", "optimizer")


def seconds_since_boot() -> float:
    """Seconds that no change of the clock moves, and that go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def seconds_since_process_start() -> float:
    """Age of this process in seconds: what imports and start-up have cost before the meter existed."""
    try:  # the kernel counts from the boot, as a clock that jumps does not
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = seconds_since_boot() - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        age = time.time() - psutil.Process().create_time()
    return age if 0 <= age < 3600 else 0.0


class Meter:
    """A stopwatch that is always in one named span. `clock` gives monotonic seconds.

    What time it is is asked of the `wall` clock once, when the meter begins; from then on `since_boot` is added. A clock
    that is set while a run goes on ends nothing and buys nothing.
    """

    def __init__(
        self,
        *,
        already_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        since_boot: Callable[[], float] = seconds_since_boot,
    ) -> None:
        self._clock, self._since_boot = clock, since_boot
        self.lock = threading.RLock()  # the ledger looks on from a thread of its own
        self._boot_at = wall() - since_boot()
        self._since = clock()
        self._name = "start_up"
        self.spans: dict[str, float] = {"start_up": already_s}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time inside the block belongs to `name`, and to nothing else."""
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def enter(self, name: str) -> None:
        """From now on time belongs to `name`, until another span begins."""
        self._switch(name)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Give time that was waited for under one name to the work that was waited for; the sum stays."""
        with self.lock:
            moved = min(seconds, self.spans.get(source, 0.0))
            self.spans[source] = self.spans.get(source, 0.0) - moved
            self.spans[target] = self.spans.get(target, 0.0) + moved

    @property
    def now(self) -> float:
        """The time of day as seconds since 1970, by the clock as it was when the meter began."""
        return self._boot_at + self._since_boot()

    @property
    def wall_s(self) -> float:
        """Seconds since the process began."""
        with self.lock:
            self._switch(self._name)
            return sum(self.spans.values())

    def _switch(self, name: str) -> str:
        if name not in SPANS:
            raise KeyError(f"no such span: {name}")
        with self.lock:
            now = self._clock()
            before = self._name
            self.spans[before] = self.spans.get(before, 0.0) + now - self._since
            self._name, self._since = name, now
            return before


@dataclass
class Attempt:
    """What one process has cost: its spans, its price, and how far it came."""

    number: int
    spans: dict[str, float] = field(default_factory=dict)
    usd_per_hour: float = 0.0
    started_at: float = 0.0
    first_step: int = 0
    last_step: int = 0
    began: bool = False
    ended: str = "killed"
    redone_s: float = 0.0
    n_saves: int = 0
    save_held_up_s: float = 0.0
    """For how long saving has held the loop up; what a thread writes meanwhile does not."""

    @property
    def wall_s(self) -> float:
        """Seconds of this attempt."""
        return sum(self.spans.values())

    @property
    def usd(self) -> float:
        """Dollars of this attempt."""
        return self.wall_s / 3600 * self.usd_per_hour


class Ledger:
    """The attempts of a run, in `ledger.jsonl`: one line a step or so, the last line of each attempt counts.

    What a process spends between its last line and a kill is the only time that is not on the bill; it is less than two
    seconds.
    """

    def __init__(self, path: Path, meter: Meter, usd_per_hour: float) -> None:
        self._lines = JsonLines(path)
        self._meter = meter
        self._usd_per_hour = usd_per_hour
        self.past = read_attempts(self._lines)
        self.number = len(self.past) + 1
        self._past_s = sum(attempt.wall_s for attempt in self.past)
        self._past_usd = sum(attempt.usd for attempt in self.past)
        self._first_step = self._step = 0
        self._last_line_at = -1e9
        self._began = False
        self._beats: threading.Thread | None = None
        self._closed = threading.Event()
        self._facts: dict[str, Any] = {}
        self._ended = ""
        self._saves = {"n": 0, "held_up_s": 0.0}
        rows = list(self._lines.rows())
        self.committed_step = max((row.get("committed", -1) for row in rows), default=-1)
        self.out_of_memory: list[dict[str, Any]] = [row["out_of_memory"] for row in rows if "out_of_memory" in row]
        self.forecast: dict[str, Any] | None = next((row["forecast"] for row in rows if "forecast" in row), None)
        self.takes: dict[str, float] = next((row["takes"] for row in reversed(rows) if "takes" in row), {})
        """Seconds that parts of an attempt took in earlier ones: start_s, step_s, save_s, evaluation_s."""
        self.clock_back_s = max(0.0, max((row["at"] for row in rows if "at" in row), default=0.0) - meter.now)
        """By how much the clock stands before the last moment of an earlier attempt."""

    @property
    def spent_usd(self) -> float:
        """Dollars of the whole run so far, all attempts."""
        return self._past_usd + self._meter.wall_s / 3600 * self._usd_per_hour

    @property
    def spent_s(self) -> float:
        """Seconds of the whole run so far, all attempts."""
        return self._past_s + self._meter.wall_s

    @property
    def now(self) -> float:
        """The time of day, see `Meter`."""
        return self._meter.now

    def begin_at(self, step: int) -> None:
        """This attempt continues after `step`."""
        self._first_step = self._step = step
        self._began = True
        self.write("started")

    def at_step(self, step: int, facts: dict[str, Any], forecast: dict[str, Any] | None = None) -> None:
        """Note that `step` is done. Written at most once a second, so that quick steps cost nothing; a first forecast
        is written at once and kept for the whole run."""
        self._step, self._facts = step, facts
        if forecast is not None and self.forecast is None:
            self.forecast = forecast
            self.write("running", forecast=forecast)
        elif self._meter.wall_s - self._last_line_at >= 1.0:
            self.write("running")

    def beat(self, *, at_once: bool = False) -> None:
        """Say that time goes on, if nothing was said for a second."""
        if at_once or self._meter.wall_s - self._last_line_at >= 1.0:
            self.write(self._ended or ("running" if self._began else "starting"))

    def keep_beating(self) -> None:
        """`beat` every second from a thread until `close`: a kill in a long step or evaluation is on the bill."""

        def beats() -> None:
            while not self._closed.wait(1.0):
                with contextlib.suppress(OSError):  # a full disk is the loop's to judge
                    self.beat()

        self._beats = threading.Thread(target=beats, name="ledger", daemon=True)
        self._beats.start()

    def committed(self, step: int) -> None:
        """Note that the checkpoint of `step` is safe on disk."""
        self.committed_step = max(self.committed_step, step)
        self.write("running", committed=step)

    def held_up_by_save(self, seconds: float, n_saves: int = 1) -> None:
        """Note that saving has held the loop up, for the next line."""
        self._saves = {"n": self._saves["n"] + n_saves, "held_up_s": round(self._saves["held_up_s"] + seconds, 5)}

    def write(self, state: str, **facts: Any) -> None:
        """Write a line now. `state` is what the attempt is if this stays its last line."""
        with self._meter.lock:
            wall_s = self._meter.wall_s
            self._last_line_at = wall_s
            self._lines.append(
                {
                    "attempt": self.number,
                    "state": state,
                    "at": self._meter.now,
                    "usd_per_hour": self._usd_per_hour,
                    "first_step": self._first_step,
                    "step": self._step,
                    "spans": {name: round(seconds, 4) for name, seconds in self._meter.spans.items()},
                    "saves": self._saves,
                    **self._facts,
                    **facts,
                }
            )

    def end(self, state: str) -> None:
        """The attempt's last word, forced to the disk; time goes on until `close`."""
        self._ended = state
        self.write(state)
        self._lines.sync()

    def close(self, state: str = "") -> None:
        """Stop, with a last word where it was not said before; what was written is forced to the disk."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join()
        if state:
            self.write(state)
        self._lines.sync()
        self._lines.close()


def read_attempts(lines: JsonLines) -> list[Attempt]:
    """The attempts of a ledger. Work that a later attempt had to redo is priced by the seconds it had taken."""
    attempts: dict[int, Attempt] = {}
    work_s_at: dict[int, dict[int, float]] = {}
    for row in lines.rows():
        if not _is_whole(row):
            continue
        number = row["attempt"]
        attempt = attempts.setdefault(number, Attempt(number, started_at=row["at"] - sum(row["spans"].values())))
        attempt.spans = row["spans"]
        attempt.usd_per_hour = row["usd_per_hour"]
        attempt.first_step, attempt.last_step = row["first_step"], row["step"]
        attempt.began |= row["state"] == "started"
        if isinstance(row.get("saves"), dict):
            attempt.n_saves, attempt.save_held_up_s = row["saves"].get("n", 0), row["saves"].get("held_up_s", 0.0)
        attempt.ended = row["state"] if row["state"] not in ("starting", "started", "running") else "killed"
        work_s = sum(row["spans"].get(name, 0.0) for name in WORK)
        work_s_at.setdefault(number, {}).setdefault(row["step"], work_s)  # its first line: the moment it was done
    ordered = [attempts[number] for number in sorted(attempts)]
    for index, attempt in enumerate(ordered):
        kept_step = min((later.first_step for later in ordered[index + 1 :] if later.began), default=attempt.last_step)
        if attempt.began and attempt.last_step > kept_step:
            work_s = work_s_at[attempt.number]
            attempt.redone_s = work_s[attempt.last_step] - _between(work_s, kept_step)
    return ordered


def _is_whole(row: dict[str, Any]) -> bool:
    """Whether a line is what `Ledger.write` writes: it may have come from a store."""
    numbers = [row.get(name) for name in ("attempt", "at", "usd_per_hour", "first_step", "step")]
    spans = row.get("spans")
    return (
        isinstance(spans, dict)
        and isinstance(row.get("state"), str)
        and all(isinstance(number, int | float) for number in (*numbers, *spans.values()))
    )


def _between(work_s: dict[int, float], step: int) -> float:
    """Seconds of work at `step`, on the straight line between the nearest steps that have a line in the ledger."""
    before = max((known for known in work_s if known <= step), default=min(work_s))
    after = min((known for known in work_s if known >= step), default=max(work_s))
    share = (step - before) / (after - before) if after > before else 0.0
    return work_s[before] + share * (work_s[after] - work_s[before])
