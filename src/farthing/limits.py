"""The caps of a run: dollars, hours and a deadline that hold across attempts."""

from __future__ import annotations

import time

from farthing.job import Job
from farthing.meter import Ledger
from farthing.units import say_seconds, say_usd


def over_limit(job: Job, ledger: Ledger, reserve_s: float) -> str | None:
    """Why the run has to stop now, if `reserve_s` more seconds would pass one of its limits; else None."""
    limits = job.limits
    if limits.max_usd is not None:
        spent = ledger.spent_usd + reserve_s / 3600 * job.usd_per_hour
        if spent > limits.max_usd or (ledger.spent_usd >= limits.max_usd > 0):
            return f"the cap of {say_usd(limits.max_usd)}: {say_usd(ledger.spent_usd)} are spent"
    if limits.max_hours is not None and ledger.spent_s + reserve_s > limits.max_hours * 3600:
        return f"the cap of {say_seconds(limits.max_hours * 3600)}: {say_seconds(ledger.spent_s)} are spent"
    if limits.deadline is not None and time.time() + reserve_s > limits.deadline.timestamp():
        return f"the deadline {limits.deadline.isoformat(sep=' ', timespec='minutes')}"
    return None
