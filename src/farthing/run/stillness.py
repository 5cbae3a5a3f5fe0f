"""Whether a process that should be working shows any sign of it: the beat of a rank carries this.

A thread beats on while the main thread hangs in a sleep, a file system or a library. Signs of work
are polls of the main thread, CPU time, and bytes read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LEAST_CPU_SHARE = 0.02
"""Of a core; what the threads that beat and write the ledger take is a tenth of that."""


class Stillness:
    """`is_waiting` is set while the main thread waits for other ranks, which are then judged."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.process_time,
        read_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._clock, self._cpu_s, self._read_bytes = clock, cpu_s, read_bytes or bytes_read
        self.is_waiting = False
        self._n_polls = 0
        self._seen = self._signs()

    def poll(self) -> None:
        """The main thread is at work."""
        self._n_polls += 1

    def seconds(self) -> float:
        """Since the last sign of work; 0 while waiting for others."""
        at, polls, cpu_s, n_read = self._signs()
        since, before_polls, before_cpu_s, before_read = self._seen
        has_worked = cpu_s - before_cpu_s > LEAST_CPU_SHARE * max(at - since, 1.0)
        if self.is_waiting or has_worked or (polls, n_read) != (before_polls, before_read):
            self._seen = at, polls, cpu_s, n_read
            return 0.0
        return at - since

    def _signs(self) -> tuple[float, int, float, int]:
        return self._clock(), self._n_polls, self._cpu_s(), self._read_bytes()


def bytes_read() -> int:
    """Bytes that this process has read from files and disks so far; 0 where nobody counts them."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        found = dict(line.split(": ") for line in lines)
        # what this file itself has added: it is read once a beat
        return int(found["read_bytes"]) + (int(found["rchar"]) >> 20)
    except (OSError, ValueError, KeyError):
        return 0
