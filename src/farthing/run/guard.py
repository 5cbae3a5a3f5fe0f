"""The process that watches the one that trains, and ends it where a limit was passed.

    farthing train      this process: waits, hands signals on, runs `when_done`
      └─ worker         trains, and writes to a pipe how long it may still continue
           └─ attempts, ranks

A worker that hangs can't end itself where a library holds Python's lock, a file system never
answers or a signal has stopped it. Whoever started `farthing` sees one process, its exit code and
its signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farthing.clock import seconds_since_boot
from farthing.errors import EXIT_CRASH, EXIT_FINISHED, EXIT_LIMIT, EXIT_MISTAKE
from farthing.run.signals import handled

PIPE = "FARTHING_GUARD"
"""The environment variable with the file descriptor to which a worker writes."""
KILLED_AFTER_S = 5.0
"""Seconds past a limit at which a worker is killed that has not ended itself."""
ORPHANS_S = 30.0
"""Seconds that attempts may take to save whose supervisor has died."""
DIES_WITHIN_S = 1.5
"""Seconds after which a process that was killed is known to wait in the kernel."""
LAST_WORDS_S = 2.0
"""Seconds that the ledger and the receipt of a killed worker may take."""
SECOND_THOUGHTS_S = 10.0
"""Seconds in which somebody at the terminal may keep `when_done` from running."""
DONE = "when_done.json"
"""In the run folder once `when_done` was run, until another attempt begins."""
_DONE_AFTER = (EXIT_FINISHED, EXIT_CRASH, EXIT_MISTAKE, EXIT_LIMIT)
_TICK_S = 0.5
_is_worker = False
PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


# ---- the worker's side ----


def tell(**words: Any) -> None:
    """Write to the guard, where there is one. Never raises, and never waits for it."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ[PIPE]), json.dumps(words).encode() + b"\n")


def is_guarded() -> bool:
    """Whether another process watches this one."""
    return PIPE in os.environ


def guard_of_this() -> int | None:
    """The process that has forked this one to watch it, whose age counts too."""
    return os.getppid() if _is_worker else None


def pipe_to_hand_on() -> tuple[int, ...]:
    """File descriptors that a child of this process has to inherit, to be watched too."""
    with contextlib.suppress(KeyError, ValueError):
        return (int(os.environ[PIPE]),)
    return ()


# ---- the guard's side ----


@dataclass
class Told:
    """What a worker says of itself through a pipe, a line at a time."""

    pipe: int = -1
    folder: str = ""
    why: str = ""
    """The first limit that it would pass."""
    when_done: str = ""
    ends_at: float = float("inf")
    """By the monotonic clock: dollars and hours count while the machine runs."""
    deadline_at: float = float("inf")
    """By the clock that counts suspended time."""
    heard_at: float = 0.0
    """When limits were told last, by the monotonic clock."""
    is_open: bool = True
    _rest: bytes = b""

    def listen(self) -> bool:
        """Wait for lines, for half a second at most, and take them in; False once a limit was
        passed by so much that the worker will not end itself.
        """
        wait_s = min(_TICK_S, max(0.01, self.left_s + KILLED_AFTER_S))
        if not self.is_open:
            time.sleep(min(wait_s, 0.01))
        elif select.select([self.pipe], [], [], wait_s)[0]:
            data = os.read(self.pipe, 1 << 16)
            self.is_open = bool(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self.take(line)
        return self.left_s >= -KILLED_AFTER_S

    def take(self, line: bytes) -> None:
        """Take in a line; one that makes no sense is passed over."""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            words = json.loads(line)
            for name in {"folder", "why", "when_done"} & words.keys():
                setattr(self, name, str(words[name] or getattr(self, name)))
            if "left_s" in words:
                self.heard_at = time.monotonic()
                ends_at = self.heard_at + _seconds(words["left_s"])
                self.ends_at = min(self.ends_at, ends_at)  # what was spent is not given back
            if "deadline_s" in words:
                self.deadline_at = seconds_since_boot() + _seconds(words["deadline_s"])

    @property
    def left_s(self) -> float:
        """Seconds until the first limit, below zero once it was passed."""
        return min(self.ends_at - time.monotonic(), self.deadline_at - seconds_since_boot())


def _seconds(told: float | None) -> float:
    return float("inf") if told is None else told


def guarded(work: Callable[[], int], last_words: Callable[[Path, str, float], None]) -> int:
    """Run `work` in a process of its own, and end that where it passes its limits; its exit code.

    `last_words(folder, why, seconds)` leaves ledger and receipt of a worker that was killed, which
    has not been heard of for so many seconds. Dies of the signal that the worker has died of.
    """
    if is_guarded() or not hasattr(os, "fork"):
        return work()
    reads, writes = _pipe_for_words()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        global _is_worker
        _is_worker = True
        os.close(reads)
        _follow(parent)
        os.environ[PIPE] = str(writes)
        return work()
    os.close(writes)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    code, told, was_killed = watch(pid, reads)
    stuck = _end_orphans(0.0 if was_killed else ORPHANS_S)
    if stuck:
        _say(
            f"can't be killed: {', '.join(map(str, stuck))}; a file system or a device does not"
            " answer them, and GPU and memory stay taken until this machine is ended"
        )
    if was_killed:
        _say_killed(told, last_words)
    if code in _DONE_AFTER and told.when_done and told.folder:
        _run_when_done(told, code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        _die_of(-code)
    os._exit(code)


def _say_killed(told: Told, last_words: Callable[[Path, str, float], None]) -> None:
    _say(f"stopped by {told.why}: the run had not ended by itself; the last save is whole")
    if told.folder:
        late_s = time.monotonic() - told.heard_at
        _bounded(lambda: last_words(Path(told.folder), told.why, late_s), LAST_WORDS_S)


@contextlib.contextmanager
def watched_from_beside(module: str, folder: Path) -> Iterator[None]:
    """Within the block another process kills this one where it passes what it tells of limits.

    `module` is run there, and calls `watch_beside`. A thread of this process can't do it
    where a library holds Python's lock.
    """
    if is_guarded() or sys.platform == "win32":
        yield
        return
    reads, writes = _pipe_for_words()
    command = [sys.executable, "-P", "-m", module, str(os.getpid())]
    beside = subprocess.Popen(command, stdin=reads, start_new_session=True)
    os.close(reads)
    os.environ[PIPE] = str(writes)
    tell(folder=str(folder))
    try:
        yield
    finally:
        del os.environ[PIPE]
        os.close(writes)
        beside.kill()
        beside.wait()


def watch_beside(pid: int, last_words: Callable[[Path, str, float], None]) -> None:
    """Read limits from standard input until it ends; kill process `pid`, which has begun this one,
    and all that descend from it, where it passes one. See `guarded` for `last_words`.
    """
    told = Told(0)
    # children may hold the pipe open when it is dead, and its number may be a stranger's
    while told.is_open and os.getppid() == pid:
        if not told.listen() and told.is_open and os.getppid() == pid:
            _kill([pid, *(each for each in _descendants(pid) if each != os.getpid())])
            _say_killed(told, last_words)
            return


def _pipe_for_words() -> tuple[int, int]:
    """The ends of the guard, and of the worker and all that it begins."""
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    os.set_blocking(writes, False)
    return reads, writes


def _follow(parent: int) -> None:
    """In the worker: out of the terminal's reach, and dead as soon as the guard is."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(EXIT_CRASH)


def _prctl(what: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(what, value)


def _end_orphans(grace_s: float) -> list[int]:
    """Kill what a dead worker has left, after a while; those that no signal ends."""
    until, is_killed = time.monotonic() + grace_s, False
    with contextlib.suppress(ChildProcessError):
        while True:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.02)
                if time.monotonic() > until:
                    left = _descendants(os.getpid())
                    if is_killed:
                        return left
                    until, is_killed = time.monotonic() + DIES_WITHIN_S, True
                    _kill(left)
    return []


def watch(pid: int, reads: int) -> tuple[int, Told, bool]:
    """(exit code or, negative, the signal; what was told; whether the guard has killed it)."""
    told = Told(reads)
    with _handing_on(pid):
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            may_continue = told.listen()  # to the last words of one that has ended, too
            if ended:
                return os.waitstatus_to_exitcode(status), told, False
            if not may_continue:
                _kill([pid, *_descendants(pid)])
                return EXIT_LIMIT, told, True


def _handing_on(pid: int) -> contextlib.AbstractContextManager[None]:
    """Within the block signals go to the worker; a stop from the terminal stops both."""

    def hand_on(number: int, frame: Any) -> None:
        is_stop = number == signal.SIGTSTP
        with contextlib.suppress(OSError):
            if is_stop or number == signal.SIGCONT:
                os.killpg(pid, signal.SIGSTOP if is_stop else number)
            else:
                os.kill(pid, number)
        if is_stop:
            os.kill(os.getpid(), signal.SIGSTOP)

    return handled(hand_on, (signal.SIGTSTP, signal.SIGCONT))


def _kill(pids: list[int]) -> None:
    for each in pids:
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Processes that others of this one have begun, and their own."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return [each.pid for each in psutil.Process(pid).children(recursive=True)]
    return []


def _bounded(work: Callable[[], None], most_s: float) -> None:
    """Do it in a child, which is left to itself after so many seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)


def _run_when_done(told: Told, code: int) -> None:
    """Run the user's command, once a run; who sits at the terminal may stop it."""
    marker = Path(told.folder) / DONE
    if marker.exists():
        return
    if sys.stderr.isatty():
        _say(f"when_done in {SECOND_THOUGHTS_S:.0f} s: {told.when_done} (Ctrl-C keeps the machine)")
        try:
            time.sleep(SECOND_THOUGHTS_S)
        except KeyboardInterrupt:
            _say("when_done was not run: this machine may still cost money")
            return
    with contextlib.suppress(OSError):
        marker.write_text(json.dumps({"exit_code": code, "command": told.when_done}) + "\n")
    _say(f"when_done: {told.when_done}")
    environ = {**os.environ, "FARTHING_EXIT_CODE": str(code), "FARTHING_RUN": told.folder}
    found = subprocess.run(told.when_done, shell=True, env=environ, check=False).returncode
    if found:
        _say(f"when_done ended with {found}: this machine may still cost money")


def forget_done(folder: Path) -> None:
    """Another attempt begins: `when_done` is due again at its end."""
    with contextlib.suppress(OSError):
        (folder / DONE).unlink(missing_ok=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"farthing: {text}\n".encode())


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    with contextlib.suppress(OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left one already
    os.kill(os.getpid(), number)
