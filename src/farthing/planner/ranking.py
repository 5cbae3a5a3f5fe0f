"""The order of plans: the one to take first, then by dollars, the sooner where estimates can't
tell; each with its why.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from farthing.planner.types import OLD_PRICE_DAYS, Plan
from farthing.units import say_usd

TIE, TIE_USD = 0.05, 0.01  # dollars closer than either are not told apart by estimates
FRESHER_WITHIN = 0.20  # an old price is not taken where a fresher one costs so much more at most


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """The first is the one to take: the cheapest at a price that can be had. Then by dollars, the
    sooner among those that can't be told apart, and last what has no price.
    """
    ordered = sorted(plans, key=_key)
    soonest, front = math.inf, set[int]()
    for number, plan in enumerate(ordered):
        if plan.wall_s < soonest and plan.is_priced:
            soonest = plan.wall_s
            front.add(number)
    numbers = [number for number, plan in enumerate(ordered) if plan.is_priced]
    priced = [ordered[number] for number in numbers]
    in_order = _by_dollars(numbers, ordered)
    if priced:
        first = numbers[_first_that_can_be_had(priced)]
        in_order = [first, *(number for number in in_order if number != first)]
    in_order += [number for number, plan in enumerate(ordered) if not plan.is_priced]
    best = ordered[in_order[0]] if in_order else None
    words = _why_first(best, priced) if best is not None else ""
    return [
        ordered[n]._replace(on_front=n in front, why=words if i == 0 else _why(ordered[n], best))
        for i, n in enumerate(in_order)
    ]


def _key(plan: Plan) -> tuple[object, ...]:
    offer = plan.offer
    name = offer.provider, offer.gpu, str(offer.n_gpus), offer.region, offer.zone, offer.kind
    return plan.total_usd, plan.wall_s, *name, offer.instance


def _first_that_can_be_had(priced: Sequence[Plan]) -> int:
    """Of those near the cheapest that can be had the soonest, one GPU before several; `priced` has
    the cheapest first. Where nothing can be had: the cheapest in the worst case of its range.
    """
    can = [n for n, plan in enumerate(priced) if _can_be_had(plan)]
    nearly = [n for n, plan in enumerate(priced) if _can_be_had(plan, 2 * OLD_PRICE_DAYS)]
    every = range(len(priced))

    def worst(n: int) -> tuple[object, ...]:
        return priced[n].on.is_tight, priced[n].usd_range.high, n

    first = min(nearly or every, key=worst)
    if can and not (nearly and priced[first].usd_range.high < priced[can[0]].total_usd):
        near = itertools.takewhile(lambda n: priced[n].total_usd <= _most(priced[can[0]]), can)
        first = min(near, key=lambda n: (priced[n].recipe.n_gpus > 1, priced[n].wall_s, n))
    if priced[first].has_old_price:
        most = (1 + FRESHER_WITHIN) * priced[first].total_usd
        fresh = [n for n in every if not priced[n].has_old_price and priced[n].total_usd <= most]
        fresh = [n for n in fresh if priced[first].on.is_tight or not priced[n].on.is_tight]
        first = min(fresh, key=lambda n: (n not in can, n), default=first)
    return first


def _most(plan: Plan) -> float:
    """The dollars that can't be told from a plan's."""
    return max(plan.total_usd * (1 + TIE), plan.total_usd + TIE_USD) + 1e-9


def _can_be_had(plan: Plan, most_days: int = OLD_PRICE_DAYS) -> bool:
    """Whether the run can be had for its dollars: in memory that is surely enough, at a firm price,
    without a pack or deposit that is more than it needs, before the machine is taken back, and with
    what pip installs by itself.
    """
    is_paid_by_use = plan.up_front_usd <= (1 + TIE) * plan.total_usd + 0.01
    is_kept = plan.hours_range.high <= plan.offer.billing.most_hours
    is_fresh = plan.is_users_price or plan.price_age_days <= most_days
    is_firm = is_fresh and not plan.is_from_price
    is_simple = is_kept and not plan.on.machine.host_note
    return is_firm and is_paid_by_use and is_simple and not plan.on.is_tight


def _by_dollars(numbers: Sequence[int], ordered: Sequence[Plan]) -> list[int]:
    found: list[int] = []
    while len(found) < len(numbers):
        rest = numbers[len(found) :]
        most = _most(ordered[rest[0]])
        n_near = sum(1 for n in rest if ordered[n].total_usd <= most)
        found += sorted(rest[:n_near], key=lambda n: (ordered[n].wall_s, n))
    return found


def _why(plan: Plan, first: Plan | None) -> str:
    if not plan.is_priced or first is None:
        return "no price is given for it (where.usd_per_hour)"
    more = plan.total_usd / first.total_usd - 1 if first.total_usd else 0.0
    faster = first.wall_s / plan.wall_s
    words = f"{more:+.0%} dollars" if abs(more) >= 0.005 else "the same dollars"
    if abs(faster - 1) < 0.05:
        return f"{words} against the first, as fast"
    pace = f"{faster:.1f} x as fast" if faster >= 1 else f"{1 / faster:.1f} x as slow"
    return f"{words} against the first, {pace}"


def _why_first(first: Plan, priced: Sequence[Plan]) -> str:
    if not first.is_priced:
        return _why(first, None)
    cheaper = [plan for plan in priced if plan.total_usd < first.total_usd]
    can = [plan for plan in cheaper if _can_be_had(plan)]
    words = "the cheapest"
    if can:
        better = "sooner" if first.wall_s < can[0].wall_s else "on one GPU"
        words = f"within {TIE:.0%} or a cent of the cheapest ({say_usd(can[0].total_usd)}), which "
        words += f"estimates can't tell apart, and {better}"
    if any(plan.on.is_tight for plan in cheaper):
        words += " that surely fits"
    if any(not plan.on.is_tight and not _can_be_had(plan) for plan in cheaper):
        words += " at a price and on a machine that can simply be had"
    return words
