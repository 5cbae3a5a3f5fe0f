"""Signals that arrive before a run listens to them itself: the process ends at once, with the exit code for it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from farthing.errors import EXIT_INTERRUPTED


@contextlib.contextmanager
def ready_to_leave(leave: Callable[[int, Any], None]) -> Iterator[None]:
    """Within the block each signal that asks the process to leave calls `leave(number, frame)`."""
    from farthing.durability.preemption import heeded

    before = {number: signal.signal(number, leave) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_before_the_start(number: int, frame: Any) -> None:
    """The handler of such a signal: says so and ends the process."""
    os.write(2, b"farthing: asked to leave before the run had begun; run the same command to start it\n")
    os._exit(EXIT_INTERRUPTED)
