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
from farthing.report.plan_words import sparkline
from farthing.report.receipt_types import Receipt
from farthing.units import plural, say_bytes, say_count, say_seconds, say_usd

FIRST_LINE_S, LAST_LINE_S = 10.0, 300.0
"""In a log the lines come ever more seldom, from every 10 s to every 5 min."""


class Watcher:
    """Shows looks at a run, one after the other."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live: Live | None = None
        self._next_at, self._wait_s, self._said = clock(), FIRST_LINE_S, ""

    def show(self, receipt: Receipt, progress: Progress, *, is_last: bool = False) -> None:
        """One look. In a log it is shown where a line is due, the state has changed, or it
        `is_last`.
        """
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            picture = Group(
                *(Text(printable(line), overflow="fold") for line in lines_of(receipt, progress))
            )
            self._live.update(picture, refresh=True)
            return
        if is_last or progress.state != self._said or self._clock() >= self._next_at:
            self._said = progress.state
            self._console.print(Text(printable(line_of(receipt, progress))), soft_wrap=True)
            self._next_at = self._clock() + self._wait_s
            self._wait_s = min(LAST_LINE_S, 1.5 * self._wait_s)

    def close(self) -> None:
        """Leave the last picture as it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def line_of(receipt: Receipt, progress: Progress) -> str:
    """A look on one line."""
    words = [_state(progress), _steps(progress)]
    if receipt.final_loss is not None:
        words.append(f"loss {receipt.final_loss:.4f}")
    if receipt.usd_is_known:
        words.append(f"{say_usd(receipt.usd)} so far")
    words.append(_forecast(progress))
    if receipt.diagnosis and receipt.diagnosis.largest:
        words.append(f"held back by: {receipt.diagnosis.largest}")
    return " · ".join(word for word in words if word)


def lines_of(receipt: Receipt, progress: Progress) -> list[str]:
    """A look as a picture."""
    found = [f"{receipt.run}: {_state(progress)}", _bar(progress), _forecast(progress)]
    losses = [y for _, y in receipt.curves.loss]
    if len(losses) > 1:
        found.append(
            f"loss     {sparkline(losses)}  {losses[0]:.4f} to"
            f" {receipt.final_loss or losses[-1]:.4f}"
        )
    if receipt.curves.evaluation and "loss" in receipt.curves.evaluation[-1]:
        values = [row["loss"] for row in receipt.curves.evaluation if "loss" in row][-60:]
        best = f", best after step {receipt.best_step:,}" if receipt.best_step is not None else ""
        found.append(f"eval     {sparkline(values)}  {values[-1]:.4f}{best}")
    price = f"{say_usd(receipt.usd)} so far, " if receipt.usd_is_known else ""
    found.append(
        f"bill     {price}{say_seconds(receipt.wall_s)},"
        f" {plural(receipt.interruptions, 'interruption')}"
    )
    speed = []
    if receipt.tokens_per_s:
        speed.append(f"{say_count(receipt.tokens_per_s)} useful tokens/s")
    if receipt.mfu:
        speed.append(f"MFU {receipt.mfu:.0%}")
    if busy := receipt.curves.utilisation_percent:
        speed.append(f"busy {busy[-1][1]:.0f}%")
    if receipt.peak_bytes:
        speed.append(f"peak {say_bytes(receipt.peak_bytes)}")
    found.append(f"device   {', '.join(speed)}" if speed else "")
    found += [f"notice   {notice['what']}" for notice in receipt.notices[-3:]]
    for finding in receipt.diagnosis.findings if receipt.diagnosis else ():
        rest = (
            f"; {say_usd(finding.rest_usd)} of the rest"
            if finding.rest_usd and receipt.usd_is_known
            else ""
        )
        found.append(f"{finding.area:<8} {finding.cause}: {finding.evidence}{rest}")
    return [line for line in found if line]


def _state(progress: Progress) -> str:
    if progress.state == "silent":
        return f"no sign of life for {say_seconds(progress.silent_s)}"
    return {"limit": "stopped at a limit"}.get(progress.state, progress.state)


def _steps(progress: Progress) -> str:
    return f"step {progress.step:,}" + (f"/{progress.n_steps:,}" if progress.n_steps else "")


def _bar(progress: Progress) -> str:
    share = progress.step / progress.n_steps if progress.n_steps else 0.0
    n = round(30 * min(1.0, share))
    return f"{'█' * n}{'░' * (30 - n)} {_steps(progress)}" + (
        f" ({share:.0%})" if progress.n_steps else ""
    )


def _forecast(progress: Progress) -> str:
    if progress.left_s is None:
        return ""
    low, likely, high = progress.left_s
    words = f"{say_seconds(likely)} to go ({say_seconds(low)} to {say_seconds(high)})"
    if progress.left_usd is not None and progress.total_usd is not None:
        words += f", {say_usd(progress.left_usd[1])} more: {say_usd(progress.total_usd)} in all"
    return words
