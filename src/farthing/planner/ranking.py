"""The order of plans: the one to take first, then by dollars, the sooner where estimates can't
tell; each with its why.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from farthing.planner.types import OLD_PRICE_DAYS, Plan, up_front
from farthing.prices.offers import Offer
from farthing.units import say_usd

TIE, TIE_USD = (
    0.05,
    0.01,
)  # dollars closer than either are not told apart by estimates that share their error


FRESHER_WITHIN = 0.2
"""The first choice rests on no old price where a fresh one costs at most this much more."""


class _Placed(NamedTuple):
    """A plan with what it is ranked by, worked out once."""

    usd: float
    wall_s: float
    name: tuple[str, ...]
    plan: Plan
    is_priced: bool


def _placed(plan: Plan) -> _Placed:
    return _Placed(plan.total_usd, plan.wall_s, _name_key(plan.offer), plan, plan.place.is_priced)


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """The first is the one to take: the cheapest at a price that can be had. Each says why it
    stands there.

    Then by dollars, and last what has no price. Among dollars that can't be told apart the sooner
    comes first.
    """
    ordered = sorted((_placed(plan) for plan in plans), key=lambda one: one[:3])
    soonest, front = math.inf, set()
    for one in ordered:
        if one.wall_s < soonest and one.is_priced:
            soonest = one.wall_s
            front.add(id(one.plan))
    priced = [one for one in ordered if one.is_priced]
    in_order = _by_dollars(priced)
    first = _first_that_can_be_had(priced)
    if first is not None:
        in_order = [first, *(one for one in in_order if one is not first)]
    in_order += [one for one in ordered if not one.is_priced]
    return [
        _said(one.plan, id(one.plan) in front, _why(one, in_order[0], ordered, i == 0))
        for i, one in enumerate(in_order)
    ]


def _said(plan: Plan, on_front: bool, why: str) -> Plan:
    """The plan with what ranking says of it: `dataclasses.replace`, in a fifth of its time, of
    which ten thousand take most.
    """
    found = object.__new__(Plan)
    found.__dict__.update(plan.__dict__, on_front=on_front, why=why)
    return found


def _first_that_can_be_had(priced: Sequence[_Placed]) -> _Placed | None:
    """Of those near the cheapest that can be had the soonest, one GPU before several; `priced` has
    the cheapest first.

    A price that is a little old comes first where the worst case of its range is less than what can
    be had for certain. Where nothing can be had: the cheapest in the worst of the cases that its
    range holds.
    """
    can = [one for one in priced if _can_be_had(one.plan)]
    nearly = [one for one in priced if _can_be_had(one.plan, 2 * OLD_PRICE_DAYS)]
    at_worst = min(
        nearly or priced, key=lambda one: (one.plan.is_tight, _high(one), one.name), default=None
    )
    if not can or (nearly and at_worst is not None and _high(at_worst) < can[0].usd):
        return _fresher(at_worst, priced)
    near = itertools.takewhile(lambda one: one.usd <= _most(can[0]), can)
    return min(near, key=lambda one: (one.plan.recipe.n_gpus > 1, one.wall_s, one.usd, one.name))


def _fresher(one: _Placed | None, priced: Sequence[_Placed]) -> _Placed | None:
    """The cheapest plan at a fresh price within reach of one whose price is old; else that one."""
    if one is None or not one.plan.place.has_old_price:
        return one
    most = (1 + FRESHER_WITHIN) * one.usd
    fresh = (
        each
        for each in priced
        if not each.plan.place.has_old_price
        and each.usd <= most
        and each.plan.is_tight <= one.plan.is_tight
    )
    return next(fresh, one)


def _high(one: _Placed) -> float:
    return one.plan.usd_range.high


def _most(one: _Placed) -> float:
    """The dollars that can't be told from a plan's."""
    return max(one.usd * (1 + TIE), one.usd + TIE_USD) + 1e-9


def _can_be_had(plan: Plan, most_days: int = OLD_PRICE_DAYS) -> bool:
    """Whether the run can be had for its dollars: in memory that is surely enough, at a firm price,
    without a pack or deposit that is more than it needs, before the machine is taken back, and with
    what pip installs by itself."""
    is_paid_by_use = up_front(plan) <= (1 + TIE) * plan.total_usd + 0.01
    is_simple = plan.hours_range.high <= plan.offer.billing.most_hours and not plan.place.host_note
    place = plan.place
    is_firm = not place.is_from_price and (
        place.is_given_price or place.price_age_days <= most_days
    )
    return is_firm and is_paid_by_use and is_simple and not plan.is_tight


def _by_dollars(ordered: Sequence[_Placed]) -> list[_Placed]:
    found: list[_Placed] = []
    start = 0
    while start < len(ordered):
        most = _most(ordered[start])
        end = next((i for i in range(start, len(ordered)) if ordered[i].usd > most), len(ordered))
        found += sorted(ordered[start:end], key=lambda one: (one.wall_s, one.usd, one.name))
        start = end
    return found


def _why(one: _Placed, first: _Placed, ordered: Sequence[_Placed], is_first: bool) -> str:
    if not one.is_priced:
        return "no price is given for it (where.usd_per_hour)"
    if is_first:
        return _why_first(one, ordered)
    more = one.usd / first.usd - 1 if first.usd else 0.0
    faster = first.wall_s / one.wall_s
    words = f"{more:+.0%} dollars" if abs(more) >= 0.005 else "the same dollars"
    if abs(faster - 1) < 0.05:
        return f"{words} against the first, as fast"
    return f"{words} against the first, " + (
        f"{faster:.1f} x as fast" if faster >= 1 else f"{1 / faster:.1f} x as slow"
    )


def _why_first(one: _Placed, ordered: Sequence[_Placed]) -> str:
    cheaper = [o for o in ordered if o.is_priced and o.usd < one.usd]
    can_be_had = [o for o in cheaper if _can_be_had(o.plan)]
    words = "the cheapest"
    if can_be_had:
        usd = say_usd(can_be_had[0].usd)
        better = "sooner" if one.wall_s < can_be_had[0].wall_s else "on one GPU"
        words = (
            f"within {TIE:.0%} or a cent of the cheapest ({usd}), which estimates can't tell apart,"
            f" and {better}"
        )
    if any(o.plan.is_tight for o in cheaper):
        words += " that surely fits"
    if any(not o.plan.is_tight and not _can_be_had(o.plan) for o in cheaper):
        words += " at a price and on a machine that can simply be had"
    return words


def _name_key(offer: Offer) -> tuple[str, ...]:
    return (
        offer.provider,
        offer.gpu,
        str(offer.n_gpus),
        offer.region,
        offer.zone,
        offer.kind,
        offer.instance,
    )
