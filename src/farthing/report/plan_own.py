"""Beside renting: machines of one's own, when they pay back, and what a project comes to in a year."""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farthing.planner.ownership import (
    Owned,
    Way,
    break_even_hours,
    break_even_months,
    own_way,
    run_on_own,
    saving,
    yearly_usd,
)
from farthing.prices.offers import HOURS_PER_MONTH
from farthing.report.plan_services import fees, services
from farthing.report.plan_words import OWN, RENTED, say_cost
from farthing.storage.files import Json
from farthing.units import say_seconds

if TYPE_CHECKING:
    from farthing.planner.inputs import Study

Row = Mapping[str, Any]
_SAID = (
    "price_usd",
    "power_kw",
    "usd_per_kwh",
    "running_usd_per_h",
    "wear_usd_per_h",
    "hours_per_month",
)
"""What is told of an owned machine as `Owned` has it."""


def own_machine(
    owned: Owned, rows: Sequence[Row], study: Study, runs_per_month: float | None
) -> Json:
    """A machine of one's own: what this run costs on it, and when buying it pays back."""
    which = (owned.gpu, owned.n_gpus)
    alike = [row for row in rows if (row["gpu"], row["n_gpus"]) == which]
    row = next((row for row in alike if row["kind"] == "own"), None)
    found: Json = {
        "name": f"{owned.n_gpus}x {owned.gpu}",
        **{name: getattr(owned, name) for name in _SAID},
    }
    if row is None:
        offered = [one for one in study.answer.rejected if one.offer.provider == OWN]
        why = next((one for one in offered if (one.offer.gpu, one.offer.n_gpus) == which), None)
        words = f"{why.reason}; {why.change}" if why else "not among the offers"
        return found | {
            "rank": None,
            "hours": None,
            "usd": None,
            "total_usd": None,
            "against": [],
            "words": words,
        }
    usd = {name: value for name, value in run_on_own(owned, row["hours"]).items() if value}
    against: list[Json] = []
    hours_per_month = runs_per_month * row["hours"] if runs_per_month else owned.hours_per_month
    on_demand = (row for row in alike if row["kind"] == "on-demand")
    equal = min(on_demand, key=lambda row: (row["usd_per_hour"], row["provider"]), default=None)
    rented = next((row for row in rows if row["kind"] in RENTED), None)
    for is_equal, other in ((True, equal), (False, rented)):
        if other is None or any(other["rank"] == one["rank"] for one in against):
            continue
        # against other GPUs: what the rent for the work of an own hour comes to
        per_hour = float(other["usd_per_hour"] if is_equal else other["total_usd"] / row["hours"])
        against.append(
            _against(
                owned,
                other["name"],
                per_hour,
                min(hours_per_month, HOURS_PER_MONTH),
                other["rank"],
                is_equal,
            )
        )
    for name, fee_usd in fees(services(study)).items() if runs_per_month else ():
        against.append(_against(owned, name, fee_usd / row["hours"], hours_per_month))
    total_usd = sum(usd.values())
    words = f"{say_cost(total_usd)} and {say_seconds(row['wall_s'])} for this run"
    cost = {"rank": row["rank"], "hours": row["hours"], "usd": usd, "total_usd": total_usd}
    return found | cost | {"against": against, "words": words}


def _against(
    owned: Owned,
    name: str,
    usd_per_hour: float,
    hours_per_month: float,
    rank: int | None = None,
    is_equal: bool = False,
) -> Json:
    """When an owned machine pays back against what `usd_per_hour` buys elsewhere of the work of its
    hour.
    """
    return {
        "rank": rank,
        "name": name,
        "is_equal": is_equal,
        "usd_per_own_hour": usd_per_hour,
        "break_even_hours": break_even_hours(owned, usd_per_hour),
        "break_even_months": break_even_months(
            owned, rent_usd_per_h=usd_per_hour, hours_per_month=hours_per_month
        ),
        "hours_per_month": hours_per_month,
    }


def years_of(rows: Sequence[Row], view: Row, study: Study, runs_per_month: float) -> Json:
    """What a project of so many runs a month comes to, in a year and in three."""
    ways: dict[str, Way] = {}
    notes: list[str] = []
    for kind in RENTED:
        if row := next((row for row in rows if row["kind"] == kind), None):
            ways[f"rent {row['name']}"] = Way(row["total_usd"])
    for owned, found in zip(study.own, view["own"], strict=True):
        if found["hours"] is None:
            continue
        name = f"{'buy' if owned.price_usd else 'own'} {found['name']}"
        ways[name] = own_way(owned, found["hours"])
        busy = found["hours"] * runs_per_month
        if busy > HOURS_PER_MONTH:
            notes.append(f"{name}: {busy:,.0f} hours a month are more than one machine has")
    ways |= {name: Way(fee_usd) for name, fee_usd in fees(view["managed"]).items()}
    yearly = yearly_usd(ways, runs_per_month)
    dearest = max(yearly.values(), default=0.0)
    return {
        "runs_per_month": runs_per_month,
        "saved_in_a_year": {name: saving(usd, dearest)._asdict() for name, usd in yearly.items()},
        "one_year_usd": yearly,
        "three_years_usd": yearly_usd(ways, runs_per_month, 3),
        "notes": notes,
    }
