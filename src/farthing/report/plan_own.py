"""Beside renting: services that train for a fee, machines of one's own, and what a project comes to in a year."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from farthing.planner.managed import bills, say_size
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
from farthing.prices.offers import HOURS_PER_MONTH, Offer
from farthing.units import say_seconds

if TYPE_CHECKING:
    from farthing.planner.inputs import Study
from farthing.report.plan_types import Against, OwnView, YearsView
from farthing.report.plan_words import OWN, say_cost

RENTED = ("on-demand", "spot")


def best_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The first; a machine without a price only where there is nothing else."""
    return rows[0] if rows else None


def services(study: Study) -> list[dict[str, Any]]:
    """Services that train for a fee, and whether they take this model: those that are known, then those of a price file."""
    job, wanted = study.job, study.wanted
    known = bills(wanted, job.task, job.model.model_name_or_path, job.max_length, study.today)
    return [
        {
            "provider": bill.service.provider,
            "what": bill.service.model or say_size(bill.service),
            "usd": bill.usd,
            "usd_high": bill.usd_high,
            "usd_unpacked": bill.usd_unpacked,
            "n_tokens": bill.n_tokens,
            "unit": "million_tokens",
            "usd_per_unit": bill.service.usd,
            "you_get": bill.service.you_get,
            "afterwards": bill.service.afterwards,
            "ends": bill.service.ends.isoformat() if bill.service.ends else None,
            "price_source": bill.service.source,
            "price_date": bill.service.date.isoformat(),
            "takes_the_model": bill.service.method != "closed",
        }
        for bill in known
    ] + [
        {
            "provider": offer.provider,
            "what": offer.instance,
            "usd": usd,
            "unit": offer.unit,
            "usd_per_unit": offer.usd,
            "price_source": offer.source,
            "price_date": offer.date.isoformat(),
            "takes_the_model": _takes(offer, study),
        }
        for offer, usd in study.answer.managed
    ]


def fees(managed: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Dollars of a run at services that take the model: all of a price file's, and the cheapest of those that are known."""
    taking = [one for one in managed if one["takes_the_model"]]
    known = sorted((one for one in taking if "you_get" in one), key=lambda one: float(one["usd"]))[:1]
    of_file = [one for one in taking if "you_get" not in one]
    return {f"{one['provider']}, {one['what']}": float(one["usd"]) for one in (*of_file, *known)}


def _takes(offer: Offer, study: Study) -> bool:
    """Whether the service names this model, or a range of sizes and a method that it is in."""
    if offer.unit == "run":
        return True
    billions = study.wanted.shape.n_parameters / 1e9
    size = re.search(r"(?:up to (\d+)B)|(?:(\d+)B to (\d+)B)", offer.instance)
    if size:
        low, high = (0.0, float(size[1])) if size[1] else (float(size[2]), float(size[3]))
        is_lora = "lora" in offer.instance.lower()
        return low * 0.97 <= billions < (high + 1) and is_lora == (study.wanted.method != "full")
    name = study.job.model.model_name_or_path.rpartition("/")[2].lower()
    return offer.instance.lower().removesuffix(" hosted") == name


def own_machine(
    owned: Owned, rows: Sequence[Mapping[str, Any]], best: Any, study: Study, runs_per_month: float | None
) -> OwnView:
    """A machine of one's own: what this run costs on it, and when buying it pays back."""
    mine = [row for row in rows if row["kind"] == "own" and (row["gpu"], row["n_gpus"]) == (owned.gpu, owned.n_gpus)]
    found = OwnView(
        f"{owned.n_gpus}x {owned.gpu}", owned.price_usd, owned.power_kw, owned.usd_per_kwh, owned.running_usd_per_h,
        owned.wear_usd_per_h, owned.hours_per_month,
    )  # fmt: skip
    if not mine:
        why = [
            one
            for one in study.answer.rejected
            if one.offer.provider == OWN and (one.offer.gpu, one.offer.n_gpus) == (owned.gpu, owned.n_gpus)
        ]
        return replace(found, words=f"{why[0].reason}; {why[0].change}" if why else "not among the offers")
    row = mine[0]
    usd = {name: value for name, value in run_on_own(owned, row["hours"]).items() if value}
    against: list[Against] = []
    hours_per_month = runs_per_month * row["hours"] if runs_per_month else owned.hours_per_month
    equal = min(
        (r for r in rows if r["kind"] == "on-demand" and (r["gpu"], r["n_gpus"]) == (owned.gpu, owned.n_gpus)),
        key=lambda r: (r["usd_per_hour"], r["provider"]),
        default=None,
    )
    rented = best_of([r for r in rows if r["kind"] in RENTED])
    for is_equal, other in ((True, equal), (False, rented)):
        if other is None or any(other["rank"] == one.rank for one in against):
            continue
        # against other GPUs: what the rent for the work of an own hour comes to
        per_hour = float(other["usd_per_hour"] if is_equal else other["total_usd"] / row["hours"])
        against.append(
            _against(owned, other["name"], per_hour, min(hours_per_month, HOURS_PER_MONTH), other["rank"], is_equal)
        )
    for name, fee_usd in fees(services(study)).items() if runs_per_month else ():
        against.append(_against(owned, name, fee_usd / row["hours"], hours_per_month))
    total_usd = sum(usd.values())
    words = f"{say_cost(total_usd)} and {say_seconds(row['wall_s'])} for this run"
    return replace(
        found, rank=row["rank"], hours=row["hours"], usd=usd, total_usd=total_usd, against=tuple(against), words=words
    )


def _against(
    owned: Owned,
    name: str,
    usd_per_hour: float,
    hours_per_month: float,
    rank: int | None = None,
    is_equal: bool = False,
) -> Against:
    """When an owned machine pays back against what `usd_per_hour` buys elsewhere of the work of its hour."""
    months = break_even_months(owned, rent_usd_per_h=usd_per_hour, hours_per_month=hours_per_month)
    return Against(rank, name, is_equal, usd_per_hour, break_even_hours(owned, usd_per_hour), months, hours_per_month)


def years_of(
    rows: Sequence[Mapping[str, Any]], view: Mapping[str, Any], study: Study, runs_per_month: float
) -> YearsView:
    """What a project of so many runs a month comes to, in a year and in three."""
    ways: dict[str, Way] = {}
    notes: list[str] = []
    for kind in RENTED:
        row = best_of([row for row in rows if row["kind"] == kind])
        if row is not None:
            ways[f"rent {row['name']}"] = Way(row["total_usd"])
    for owned, found in zip(study.own, view["own"], strict=True):
        if found.hours is None:
            continue
        name = f"{'buy' if owned.price_usd else 'own'} {found.name}"
        ways[name] = own_way(owned, found.hours)
        busy = found.hours * runs_per_month
        if busy > HOURS_PER_MONTH:
            notes.append(f"{name}: {busy:,.0f} hours a month are more than one machine has")
    ways |= {name: Way(fee_usd) for name, fee_usd in fees(view["managed"]).items()}
    yearly = yearly_usd(ways, runs_per_month)
    dearest = max(yearly.values(), default=0.0)
    return YearsView(
        runs_per_month,
        {name: saving(usd, dearest)._asdict() for name, usd in yearly.items()},
        yearly,
        yearly_usd(ways, runs_per_month, 3),
        notes,
    )
