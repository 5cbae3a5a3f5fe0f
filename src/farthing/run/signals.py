"""Has someone asked us to leave? A signal, or a cloud's notice, only sets a flag; the loop looks at
it after every micro-batch.

A second signal ends the process at once: whatever was committed before stays valid. A signal after
a cloud's notice is not a second one: the operating system's shutdown follows the notice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from farthing.errors import EXIT_INTERRUPTED

SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),  # of schedulers, before they kill
)
"""Each is a wish that the run saves and leaves; stopped and continued it just continues."""
LAST_WORDS_S = 5.0  # before the machine goes: receipt, lease and the end of the process


def heeded() -> list[signal.Signals]:
    """All of `SIGNALS`, but for a SIGHUP that the caller has switched off (`nohup`)."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (is_nohup and number == signal.SIGHUP)]


@contextlib.contextmanager
def handled(
    handler: Callable[[int, Any], object], also: tuple[signal.Signals, ...] = ()
) -> Iterator[None]:
    """Within the block each of `heeded`, and of those besides, calls `handler(number, frame)`."""
    before = {number: signal.signal(number, handler) for number in (*heeded(), *also)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@dataclass(frozen=True)
class Heard:
    """One event: a signal's name or a cloud's notice."""

    what: str
    source: str
    """signal, aws, gcp, azure"""
    at: float
    """Seconds since 1970."""
    leaves_at: float | None = None
    """When the machine goes, where that was announced."""
    is_certain: bool = True
    """False: it may be taken; saved sooner, the run continues."""

    def as_dict(self) -> dict[str, object]:
        """For the ledger; `grace_s` is what was left when it was heard."""
        grace_s = None if self.leaves_at is None else round(self.leaves_at - self.at, 1)
        return {**asdict(self), "grace_s": grace_s}


class Notice:
    """Context that watches for signals. `reason` is None until one has come."""

    def __init__(self, one_press_s: float = 0.0) -> None:
        # a launcher hands on the Ctrl-C that the terminal has sent to all: two signals
        self._one_press_s = one_press_s
        self._first_at = 0.0
        self.reason: str | None = None
        self.heard: list[Heard] = []
        """All events, in order."""
        self.limit: str | None = None
        """The limit that leaves no more time than saving takes."""
        self.warnings: list[str] = []
        """Words for the user from threads that have no one to tell."""
        self._n_signals = self._n_taken = 0
        self._listening = contextlib.ExitStack()

    def __enter__(self) -> Notice:
        if threading.current_thread() is threading.main_thread():
            self._listening.enter_context(handled(self._signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def __bool__(self) -> bool:
        return self.reason is not None

    def say(
        self, what: str, source: str, leaves_at: float | None = None, *, is_certain: bool = True
    ) -> None:
        """From any thread: a certain end is as a signal, a risk only for `news`."""
        self.heard.append(Heard(what, source, time.time(), leaves_at, is_certain))
        if is_certain and self.reason is None:
            self.reason = what

    def reach(self, limit: str) -> None:
        """From now on the run leaves, because of a limit; from any thread."""
        self.limit = limit
        self.reason = self.reason or limit

    def how_it_ends(self) -> tuple[str, str]:
        """(state, reason) of a run that leaves now."""
        if self.limit is not None and self.reason == self.limit:
            return "limit", self.limit
        return "interrupted", self.reason or "another rank was asked to leave"

    def patience_s(self, unknown_s: float, most_s: float) -> float:
        """Seconds that may still be waited for something: until shortly before the machine goes, at
        most `most_s`.

        `unknown_s` where nobody has said when that is.
        """
        ends = [heard.leaves_at for heard in self.heard if heard.is_certain and heard.leaves_at]
        if not ends:
            return unknown_s
        return min(most_s, max(1.0, min(ends) - time.time() - LAST_WORDS_S))

    def news(self) -> list[Heard]:
        """Events since the last call."""
        new = self.heard[self._n_taken :]
        self._n_taken += len(new)
        return new

    def _signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._n_signals and now - self._first_at < self._one_press_s:
            return
        self._n_signals += 1
        self._first_at = self._first_at or now
        if self._n_signals > 1:
            os.write(
                2, b"\nsecond signal: leaving at once; the last committed checkpoint is whole\n"
            )
            os._exit(EXIT_INTERRUPTED)
        self.say(signal.Signals(number).name, "signal")
