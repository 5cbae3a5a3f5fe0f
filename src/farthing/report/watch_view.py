"""What `farthing watch` shows: on a terminal a picture that changes in place, in a log a line now
and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from farthing.printable import printable
from farthing.report.live import Progress
from farthing.report.receipt_types import Receipt
from farthing.report.words import lines

FIRST_LINE_S, LAST_LINE_S = 10.0, 300.0
"""In a log the lines come ever more seldom, from every 10 s to every 5 min."""


class Watcher:
    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live = Live(console=console, auto_refresh=False)
        self._next_at, self._wait_s, self._said = clock(), FIRST_LINE_S, ""

    def show(self, receipt: Receipt, progress: Progress, *, is_last: bool = False) -> None:
        """One look. In a log it is shown where a line is due, the state has changed, or it
        `is_last`.
        """
        if self._console.is_terminal:
            picture = lines_of(receipt, progress)
            self._live.start()
            shown = (Text(printable(line), overflow="fold") for line in picture)
            self._live.update(Group(*shown), refresh=True)
        elif is_last or progress.state != self._said or self._clock() >= self._next_at:
            self._said = progress.state
            self._console.print(Text(printable(line_of(receipt, progress))), soft_wrap=True)
            self._next_at = self._clock() + self._wait_s
            self._wait_s = min(LAST_LINE_S, 1.5 * self._wait_s)

    def close(self) -> None:
        self._live.stop()


def line_of(receipt: Receipt, progress: Progress) -> str:
    return " · ".join(lines("live.txt", "look", receipt, progress))


def lines_of(receipt: Receipt, progress: Progress) -> list[str]:
    return lines("live.txt", "picture", receipt, progress)
