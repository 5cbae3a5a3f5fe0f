"""A run as it goes, from its files: how far it is, what it will cost, and what `watch` shows of it.

Read from another terminal or machine: nothing is asked of the run, so it is never slowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from farthing.printable import printable
from farthing.report.receipt_types import RunReceipt
from farthing.report.words import lines

SILENT_S = 60.0  # a running attempt writes every second; one in a store is told of once a minute
FIRST_LINE_S, LAST_LINE_S = 10.0, 300.0  # between lines of a log, ever more seldom
_ENDED = ("finished", "limit", "interrupted", "failed")


@dataclass(frozen=True)
class LiveProgress:
    state: str  # running, silent (its last sign of life is long ago), or as its last attempt ended
    silent_s: float
    step: int
    n_steps: int | None
    step_s: float | None  # of the present attempt, evaluations and saves counted in
    left_s: tuple[float, ...] | None  # (least, likely, most) seconds until the last step
    left_usd: tuple[float, ...] | None
    total_usd: float | None  # what the whole run is likely to cost

    @property
    def is_over(self) -> bool:
        return self.state in _ENDED


def progress_of(receipt: RunReceipt, now: float, *, silent_s: float = SILENT_S) -> LiveProgress:
    """How far the run of a receipt is at `now`, in seconds since 1970."""
    quiet_s = max(0.0, now - receipt.seen_at) if receipt.seen_at else 0.0
    state = receipt.state
    if state not in _ENDED:
        state = "running" if quiet_s <= silent_s else "silent"
    step = max(receipt.steps, receipt.attempts[-1]["last_step"] if receipt.attempts else 0)
    n_steps = int((receipt.work or {}).get("n_steps", 0)) or None
    pace = _step_s(receipt)
    left_s = left_usd = total_usd = None
    if pace and n_steps is not None and state in ("running", "silent"):
        left_s = tuple(max(0, n_steps - step) * each for each in pace)
        price = receipt.attempts[-1]["usd_per_hour"] / 3600
        if receipt.usd_is_known:
            left_usd = tuple(each * price for each in left_s)
            total_usd = receipt.usd + left_usd[1]
    step_s = pace[1] if pace else None
    return LiveProgress(state, quiet_s, step, n_steps, step_s, left_s, left_usd, total_usd)


def _step_s(receipt: RunReceipt) -> tuple[float, float, float] | None:
    """Seconds of a step of the newest attempt: in quick stretches, the mean, in slow ones."""
    if not receipt.attempts:
        return None
    begin_s = receipt.wall_s - receipt.attempts[-1]["wall_s"]
    before = receipt.attempts[-1]["first_step"]
    found: list[tuple[float, int]] = []
    for column in receipt.timeline.columns:
        if column.end_s > begin_s + 1e-6 and column.step > before:
            seconds = column.end_s - column.begin_s - column.seconds.get("start-up", 0.0)
            found.append((seconds, column.step - before))
            before = column.step
    if not found:
        return None
    mean = sum(seconds for seconds, _ in found) / sum(n for _, n in found)
    each = sorted(seconds / n for seconds, n in found)
    if len(each) < 4:
        return 0.8 * mean, mean, 1.3 * mean
    return min(mean, each[len(each) // 10]), mean, max(mean, each[-1 - len(each) // 10])


class Watcher:
    """On a terminal a picture that changes in place, in a log a line now and then."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live = Live(console=console, auto_refresh=False)
        self._next_at, self._wait_s, self._said = clock(), FIRST_LINE_S, ""

    def show(self, receipt: RunReceipt, progress: LiveProgress, *, is_last: bool = False) -> None:
        """One look. A log shows it when a line is due, the state is new, or it `is_last`."""
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


def line_of(receipt: RunReceipt, progress: LiveProgress) -> str:
    return " · ".join(lines("live.txt", "look", receipt, progress))


def lines_of(receipt: RunReceipt, progress: LiveProgress) -> list[str]:
    return lines("live.txt", "picture", receipt, progress)
