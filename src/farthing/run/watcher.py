"""A second process that keeps the time of this one while it can't: loading a library of a gigabyte
holds Python's one lock for seconds, in which no thread of ours runs.

The watcher is forked before anything large is there. It calls `beat` again and again until this
process stops it or dies, then once more, so that even the moment of a SIGKILL is on the bill.
Refuses to outlive whom it watches: it ends when the pipe between them does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass

from farthing.run.signals import SIGNALS


@dataclass
class Watcher:
    """A watching process, and the end of the pipe that holds it there."""

    pid: int
    pipe: int

    def stop(self) -> None:
        """End it, after its last beat."""
        os.close(self.pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def watch(beat: Callable[[], None], file: int, every_s: float) -> Watcher:
    """Have a fork of this process call `beat` every so many seconds. Of open files it keeps `file`
    only. Raises `OSError`.
    """
    listens, pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            _close_all_but(listens, file)
            while not select.select([listens], [], [], every_s)[0]:
                beat()
            beat()
        finally:
            os._exit(0)
    os.close(listens)
    return Watcher(pid, pipe)


def _close_all_but(*kept: int) -> None:
    """Close what is not ours to hold: the folder's lock, pipes that somebody reads, the pipe to
    ourselves.
    """
    ends = [-1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for after, before in itertools.pairwise(ends):
        os.closerange(after + 1, min(before, 1 << 16))
