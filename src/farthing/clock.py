"""What moment and day it is. `FARTHING_TODAY` (an ISO date) says another day, for tests of what
depends on it.
"""

from __future__ import annotations

import os
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
