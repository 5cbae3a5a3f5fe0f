"""Has someone asked us to leave? A signal only sets a flag; the loop looks at it after every micro-batch.

A second signal ends the process at once: whatever was committed before stays valid.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from farthing.errors import EXIT_INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Notice:
    """Context that watches for signals. `reason` is None until one has come."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Notice:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.reason is not None

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            os.write(2, b"\nsecond signal: leaving at once; the last committed checkpoint is whole\n")
            os._exit(EXIT_INTERRUPTED)
        self.reason = signal.Signals(number).name
