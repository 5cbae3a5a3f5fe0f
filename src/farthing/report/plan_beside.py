"""What stands beside the best of a plan: what is sooner, spot or not, two cheap GPUs or a dear one.
Views with their words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from farthing.planner.ownership import saving
from farthing.planner.types import OLD_PRICE_DAYS
from farthing.report.plan_words import RENTED, has_price, say_cost, say_saving
from farthing.storage.files import Json
from farthing.units import say_seconds

UNTRIED = "farthing was not run on several real GPUs so far"
UNTRIED_ALONE = "weights in main memory were not tried with a real GPU so far"
_DEARER = 2.0  # what being sooner may cost
Row = Mapping[str, Any]


def sooner(best: Any, rows: Sequence[Row]) -> Json | None:
    """The soonest that costs at most twice as much as the best, when it is at least a quarter
    sooner.
    """
    if best is None:
        return None
    most = _DEARER * best["total_usd"] if has_price(best) else math.inf
    can = [row for row in rows if has_price(row) and row["total_usd"] <= most]
    row = min(can, key=lambda row: (row["wall_s"], row["total_usd"], row["rank"]), default=None)
    if row is None or row["wall_s"] > best["wall_s"] * 0.75:
        return None
    more = (
        f", {row['total_usd'] / best['total_usd'] - 1:+.0%} dollars"
        if has_price(best) and best["total_usd"]
        else ""
    )
    return {
        "rank": row["rank"],
        "words": f"{_said(row)}: {best['wall_s'] / row['wall_s']:.1f} x as fast{more}",
    }


def spot_or_not(rows: Sequence[Row]) -> Json | None:
    """The best on spot against the best on demand."""
    demand, spot = (next((row for row in rows if row["kind"] == kind), None) for kind in RENTED)
    if demand is None or spot is None:
        return None
    return {
        "spot_rank": spot["rank"],
        "on_demand_rank": demand["rank"],
        **_against(spot, demand, "spot"),
    }


def two_or_one(rows: Sequence[Row]) -> Json | None:
    """The best on two GPUs against the best on one that costs more an hour than each of them: on
    demand, at prices that can be had where there are such."""
    rented = [row for row in rows if row["kind"] == "on-demand"]
    rented.sort(key=lambda row: bool(row["price_is"]) or row["price_age_days"] > OLD_PRICE_DAYS)
    two = next((row for row in rented if row["n_gpus"] == 2), None)
    least = math.inf if two is None else two["usd_per_gpu_hour"]
    one = next(
        (row for row in rented if row["n_gpus"] == 1 and row["usd_per_gpu_hour"] > least), None
    )
    if two is None or one is None:
        return None
    found = _against(two, one, "two")
    return {
        "two_rank": two["rank"],
        "one_rank": one["rank"],
        **found,
        "words": f"{found['words']}; {UNTRIED}",
    }


def _against(row: Row, other: Row, name: str) -> Json:
    """What a choice saves against another, and the words for it."""
    saved = saving(row["total_usd"], other["total_usd"])
    words = f"{_said(row)}; {_said(other)}: {name} {say_saving(saved)}"
    return {"saved_usd": saved.usd, "saved_share": saved.share, "words": words}


def _said(row: Row) -> str:
    """`1x L4 spot at GCP $0.40 in 3 h 10 min`."""
    return f"{row['name']} {say_cost(row['total_usd'])} in {say_seconds(row['wall_s'])}"
