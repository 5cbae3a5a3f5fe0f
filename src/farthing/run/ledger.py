"""Every second of a run has a name and a price.

A `Meter` is always in exactly one span, so the spans of an attempt add up to its wall time by
construction. The `Ledger` keeps the account of every attempt on disk, apart from the checkpoints:
time that was paid for stays on the bill even when its work was lost.

    train, saver, watchers                        thread, every `BEAT_S`
      enter/span    write(facts), end(state)         beat
         v                v                            v
       Meter  ------>  Account of this attempt  --> the whole file anew: a line for each other
      (seconds)                                     attempt, two for this one; draft, then rename

A kill at any moment leaves the file before or after: it costs what was spent since the last beat.
On a full disk the file is written over in place, where one of the two lines is always whole. Nobody
else writes the file meanwhile: attempts of other machines come by `take_in`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from farthing.clock import seconds_since_boot, steady_clock
from farthing.run.accounts import (
    LOST,
    N_SHORT_MARKS,
    Account,
    Witness,
    as_line,
    merge,
    read_ledger,
)
from farthing.run.guard import guard_of_this
from farthing.storage.files import Json, fsync_path, keep_aside, write_text

# The spans, in the order of the receipt, and what each is.
SPANS = {
    "start_up": "start-up: process, imports, checks",
    "tokenize": "reading and tokenizing data",
    "load_model": "loading the model",
    "restore": "looking for a checkpoint, and reading it",
    "reference": "scoring answers by the reference",
    "probe": "probing settings",
    "compile": "compiling layers, and the steps in which that happens",
    "data_wait": "waiting for batches",
    "host_to_device": "copying batches to the device",
    "compute": "forward and backward",
    "optimizer": "clipping and optimizer",
    "ranks": "waiting for other ranks",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "export": "exporting the model",
    "idle": "everything else",
    "lost": "details lost with damaged lines of the ledger",
}
BEAT_S = 0.5
MACHINE = "FARTHING_MACHINE"
"""The environment variable with the name of a rented machine."""
N_LONG = 8  # newest attempts whose lines are kept with all their detail
MOST_TAIL_S = 3600.0
"""Seconds that a killed process can have gone without a line; more is a clock that was set."""


def seconds_since_process_start() -> float:
    """What imports and start-up have cost before the meter existed."""
    try:  # the kernel counts from the boot, as a clock that jumps does not
        stat = Path(f"/proc/{guard_of_this() or 'self'}/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])
        age = seconds_since_boot() - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        import psutil

        age = time.time() - psutil.Process().create_time()
    return age if 0 <= age < 3600 else 0.0


class Meter:
    """A stopwatch that is always in one named span. `clock` gives monotonic seconds.

    `now` is the time of day, by the clock as it was when the meter began: a clock that is set while
    a run continues ends nothing and buys nothing.
    """

    def __init__(
        self,
        *,
        already_s: float = 0.0,
        idle_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._clock, self.now = clock, now or steady_clock()
        self.lock = threading.RLock()  # the ledger looks on from a thread of its own
        self._since = clock()
        self.at = "start_up"
        """The span that time belongs to now."""
        self.spans = {"start_up": already_s, **({"idle": idle_s} if idle_s else {})}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time inside the block belongs to `name`, and to nothing else."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, name: str) -> str:
        """From now on time belongs to `name`, until another span begins; the span before."""
        if name not in SPANS:
            raise KeyError(f"no such span: {name}")
        with self.lock:
            now, before = self._clock(), self.at
            self.spans[before] = self.spans.get(before, 0.0) + now - self._since
            self.at, self._since = name, now
            return before

    def move(self, source: str, target: str, seconds: float) -> None:
        """Give time waited for under one name to the work that was waited for."""
        with self.lock:
            moved = min(seconds, self.spans.get(source, 0.0))
            self.spans[source] = self.spans.get(source, 0.0) - moved
            self.spans[target] = self.spans.get(target, 0.0) + moved

    @property
    def wall_s(self) -> float:
        """Seconds since the process began."""
        with self.lock:
            self.enter(self.at)
            return sum(self.spans.values())


class Ledger:
    """The accounts of a run's attempts, in `ledger.jsonl`, of which this process writes one.

    Nothing is written before `write` is called for the first time. `witnesses` know of money that
    may be missing in the file. What writes raises `OSError`.
    """

    def __init__(
        self,
        path: Path,
        meter: Meter,
        usd_per_hour: float,
        witnesses: Iterable[Witness] = (),
        n_gpus: int = 1,
    ) -> None:
        self._path, self._meter = path, meter
        self.lock = meter.lock
        """Held while a line is made and written."""
        self.mine = Account(
            LOST,
            id=uuid.uuid4().hex[:12],
            machine=os.environ.get(MACHINE, ""),
            usd_per_hour=usd_per_hour,
            n_gpus=n_gpus,
        )
        """This attempt; `number` is from 1."""
        self.past: list[Account] = []
        """The other attempts, in order."""
        self._past_lines = ""
        self._last_line_at = -math.inf
        self._beats: threading.Thread | None = None
        self._closed = threading.Event()
        self._is_written = self._is_withdrawn = False
        found = read_ledger(path, witnesses)
        self.damage = found if found.is_damaged else None
        """What was wrong with the ledger when it was read, if anything was."""
        self._add(found.accounts)

    def _add(self, known: list[Account]) -> None:
        """Take over what is known of other attempts; number this one after them."""
        mine = self.mine
        self.past = [each for each in merge(known, self.past) if each.id != mine.id]
        numbers = [account.number for account in self.past]
        if mine.number == LOST or mine.number in numbers:
            mine.number = max(numbers, default=LOST) + 1
        for account in self.past[:-N_LONG]:
            account.thin(N_SHORT_MARKS)
        self._past_lines = "".join(map(as_line, self.past))
        mine.past_s = sum(account.wall_s for account in self.past)
        mine.past_usd = sum(account.usd for account in self.past)

    # ---- the whole run, all attempts ----

    @property
    def _all(self) -> list[Account]:
        return [*self.past, self.mine]

    @property
    def spent_usd(self) -> float:
        return self.mine.past_usd + self._meter.wall_s / 3600 * self.mine.usd_per_hour

    @property
    def spent_s(self) -> float:
        return self.mine.past_s + self._meter.wall_s

    @property
    def spent_gpu_s(self) -> float:
        return sum(each.gpu_s for each in self.past) + self._meter.wall_s * self.mine.n_gpus

    @property
    def committed_step(self) -> int:
        """The newest step that was ever saved; -1 where there is none."""
        return max(account.committed for account in self._all)

    @property
    def out_of_memory(self) -> list[Json]:
        return [event for account in self._all for event in account.out_of_memory]

    @property
    def forecast(self) -> Json | None:
        """The first forecast of the run."""
        return next((account.forecast for account in self._all if account.forecast), None)

    @property
    def takes(self) -> dict[str, float]:
        """Seconds of parts of earlier attempts: start_s, step_s, save_s, evaluation_s."""
        told = (account.facts.get("takes") for account in reversed(self.past))
        return next(filter(None, told), {})

    @property
    def clock_back_s(self) -> float:
        """By how much the clock stands before the last moment of an earlier attempt."""
        return max(0.0, max((account.at for account in self.past), default=0.0) - self.now)

    # ---- this attempt ----

    @property
    def now(self) -> float:
        return self._meter.now()

    def begin_at(self, step: int) -> None:
        """This attempt continues after `step`."""
        self.mine.first_step = self.mine.step = step
        self.mine.began = True
        self.write()

    def at_step(self, step: int, facts: Json) -> None:
        """Note that `step` is done. It is written no oftener than a beat, so that quick steps cost
        nothing."""
        with self.lock:
            self.mine.step = step
            self.mine.note(facts)
        self.beat()

    def held_up_by_save(self, seconds: float, n_saves: int = 1) -> None:
        """Note that saving has held the loop up, for the next line."""
        with self.lock:
            self.mine.n_saves += n_saves
            self.mine.held_up_s += seconds

    def witness(self) -> Json:
        """What a checkpoint's manifest knows of the money; on the ledger first."""
        with self.lock:
            self.write()
            mine = self.mine
            return {
                "attempt": mine.number,
                "attempt_id": mine.id,
                "spent_s": mine.past_s + mine.wall_s,
                "spent_usd": mine.past_usd + mine.usd,
            }

    def take_in(self, accounts: list[Account]) -> None:
        """Put attempts of other machines at this run on the bill."""
        with self.lock:
            self._add(accounts)
            self._put()

    # ---- its line ----

    def write(self, **facts: Any) -> None:
        """This attempt's line, now."""
        with self.lock:
            if self._is_withdrawn:
                return
            mine, self._last_line_at = self.mine, self._meter.wall_s
            mine.at, mine.line = self.now, mine.line + 1
            mine.started_at = mine.started_at or mine.at - self._last_line_at
            mine.spans = {name: round(seconds, 4) for name, seconds in self._meter.spans.items()}
            mine.note(facts)
            mine.mark()
            self._put()

    def beat(self) -> None:
        """Say that time continues, if nothing was said for a while."""
        if self._meter.wall_s - self._last_line_at >= BEAT_S:
            self.write()

    def keep_beating(self) -> None:
        """`beat` from a thread until `close`: so a kill in a long step is on the bill."""

        def beats() -> None:
            while not self._closed.wait(BEAT_S):
                with contextlib.suppress(OSError):  # a full disk is the loop's to judge
                    self.beat()

        self._beats = threading.Thread(target=beats, name="ledger", daemon=True)
        self._beats.start()

    def end(self, state: str) -> None:
        """How the attempt has ended, forced to the disk; time continues until `close`."""
        with self.lock:
            self.mine.state = state
            self.write()
            if not self._is_withdrawn:
                fsync_path(self._path)

    def close(self) -> None:
        """The attempt's last line, forced to the disk."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join()
            self._beats = None
        if self._is_written:
            self.end(self.mine.state)

    def withdraw(self) -> None:
        """Take this attempt out: it was none of this run. Without others the file goes."""
        with self.lock:
            self._is_withdrawn = True
            if self._is_written and self.past:
                write_text(self._path, self._past_lines, is_private=True)
            elif self._is_written:
                self._path.unlink(missing_ok=True)

    def _put(self) -> None:
        if self.damage is not None and not self._is_written:
            keep_aside(self._path)
        text = self._past_lines + 2 * as_line(self.mine)
        try:
            write_text(self._path, text, is_synced=False, is_private=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._is_written:
                raise
            with open(self._path, "r+", encoding="utf-8") as file:  # its blocks are there
                file.write(text)
                file.truncate()
        self._is_written = True


def end_for(path: Path, state: str = "", late_s: float = MOST_TAIL_S) -> None:
    """End the newest attempt of a ledger for a process that was killed just now, at most `late_s`
    after its last line. Nobody may be writing the file any more. Never raises.
    """
    with contextlib.suppress(OSError):
        accounts = read_ledger(path).accounts
        if accounts and (last := accounts[-1]).ended == "killed":
            # not `last.at`: the clock may have been set since the attempt began
            late_s = max(0.0, min(late_s, time.time() - path.stat().st_mtime))
            last.state, last.line, last.at = state or last.state, last.line + 1, last.at + late_s
            last.spans["idle"] = last.spans.get("idle", 0.0) + late_s
            write_text(path, map(as_line, accounts))
