"""What day it is. `FARTHING_TODAY` (an ISO date) says another day, for tests of what depends on it."""

from __future__ import annotations

import os
from datetime import date


def today() -> date:
    """The machine's date, or that of `FARTHING_TODAY`."""
    said = os.environ.get("FARTHING_TODAY")
    return date.fromisoformat(said) if said else date.today()
