"""How dollars, times and machines of a plan read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from farthing.units import say_seconds, say_usd

if TYPE_CHECKING:
    from farthing.planner.ownership import Saving
    from farthing.report.plan_types import Choice


def say_cost(usd: float | None) -> str:
    """`$0.78`, `$12.30`, `$1,234`: as many digits as an estimate deserves."""
    if usd is None:
        return say_usd(usd)
    if 0 < abs(usd) < 0.1:
        return f"${usd:.{min(6, 1 - math.floor(math.log10(abs(usd))))}f}"
    return f"${usd:,.2f}" if abs(usd) < 1000 else f"${usd:,.0f}"


def cost_range(one: Choice) -> str:
    """`$0.40 (0.31 to 0.52)`."""
    low, likely, high = (say_cost(usd) for usd in one.usd_range)
    ends = f"{low.removeprefix('$')} to {high.removeprefix('$')}"
    return f"{likely} ({ends})" if one.is_priced else "no price is given"


def said(one: Choice) -> str:
    """`1x L4 spot at GCP $0.40 in 27 min`."""
    return f"{one.name} {say_cost(one.total_usd)} in {say_seconds(one.wall_s)}"


def time_range(one: Choice) -> str:
    """`27 min (19 min to 36 min)`."""
    low, likely, high = (say_seconds(hours * 3600) for hours in one.hours_range)
    return f"{likely} ({low} to {high})"


def say_saving(saved: Saving) -> str:
    """`45 % less`."""
    if saved.share is None:
        return f"{say_cost(-saved.usd)} more" if saved.usd else "costs the same"
    if abs(saved.share) < 0.005:
        return "costs the same"
    return f"{abs(saved.share) * 100:.0f} % {'less' if saved.usd > 0 else 'more'}"


def say_short(seconds: float) -> str:
    """`1 min 20 s`, `81.3 ms`."""
    return say_seconds(seconds) if seconds >= 1 else f"{seconds * 1000:,.1f} ms"


def span(low_s: float, high_s: float) -> str:
    """`27 s`, `19-36 min`, `1.3-12 h`: one unit for both ends, that of the later one."""
    units = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
    unit, size = next((each for each in units if high_s >= 2 * each[1]), ("s", 1.0))
    ends = (low_s / size, high_s / size)
    low, high = (f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" for value in ends)
    return f"{high} {unit}" if low == high else f"{low}-{high} {unit}"
