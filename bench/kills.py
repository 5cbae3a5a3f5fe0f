"""When a process is killed and where it was: the half of survive.py that knows nothing of training.

An attempt says in memory that it shares with its killer which part of a run it is in; moments are
drawn from a seed, some anywhere, some aimed at a part. Refuses to kill what it did not start.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PLACES = (
    "start",
    "tokenization",
    "restore",
    "training step",
    "save",
    "evaluation",
    "upload",
    "export",
    "between",
)
_MEANWHILE = (
    "save",
    "upload",
)  # what threads do while the run goes on; the last that is under way gives the place
_AIMS = (None, "training step", "save", "save", "evaluation", "tokenization")
_LASTS_S = {
    "training step": 0.1,
    "save": 0.01,
    "evaluation": 0.03,
    "tokenization": 0.04,
    "upload": 0.03,
}


class Whereabouts:
    """The part of a run that a process is in, in a file that its parent maps too: what was written
    outlives a kill.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(1 + len(_MEANWHILE)))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def begin(self) -> None:
        """A new process starts."""
        self._memory[:] = bytes(len(self._memory))

    def enter(self, place: str) -> str:
        """From now on the process is there; returns where it was."""
        before = PLACES[self._memory[0]]
        self._memory[0] = PLACES.index(place)
        return before

    @contextmanager
    def within(self, place: str) -> Iterator[None]:
        """The block is there."""
        before = self.enter(place)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def meanwhile(self, place: str) -> Iterator[None]:
        """The block, in whatever thread, is saving or uploading while the run goes on."""
        at = 1 + _MEANWHILE.index(place)
        self._memory[at] = 1
        try:
            yield
        finally:
            self._memory[at] = 0

    def now(self) -> str:
        """Where the process is, or was when it died."""
        under_way = [place for at, place in enumerate(_MEANWHILE, 1) if self._memory[at]]
        return under_way[-1] if under_way else PLACES[self._memory[0]]


class Moment(NamedTuple):
    """When to kill: after `share` of the time that is left to do, then, if aimed, `late_s` into the
    next such part.
    """

    aim: str | None
    share: float
    late_s: float


def moments(seed: int, *, with_upload: bool = False, anywhere: bool = False) -> list[Moment]:
    """Three to five moments, the same for whoever runs this seed; `anywhere`: none is aimed."""
    chance = random.Random(seed)
    drawn = []
    for _ in range(chance.randint(3, 5)):
        aim = (
            None
            if anywhere
            else chance.choice(_AIMS + (("upload", "upload") if with_upload else ()))
        )
        share = 0.0 if aim == "tokenization" else chance.uniform(0, 0.8 if aim is None else 0.5)
        drawn.append(Moment(aim, share, chance.uniform(0, _LASTS_S.get(aim or "", 0.0))))
    return drawn


class Attempt(Protocol):
    """A process under way."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""


class Forked:
    """`work()` in a child forked from this process, which has the libraries already; its words go
    to a file.
    """

    def __init__(self, work: Callable[[], int], words: Path) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            # what was imported before the fork is no garbage, as the command line has it
            gc.freeze()
            try:
                output = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                code = work()
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException as error:
                os.write(2, repr(error).encode())
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """See `Attempt`."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code


def finish(attempt: Attempt) -> int:
    """Wait for the end; the exit code."""
    while (code := attempt.poll()) is None:
        time.sleep(0.005)
    return code


def kill_at(moment: Moment, left_s: float, attempt: Attempt, where: Whereabouts) -> bool:
    """SIGKILL an attempt that has `left_s` to do at a moment; False when it came to its end before
    that.
    """
    until = time.monotonic() + moment.share * left_s
    while time.monotonic() < until and attempt.poll() is None:
        time.sleep(0.002)
    if moment.aim is not None:
        while attempt.poll() is None and where.now() != moment.aim:
            time.sleep(0.0002)
        time.sleep(moment.late_s)
    if attempt.poll() is not None:
        return False
    os.kill(attempt.pid, signal.SIGKILL)
    finish(attempt)
    return True


def patched(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around(function, *args)` called in place of a function, which it is given."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(function, *args, **kwargs))
