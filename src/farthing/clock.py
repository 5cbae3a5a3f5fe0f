"""What moment and day it is. `FARTHING_TODAY` (an ISO date) says another day, for tests of what
depends on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import date, datetime


def now() -> datetime:
    """The moment in this machine's time zone, on the day of `FARTHING_TODAY` where that is set."""
    said, moment = os.environ.get("FARTHING_TODAY"), datetime.now()
    return (
        datetime.combine(date.fromisoformat(said), moment.time()) if said else moment
    ).astimezone()


def today() -> date:
    """The day of `now`."""
    return now().date()


def seconds_since_boot() -> float:
    """Seconds that no change of the clock moves, and that pass while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def steady_clock(
    wall: Callable[[], float] = time.time, since_boot: Callable[[], float] = seconds_since_boot
) -> Callable[[], float]:
    """Of the time of day, from the `wall` clock as it is now, wherever that is set later."""
    boot_at = wall() - since_boot()
    return lambda: boot_at + since_boot()
