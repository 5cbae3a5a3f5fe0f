"""Ends an attempt that passes a limit, from a thread of its own: the main thread may hang anywhere.

    seconds left        what happens
    > reserve           nothing
    <= reserve          `reach`: tokenizing, steps and evaluations leave, save and export
    < -RAISED_AFTER_S   `LimitError` is raised in the main thread, wherever it is
    < -ENDED_AFTER_S    ledger and receipt, then this process ends with 3
    < -KILLED_AFTER_S   `run.guard` kills a process in which no thread runs any more

What was committed stays. Seconds are those of the ledger; a deadline counts suspended time too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from farthing.errors import EXIT_LIMIT, LimitError
from farthing.train.budget import RunLimits

RAISED_AFTER_S, ENDED_AFTER_S = 1.5, 3.5
LAST_WORDS_S = 1.0
TICK_S = 0.25
_SIGNAL = signal.SIGXCPU  # interrupts a main thread that sleeps or waits. The handler raises.


class Watchdog:
    """Within the block the limits of a job hold, whatever the main thread does."""

    def __init__(
        self, limits: RunLimits, reach: Callable[[str], None], last_words: Callable[[], object]
    ) -> None:
        self._limits, self._reach, self._last_words = limits, reach, last_words
        self._allowance_s = limits.allowance_s
        self.reserve_s: Callable[[], float] = lambda: 0.0  # seconds that saving and leaving take
        self._main = threading.main_thread()
        self._closed, self._raises = threading.Event(), True
        self._why = ""
        self._read_at, self._left_s = time.monotonic(), float("inf")
        self._before: Any = None
        self._thread = threading.Thread(target=self._watch, name="farthing-watchdog", daemon=True)

    @property
    def left_s(self) -> float:
        """Seconds until the first limit; infinite without one."""
        return max(0.0, self._left()) if self._thread.is_alive() else float("inf")

    def __enter__(self) -> Self:
        if self._limits.left():
            if threading.current_thread() is self._main:
                self._before = signal.signal(_SIGNAL, self._raise)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._closed.set()
        if self._before is not None:
            signal.signal(_SIGNAL, signal.SIG_IGN)
            signal.signal(_SIGNAL, self._before)

    def raise_no_more(self) -> None:
        """From here on whatever hangs ends the process."""
        self._raises = False

    def _raise(self, number: int, frame: Any) -> None:
        if self._raises and not self._closed.is_set():
            raise LimitError(self._why)

    def _left(self) -> float:
        """As the ledger has it, or by our own clock where another thread holds that for long."""
        lock = self._limits.ledger.lock
        if lock.acquire(timeout=0.1):
            try:
                first = min(self._limits.left())
                self._left_s, self._why = first.seconds + self._allowance_s, first.why
                self._limits.tell_guard()
            finally:
                lock.release()
            self._read_at = time.monotonic()
        return self._left_s - (time.monotonic() - self._read_at)

    def _watch(self) -> None:
        is_reached = False
        while not self._closed.wait(TICK_S):
            left_s = self._left()
            if left_s <= self.reserve_s() and not is_reached:
                is_reached = True
                self._reach(self._why)
            if left_s < -ENDED_AFTER_S:
                self._end()
            elif left_s < -RAISED_AFTER_S and self._before is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    signal.pthread_kill(self._main.ident or 0, _SIGNAL)

    def _end(self) -> None:
        place = ""
        with contextlib.suppress(Exception):
            import sys

            stack = traceback.extract_stack(sys._current_frames()[self._main.ident or 0])
            place = f", in {os.path.basename(stack[-1].filename)}:{stack[-1].lineno}"
        last = threading.Thread(target=self._last_words, daemon=True)
        last.start()
        last.join(LAST_WORDS_S)
        text = f"farthing: stopped by {self._why}: the run hung{place}; the last save is whole\n"
        os.write(2, text.encode())
        os._exit(EXIT_LIMIT)
