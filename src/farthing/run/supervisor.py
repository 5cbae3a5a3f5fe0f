"""A run begun again until it ends: after an interruption, a crash or a kill, each attempt in a
process of its own.

A loop that ends: what repeats itself is not tried a third time, and attempts that commit nothing
are counted. Signals are handed to the child, which saves and leaves; then nothing is begun again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from farthing.errors import EXIT_CRASH, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_LIMIT, EXIT_MISTAKE
from farthing.run.accounts import read_ledger
from farthing.run.folder import LEDGER
from farthing.run.guard import PR_SET_PDEATHSIG, pipe_to_hand_on
from farthing.run.opening import PAUSED
from farthing.run.signals import handled
from farthing.units import plural, say_seconds

TRIES = 3
FINAL = (EXIT_FINISHED, EXIT_MISTAKE, EXIT_LIMIT)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Child(Protocol):
    """An attempt that is under way."""

    def wait(self) -> int:
        """Its exit code; negative: the signal that has killed it."""

    def send_signal(self, number: int, /) -> None:
        """Hand on a signal."""


@dataclass(frozen=True)
class RunStanding:
    """How far a run has come, by its ledger."""

    step: int = 0
    """Of the last attempt."""
    committed: int = 0
    """The newest step that was saved."""
    leaving: str = ""
    """The cloud's notice that the last attempt has heard: this machine goes."""


def standing(folder: Path) -> RunStanding:
    """Where the run in `folder` stands; at zero before it has begun."""
    accounts = read_ledger(folder / LEDGER).accounts
    if not accounts:
        return RunStanding()
    said = [each["notice"] for each in accounts[-1].notices]
    leaving = [
        str(note.get("what"))
        for note in said
        if note.get("is_certain") and note.get("source") != "signal"
    ]
    committed = max(0, *(account.committed for account in accounts))
    return RunStanding(accounts[-1].step, committed, leaving[-1] if leaving else "")


class Supervisor:
    """Runs attempts until one ends for good. `start(n)` begins attempt number n, from 0."""

    def __init__(
        self,
        folder: Path,
        start: Callable[[int], Child],
        say: Callable[[str], None],
        *,
        tries: int = TRIES,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._start, self._say = folder, start, say
        self._tries, self._sleep, self._clock = tries, sleep, clock
        self._child: Child | None = None
        self._asked_to_leave = False

    def run(self) -> int:
        """The exit code of the last attempt (1 where it was killed)."""
        try:
            with handled(self._hand_on):
                return self._run()
        finally:
            os.environ.pop(PAUSED, None)

    def _run(self) -> int:
        n_started = n_in_vain = 0
        crashed_at: int | None = None
        ended_at: float | None = None
        stood = standing(self._folder)
        while not self._asked_to_leave:
            os.environ[PAUSED] = f"{0.0 if ended_at is None else self._clock() - ended_at:.3f}"
            self._child = self._start(n_started)
            if self._asked_to_leave:  # meanwhile
                self._child.send_signal(signal.SIGTERM)
            n_started += 1
            code = self._child.wait()
            self._child, ended_at = None, self._clock()
            stands = standing(self._folder)
            if code in FINAL:
                return code
            if self._asked_to_leave:
                break
            if code == EXIT_INTERRUPTED and stands.leaving:
                self._say(f"not begun again on a machine that goes: {stands.leaving}")
                return code
            if code == EXIT_CRASH and crashed_at == stands.step:
                self._say(
                    f"it crashed twice in a row after step {stands.step:,}, and would again; see"
                    " its words above"
                )
                return code
            crashed_at = stands.step if code == EXIT_CRASH else None
            n_in_vain = 0 if stands.committed > stood.committed else n_in_vain + 1
            if n_in_vain >= self._tries:
                self._say(
                    f"{plural(n_in_vain, 'attempt')} in a row saved nothing new; stopped after"
                    f" {how_it_ended(code)}"
                )
                return code if code > 0 else EXIT_CRASH
            stood = stands
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**n_in_vain)
            self._say(
                f"{how_it_ended(code)} after step {stands.step:,}; begun again in"
                f" {say_seconds(pause_s)}"
            )
            self._pause(pause_s)
        return EXIT_INTERRUPTED

    def _pause(self, seconds: float) -> None:
        """Wait, unless asked to leave meanwhile."""
        while seconds > 0 and not self._asked_to_leave:
            self._sleep(min(seconds, 0.2))
            seconds -= 0.2

    def _hand_on(self, number: int, frame: Any) -> None:
        self._asked_to_leave = True
        if self._child is not None:
            self._child.send_signal(number)


def how_it_ended(code: int) -> str:
    """What an exit code means: `killed by SIGKILL`."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return "interrupted" if code == EXIT_INTERRUPTED else f"ended with {code}"


def begin(
    arguments: Sequence[str],
    stdout: IO[bytes] | int | None = None,
    stderr: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """`farthing` with these arguments as a child that signals of the terminal reach only through
    us, and that is asked to leave when we die; `environ` besides what we have."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def follow() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))

    return subprocess.Popen(
        [sys.executable, "-P", "-m", "farthing", *arguments],
        stdout=stdout,
        stderr=stderr,
        env=None if environ is None else {**os.environ, **environ},
        process_group=0,
        pass_fds=pipe_to_hand_on(),
        preexec_fn=follow,
    )
