"""The caps of a run: dollars, hours and a deadline that hold across attempts.

What was spent is the ledger's: seconds of a monotonic clock, added up over attempts, so that
setting the machine's clock neither ends a run nor lets it go on. A deadline is a time of day: the
clock is asked once, when an attempt begins, and seconds are counted from there. Refuses to look at
a clock itself.
"""

from __future__ import annotations

import math
from pathlib import Path

from farthing.config.job import Job
from farthing.run.exported import damage_of
from farthing.run.folder import MODEL, is_finished
from farthing.run.ledger import Ledger
from farthing.run.opening import Opened
from farthing.units import say_seconds, say_usd

# what took longer was a download or a wait; another start is not expected to take it again
LONGEST_START_S = 600.0


def over_limit(job: Job, ledger: Ledger, reserve_s: float) -> str | None:
    """Why the run has to stop now, if `reserve_s` more seconds would pass one of its limits; else
    None.
    """
    limits = job.limits
    if limits.max_usd is not None:
        spent = ledger.spent_usd + reserve_s / 3600 * job.usd_per_hour
        if spent > limits.max_usd or (ledger.spent_usd >= limits.max_usd > 0):
            return f"the cap of {say_usd(limits.max_usd)}: {say_usd(ledger.spent_usd)} are spent"
    most_hours = limits.most_hours()
    if most_hours is not None and ledger.spent_s + reserve_s > most_hours * 3600:
        return (
            f"the cap of {say_seconds(most_hours * 3600)}: {say_seconds(ledger.spent_s)} are spent"
        )
    if limits.deadline is not None and ledger.now + reserve_s > limits.deadline.timestamp():
        return f"the deadline {limits.deadline.isoformat(sep=' ', timespec='minutes')}"
    return None


def seconds_left(job: Job, ledger: Ledger) -> float:
    """Seconds until the first limit; infinite where none binds."""
    limits, left = job.limits, [math.inf]
    if limits.max_usd is not None and job.usd_per_hour > 0:
        left.append((limits.max_usd - ledger.spent_usd) / job.usd_per_hour * 3600)
    most_hours = limits.most_hours()
    if most_hours is not None:
        left.append(most_hours * 3600 - ledger.spent_s)
    if limits.deadline is not None:
        left.append(limits.deadline.timestamp() - ledger.now)
    return max(0.0, min(left))


def why_not_start(job: Job, folder: Path, ledger: Ledger) -> str | None:
    """Why another attempt is not worth its start; None where it is, or where it has yet to write a
    model.

    A run that has a whole model starts again only where what is left pays for the start. One that
    has a checkpoint and no model is let in even at its cap: it writes the model and leaves.
    """
    if (folder / MODEL).is_dir():
        reason = over_limit(job, ledger, ledger.takes.get("start_s", 0.0))
        if reason is None or damage_of(folder) is None:
            return reason
    return over_limit(job, ledger, 0.0) if ledger.committed_step <= 0 else None


def stopped_before_start(job: Job, attempt: Opened) -> str | None:
    """Why the run's limits leave no room for an attempt, found before anything slow is imported.

    It is on the ledger, unless the attempt before it has ended for the same reason.
    """
    ledger = attempt.ledger
    if not ledger.past or is_finished(attempt.folder):
        return None
    reason = why_not_start(job, attempt.folder, ledger)
    if reason is not None:
        if ledger.past[-1].state == "limit":
            ledger.withdraw()
        else:
            ledger.end("limit")
    return reason
