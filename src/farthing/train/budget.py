"""The caps of a run: dollars, hours and a deadline that hold across attempts.

What was spent is the ledger's: seconds of a monotonic clock, added up over attempts, so that
setting the machine's clock neither ends a run nor prolongs it. A deadline is a time of day: the
clock is asked once, when an attempt begins, and seconds are counted from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from farthing.config.job import Job
from farthing.errors import InputError
from farthing.run.accounts import Account
from farthing.run.exported import damage_of
from farthing.run.folder import MODEL, RUN, is_finished
from farthing.run.guard import tell
from farthing.run.ledger import Ledger
from farthing.units import say_seconds, say_usd

LEAST_START_S = 5.0  # imports, and reading a small model
# what took longer was a download or a wait; another start is not expected to take it again
LONGEST_START_S = 600.0
LONGEST_ONLY_WRITES_S = 60.0


class Left(NamedTuple):
    seconds: float  # until it is reached; below zero once it was passed
    limit: str
    spent: str = ""
    is_time_of_day: bool = False  # suspended time counts

    @property
    def why(self) -> str:
        """The limit, and how much of it is used up."""
        return f"{self.limit}: {self.spent} are spent" if self.spent else self.limit


@dataclass(frozen=True)
class RunLimits:
    """The limits of a job, against what its run has spent so far."""

    job: Job
    ledger: Ledger

    def left(self) -> list[Left]:
        ledger = self.ledger
        spent = ledger.spent_usd, ledger.spent_s, ledger.spent_gpu_s
        return _left(self.job, *spent, ledger.mine.n_gpus, ledger.now)

    @property
    def left_s(self) -> float:
        """Seconds until the first limit; infinite where none binds."""
        return max(0.0, min((each.seconds for each in self.left()), default=math.inf))

    def over(self, reserve_s: float = 0.0) -> str | None:
        """Why the run has to stop now, if `reserve_s` more seconds would pass one of its limits."""
        most_s = max(0.0, reserve_s)
        return next((each.why for each in self.left() if each.seconds <= most_s), None)

    def tell_guard(self) -> None:
        """Tell the guard how many seconds are left, by each of its clocks."""
        left = [each._replace(seconds=each.seconds + self.allowance_s) for each in self.left()]
        tell(
            left_s=min((each.seconds for each in left if not each.is_time_of_day), default=None),
            deadline_s=min((each.seconds for each in left if each.is_time_of_day), default=None),
            why=min(left).limit if left else "",
        )

    @cached_property
    def allowance_s(self) -> float:
        """Seconds past the limits that an attempt may take which only writes the model: as long as
        a start took before, and a minute. As it is when the attempt begins.
        """
        if self.over() is None or self.why_not_start() is not None:
            return 0.0
        return LONGEST_ONLY_WRITES_S + self.ledger.takes.get("start_s", 0.0)

    def why_not_start(self) -> str | None:
        """Why another attempt is not worth its start; None where it is, or where it has yet to
        write a model.

        A run that has a whole model starts again only where what is left pays for the start. One
        that has a checkpoint and no model is let in even at its cap: it writes the model and
        leaves.
        """
        folder = Path(self.job.output_dir)
        if (folder / MODEL).is_dir():
            reason = self.over(self.ledger.takes.get("start_s", 0.0))
            if reason is None or damage_of(folder) is None:
                return reason
        return self.over() if self.ledger.committed_step <= 0 else None

    def stopped_before_start(self) -> str | None:
        """Why there is no room for an attempt, found before anything slow is imported.

        It is on the ledger, unless the attempt before it has ended for the same reason.
        """
        ledger = self.ledger
        if not ledger.past or is_finished(Path(self.job.output_dir)):
            return None
        reason = self.why_not_start()
        if reason is not None:
            if ledger.past[-1].state == "limit":
                ledger.withdraw()
            else:
                ledger.end("limit")
        return reason


def _left(
    job: Job, spent_usd: float, spent_s: float, spent_gpu_s: float, n_gpus: int, now: float
) -> list[Left]:
    limits, found = job.limits, list[Left]()
    if limits.max_usd is not None and job.usd_per_hour > 0:
        seconds = (limits.max_usd - spent_usd) / job.usd_per_hour * 3600
        found.append(Left(seconds, f"the cap of {say_usd(limits.max_usd)}", say_usd(spent_usd)))
    if limits.max_hours is not None:
        most_s = limits.max_hours * 3600
        cap = f"the cap of {say_seconds(most_s)}"
        found.append(Left(most_s - spent_s, cap, say_seconds(spent_s)))
    if limits.max_gpu_hours is not None:
        seconds = (limits.max_gpu_hours * 3600 - spent_gpu_s) / n_gpus
        cap, spent = (
            f"{hours:.4g} GPU-hours" for hours in (limits.max_gpu_hours, spent_gpu_s / 3600)
        )
        found.append(Left(seconds, f"the cap of {cap}", spent))
    if limits.deadline is not None:
        moment = limits.deadline.isoformat(sep=" ", timespec="minutes")
        seconds = limits.deadline.timestamp() - now
        found.append(Left(seconds, f"the deadline {moment}", is_time_of_day=True))
    return found


def refuse_cap_without_price(job: Job) -> None:
    """A cap in dollars that no second counts against is no cap. Raises `InputError`."""
    if job.limits.max_usd is not None and job.usd_per_hour == 0:
        raise InputError(
            "a cap in dollars never fires at $0 an hour",
            where="limits.max_usd",
            to_do="set where.usd_per_hour (`farthing plan` lists offers), or where.power_watts and"
            " usd_per_kwh for a machine of yours, or take limits.max_hours instead",
        )


def refuse_start(job: Job) -> None:
    """Refuse a cap that holds nothing, and a new run whose time is over. Raises `InputError`."""
    refuse_cap_without_price(job)
    if not (Path(job.output_dir) / RUN).exists() and job.output_store is None:
        refuse_limits(job, least_s=0.0)


def refuse_limits(
    job: Job, accounts: Sequence[Account] = (), least_s: float = LEAST_START_S
) -> None:
    """Refuse limits that leave no time for a start, which takes `least_s`, after the attempts of
    `accounts`. Raises `InputError`."""
    refuse_cap_without_price(job)
    usd = sum(each.usd for each in accounts)
    wall_s, gpu_s = sum(each.wall_s for each in accounts), sum(each.gpu_s for each in accounts)
    for each in _left(job, usd, wall_s, gpu_s, 1, time.time()):
        if each.seconds <= least_s:
            raise InputError(
                f"{each.why} leaves {say_seconds(max(0.0, each.seconds))}, and a start takes"
                f" {say_seconds(LEAST_START_S)} at least",
                where="limits",
                to_do="raise it",
            )


def say_what_bills_on(job: Job) -> list[str]:
    """What still costs money when the run has stopped, and what stops that."""
    lines = []
    if job.where.usd_per_hour:
        price = say_usd(job.where.usd_per_hour)
        lines.append(f"this machine costs {price} an hour until you end it, also after the run")
    elif job.usd_per_hour:
        lines.append("this machine draws power until you switch it off, also after the run")
    if job.output_store is not None:
        lines.append(f"what is stored in {job.output_store} is billed until you delete it")
    if job.when_done:
        lines.append(f"when the run has ended, this command runs once: {job.when_done}")
    elif job.where.usd_per_hour:
        lines.append("`when_done: COMMAND` in the job runs a command of yours then")
    return lines
